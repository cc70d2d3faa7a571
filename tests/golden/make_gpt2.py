"""make_gpt2.py - makes the stored GPT-2 training vectors with PyTorch in float64
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_gpt2.py OUT        writes three files into folder OUT
        python3 make_gpt2.py --show FILE    prints any golden file as text
Needs torch 2.5 or later and numpy. The last bits (1e-16) may differ with another version of torch
or another processor.

FILES
    gpt2_tied.bin      AdamW, head = wte
    gpt2_untied.bin    AdamW, with an lm_head.weight
    gpt2_sgd.bin       tied, SGD with momentum; no gradients: the first are gpt2_tied's
FORMAT
    The line "golden 1", then arrays until the end of the file. An array is one text line, its name
    and its dimensions separated by single spaces (a scalar has none), and then its elements,
    row-major, as little-endian float64. golden.h reads it.
ARRAYS
    sizes              V T L C H F tied: vocabulary, positions, layers, width, heads, feed-forward
                       width, 0 or 1
    batch              steps micros B T_used
    optimizer          AdamW: beta1 beta2 eps weight_decay clip;     SGD: momentum weight_decay clip
    step.S.ids         (micros, B, T_used), S from 1
    step.S.labels      the same shape; -1 is ignored
    step.S.lr          learning rate of the step
    step.S.denom       the number of labels >= 0 in the step, by which its loss is divided
    step.S.loss        sum of cross entropies over all micro-batches / denom, before the update
    step.S.norm        norm of the accumulated gradient before clipping
    grad.NAME          gradient of the first step, before clipping, summed over its micro-batches
    param.NAME         value after the last step
NAMES, in order (initial values depend on the order)
    wte.weight (V,C), wpe.weight (T,C); per layer h.L.: ln_1.weight (C), ln_1.bias (C),
    attn.q.weight (H,D,C), attn.q.bias (H,D), the same for attn.k and attn.v, attn.proj.weight
    (C,C), attn.proj.bias (C), ln_2.weight (C), ln_2.bias (C), mlp.fc.weight (F,C), mlp.fc.bias (F),
    mlp.proj.weight (C,F), mlp.proj.bias (C); then ln_f.weight (C), ln_f.bias (C); untied:
    lm_head.weight (V,C). A linear is y = x W^T + b. Weight decay: all but biases and layernorms.
INITIAL VALUES
    Element e of the p-th parameter, both from 0, is unit(p, e)/2, plus 1 for a layernorm's weight.
    unit() is below; it is integer arithmetic modulo 2^32, so every language gets the same bits.
THE KEY BIAS
    Its gradient is zero in exact arithmetic, because adding a constant to all scores does not change
    their softmax. AdamW gets a rounding error of about 1e-18, which it divides by eps = 1e-8. So
    param.h.L.attn.k.bias is reproducible only to 1e-11; all other parameters are to 1e-14.
"""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

V, T, L, C, H, FF = 17, 8, 2, 12, 3, 20
STEPS, MICROS, B, T_USED = 5, 2, 2, 7
MAX_LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
SGD_LR, MOMENTUM = 0.2, 0.9


def unit(p, e):
    """A value in [-0.5, 0.5): 20 bits of a 32-bit hash, exact in f32 as well."""
    h = (p * 2654435761 + e * 2246822519 + 374761393) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 2246822519) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 3266489917) & 0xFFFFFFFF
    h ^= h >> 16
    return (h >> 12) / 1048576.0 - 0.5


def units(p, *shape):
    """unit(p, 0), unit(p, 1), .. in that shape, float64."""
    count = int(np.prod(shape))
    return torch.tensor([unit(p, e) for e in range(count)], dtype=torch.float64).reshape(shape)


def write_golden(path, arrays):
    """arrays: name -> tensor, list or number."""
    with open(path, "wb") as f:
        f.write(b"golden 1\n")
        for name, value in arrays.items():
            if isinstance(value, torch.Tensor):
                value = value.detach().numpy()
            value = np.asarray(value, dtype="<f8", order="C")
            assert len(name) < 64 and not set(name) & set(" \n") and np.isfinite(value).all(), name
            f.write(" ".join([name, *map(str, value.shape)]).encode() + b"\n")
            f.write(value.tobytes())
    print(f"{path}: {len(arrays)} arrays, {os.path.getsize(path)} bytes")


def show(path):
    data = open(path, "rb").read()
    at = data.index(b"\n") + 1
    while at < len(data):
        end = data.index(b"\n", at)
        name, *shape = data[at:end].decode().split(" ")
        shape = [int(d) for d in shape]
        count = int(np.prod(shape, dtype=int))
        print(name, shape, *(f"{x:.17g}" for x in np.frombuffer(data, "<f8", count, end + 1)))
        at = end + 1 + 8 * count


def names_and_shapes(tied):
    D = C // H
    rows = [("wte.weight", (V, C)), ("wpe.weight", (T, C))]
    for l in range(L):
        h = f"h.{l}."
        rows += [(h + "ln_1.weight", (C,)), (h + "ln_1.bias", (C,))]
        for part in "qkv":
            rows += [(h + f"attn.{part}.weight", (H, D, C)), (h + f"attn.{part}.bias", (H, D))]
        rows += [(h + "attn.proj.weight", (C, C)), (h + "attn.proj.bias", (C,)),
                 (h + "ln_2.weight", (C,)), (h + "ln_2.bias", (C,)),
                 (h + "mlp.fc.weight", (FF, C)), (h + "mlp.fc.bias", (FF,)),
                 (h + "mlp.proj.weight", (C, FF)), (h + "mlp.proj.bias", (C,))]
    rows += [("ln_f.weight", (C,)), ("ln_f.bias", (C,))]
    return rows if tied else rows + [("lm_head.weight", (V, C))]


