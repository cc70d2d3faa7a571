"""make_moe.py - makes the stored vectors of a mixture of experts with transformers in float64
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_moe.py OUT         writes OUT/moe.bin
        python3 make_gpt2.py --show OUT/moe.bin     prints it as text
Needs transformers 5, torch and numpy. The last bits (1e-16) may differ with other versions or another processor.

    Cases 0 and 1 are transformers' MixtralSparseMoeBlock, whose gates are divided by their sum. Case 2 is its experts
    with one expert a token, weighted by its probability (Switch). Cases 3 to 5 are DeepseekV3's router and experts,
    without its shared experts. transformers rounds the router's probabilities to float32; here float32 is float64 while
    it runs, so that all digits can be compared.
FORMAT
    As make_gpt2.py describes; golden.h reads it. cases: their number; case i's arrays are i.x, ...
ARRAYS
    k              experts of a token
    x (B,T,C), w (E,C), w1 (E,2,F,C) gate and up, w2 (E,C,F), dy (B,T,C)
    logits (B,T,E), gates (B,T,k), choices (B,T,k), y (B,T,C)
    cases 3 to 5: sigmoid 1, bias (E), groups, top_groups, raw 1 (gates not divided by their sum) or 0, scale; and
                   balance is of each token's scores divided by their sum
    balance_all    transformers' load_balancing_loss_func of all tokens
    balance (B)    the same of each sequence alone: E * sum over experts of f P, where f is the fraction of tokens that
                   chose the expert. dt_route divides the choices by k T instead, and takes the mean over sequences, so
                   balance is k times dt_route's.
    z              transformers' router_z_loss_func: the mean over tokens
    balance_weight, z_weight
    dx, dw, dw1, dw2    gradients of sum(y dy) + balance_weight mean(balance) / k + z_weight z
"""
import os
import sys

import torch
from make_gpt2 import write_golden
from transformers import DeepseekV3Config, MixtralConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts, DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

BALANCE, Z = 0.3, 0.2


def case(seed, B, T, C, F, E, k):
    g = torch.Generator().manual_seed(seed)
    config = MixtralConfig(hidden_size=C, intermediate_size=F, num_local_experts=E, num_experts_per_tok=k)
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).double().eval()
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.5)
    x = torch.randn(B, T, C, generator=g, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(B, T, C, generator=g, dtype=torch.float64)
    logits, gates, choices = block.gate(x)
    if k == 1:
        gates = torch.softmax(logits, -1).gather(-1, choices)
        y = block.experts(x.reshape(-1, C), choices, gates).reshape(B, T, C)
    else:
        y = block(x)
    each = logits.reshape(B, T, E)
    balance = [load_balancing_loss_func((each[b],), E, k) for b in range(B)]
    z = router_z_loss_func(each)
    ((y * dy).sum() + BALANCE * sum(balance) / B / k + Z * z).backward()
    e = block.experts
    return {
        "k": k, "x": x, "w": block.gate.weight, "w1": e.gate_up_proj.reshape(E, 2, F, C), "w2": e.down_proj, "dy": dy,
        "logits": each, "gates": gates.reshape(B, T, k), "choices": choices.reshape(B, T, k), "y": y,
        "balance_all": load_balancing_loss_func((logits,), E, k), "balance": torch.stack(balance), "z": z,
        "balance_weight": BALANCE, "z_weight": Z, "dx": x.grad, "dw": block.gate.weight.grad,
        "dw1": e.gate_up_proj.grad.reshape(E, 2, F, C), "dw2": e.down_proj.grad,
    }


def sigmoid_case(seed, B, T, C, F, E, k, groups, top_groups, norm, scale):
    g = torch.Generator().manual_seed(seed)

    def random(*shape, size=1.0):
        return torch.randn(*shape, generator=g, dtype=torch.float64) * size
    config = DeepseekV3Config(hidden_size=C, moe_intermediate_size=F, n_routed_experts=E, num_experts_per_tok=k,
                              n_group=groups, topk_group=top_groups, norm_topk_prob=norm, routed_scaling_factor=scale)
    config._experts_implementation = "eager"
    router, experts = DeepseekV3TopkRouter(config).double(), DeepseekV3Experts(config).double()
    with torch.no_grad():
        router.weight.copy_(random(E, C, size=0.5))
        router.e_score_correction_bias = random(E, size=0.3)
        experts.gate_up_proj.copy_(random(E, 2 * F, C, size=0.5))
        experts.down_proj.copy_(random(E, C, F, size=0.5))
    x, dy = random(B, T, C).requires_grad_(), random(B, T, C)
    logits, gates, choices = router(x)
    scores = logits.sigmoid()
    best = (scores + router.e_score_correction_bias).gather(1, choices).argsort(-1, descending=True)  # best first
    gates, choices = gates.gather(1, best), choices.gather(1, best)
    y = experts(x.reshape(-1, C), choices, gates).reshape(B, T, C)
    share = (scores / scores.sum(-1, keepdim=True)).reshape(B, T, E)
    chosen = torch.nn.functional.one_hot(choices.reshape(B, T * k), E).double().sum(1) / T
    balance = E * (chosen * share.mean(1)).sum(-1)
    z = router_z_loss_func(logits.reshape(B, T, E))
    ((y * dy).sum() + BALANCE * balance.mean() / k + Z * z).backward()
    return {
        "k": k, "sigmoid": 1, "bias": router.e_score_correction_bias, "groups": groups, "top_groups": top_groups,
        "raw": int(not norm), "scale": scale, "x": x, "w": router.weight,
        "w1": experts.gate_up_proj.reshape(E, 2, F, C), "w2": experts.down_proj, "dy": dy,
        "logits": logits.reshape(B, T, E), "gates": gates.reshape(B, T, k), "choices": choices.reshape(B, T, k), "y": y,
        "balance": balance, "z": z, "balance_weight": BALANCE, "z_weight": Z, "dx": x.grad, "dw": router.weight.grad,
        "dw1": experts.gate_up_proj.grad.reshape(E, 2, F, C), "dw2": experts.down_proj.grad,
    }


def main():
    rounds = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    cases = [case(1, 2, 16, 8, 6, 4, 2), case(2, 3, 8, 7, 5, 6, 3), case(3, 2, 16, 8, 6, 4, 1)]
    torch.Tensor.float = rounds
    torch.float32, narrow = torch.float64, torch.float32    # for the router's x.type(torch.float32)
    cases += [sigmoid_case(4, 2, 8, 6, 4, 8, 3, 4, 2, True, 2.5), sigmoid_case(5, 2, 7, 5, 4, 6, 2, 2, 1, False, 1.5),
              sigmoid_case(6, 2, 6, 4, 3, 4, 1, 1, 1, True, 1.0)]
    torch.float32 = narrow
    arrays = {"cases": len(cases)}
    for i, c in enumerate(cases):
        arrays |= {f"{i}.{name}": value for name, value in c.items()}
    write_golden(os.path.join(sys.argv[1], "moe.bin"), arrays)


if __name__ == "__main__":
    main()