def make_params(tied):
    params = {}
    for p, (name, shape) in enumerate(names_and_shapes(tied)):
        base = 1.0 if "ln_" in name and name.endswith(".weight") else 0.0
        params[name] = torch.nn.Parameter(base + 0.5 * units(p, *shape))
    return params


def forward(P, ids):
    """ids (B,n) -> logits (B,n,V)."""
    n = ids.shape[1]

    def norm(x, name):
        return F.layer_norm(x, (C,), P[name + ".weight"], P[name + ".bias"], eps=1e-5)

    def heads(x, name):                                        # (B,n,C) -> (B,H,n,D)
        y = F.linear(x, P[name + ".weight"].reshape(C, C), P[name + ".bias"].reshape(C))
        return y.reshape(-1, n, H, C // H).transpose(1, 2)

    x = F.embedding(ids, P["wte.weight"]) + P["wpe.weight"][:n]
    for l in range(L):
        h = f"h.{l}."
        y = norm(x, h + "ln_1")
        q, k, v = (heads(y, h + f"attn.{part}") for part in "qkv")
        with sdpa_kernel(SDPBackend.MATH):              # the plain formula, no blocked kernel
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(-1, n, C)
        x = x + F.linear(y, P[h + "attn.proj.weight"], P[h + "attn.proj.bias"])
        y = F.linear(norm(x, h + "ln_2"), P[h + "mlp.fc.weight"], P[h + "mlp.fc.bias"])
        y = F.gelu(y, approximate="tanh")
        x = x + F.linear(y, P[h + "mlp.proj.weight"], P[h + "mlp.proj.bias"])
    return F.linear(norm(x, "ln_f"), P.get("lm_head.weight", P["wte.weight"]))


def step_data(step):
    """ids and labels (MICROS,B,T_USED): the next token of a rule with noise. About a fifth of the
    labels is ignored, and one full sequence in step 3, so that micro-batches have different weights
    and steps different denominators."""
    noise = units(1000 + step, MICROS, B, T_USED + 1)
    start = torch.arange(T_USED + 1) * 3 + torch.arange(MICROS * B).reshape(MICROS, B, 1) * 5 + step
    tokens = torch.where(noise > 0.3, ((noise + 0.5) * 1e4).long(), start) % V
    ids, labels = tokens[..., :-1].contiguous(), tokens[..., 1:].clone()
    labels[units(2000 + step, MICROS, B, T_USED) < -0.3] = -1
    if step == 3:
        labels[1, 0, :] = -1
    return ids, labels


def make_optimizer(kind, params):
    decayed = [p for name, p in params.items() if "ln_" not in name and not name.endswith(".bias")]
    others = [p for name, p in params.items() if "ln_" in name or name.endswith(".bias")]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=SGD_LR, momentum=MOMENTUM)
    return torch.optim.AdamW(groups, lr=MAX_LR, betas=BETAS, eps=EPS)


def train(kind, tied, clip):
    """All arrays of one file."""
    params = make_params(tied)
    optimizer = make_optimizer(kind, params)
    hyper = [MOMENTUM, DECAY, clip] if kind == "sgd" else [*BETAS, EPS, DECAY, clip]
    out = {"sizes": [V, T, L, C, H, FF, tied], "batch": [STEPS, MICROS, B, T_USED],
           "optimizer": hyper}
    norms = []
    for step in range(1, STEPS + 1):
        ids, labels = step_data(step)
        denom = int((labels >= 0).sum())
        lr = (SGD_LR if kind == "sgd" else MAX_LR) * step / STEPS
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = 0.0
        for micro in range(MICROS):
            logits = forward(params, ids[micro])
            part = F.cross_entropy(logits.reshape(-1, V), labels[micro].reshape(-1),
                                   reduction="sum", ignore_index=-1) / denom
            part.backward()
            loss += part.item()
        if step == 1 and kind == "adamw":
            grads = {"grad." + name: p.grad.clone() for name, p in params.items()}
        norm = torch.nn.utils.clip_grad_norm_(params.values(), clip).item()
        optimizer.step()
        norms.append(norm)
        print(f"  {kind} tied={tied} step {step} denom {denom} loss {loss:.6f} norm {norm:.6f}")
        out |= {f"step.{step}.ids": ids, f"step.{step}.labels": labels, f"step.{step}.lr": lr,
                f"step.{step}.denom": denom, f"step.{step}.loss": loss, f"step.{step}.norm": norm}
    assert min(norms) < clip < max(norms), "clipping must act in some steps and not in others"
    out |= grads if kind == "adamw" else {}
    return out | {"param." + name: p for name, p in params.items()}


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--show":
        return show(sys.argv[2])
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    for name, kind, tied, clip in (("gpt2_tied", "adamw", 1, 1.2), ("gpt2_untied", "adamw", 0, 1.2),
                                   ("gpt2_sgd", "sgd", 1, 1.2)):
        write_golden(os.path.join(sys.argv[1], name + ".bin"), train(kind, tied, clip))


if __name__ == "__main__":
    main()
