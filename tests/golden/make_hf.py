"""make_hf.py - makes tiny GPT-2, Llama and DeepSeek-V3 files as Hugging Face's transformers saves them, with their logits
and gradients
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_hf.py OUT [NAME]   writes the folders and files below into folder OUT; only folder NAME
        python3 make_hf.py --check DIR  loads each folder of DIR that holds a config.json with transformers and compares
                                        its logits with those in logits.bin beside it, as test_gpt --save writes them
Needs transformers 5, safetensors and torch; the files' bytes may differ with other versions.

FILES
    hf_gpt2/            GPT-2, tied, f32, one file
    hf_llama/           Llama, 6 heads and 2 of keys, its own head, f32, several files and an index
    hf_mixtral/         Mixtral, 3 experts of which a token uses 2, f32, one file
    hf_llama_bf16/      Llama, 4 heads and 4 of keys, tied, bf16, one file
    hf_deepseek/        DeepSeek-V3, latent attention, a dense layer and two with 8 experts in 4 groups, f32, one file
    hf_deepseek_mtp/    the same without a latent of queries and with two modules of multi-token prediction, under the
                        names of DeepSeek's files; transformers' decoder layers, put together by class Mtp below
    hf_*/vectors.bin    its results, computed in float64 from the file's weights: arrays in make_gpt2.py's format
    llmc_v3.bin, llmc_v5.bin        the weights of hf_gpt2 as llm.c's model file, f32 and bf16, the vocabulary padded
    llmc_v3.vectors.bin, ...        to 64, and their logits and loss: another eps, and rounded weights
ARRAYS
    ids, labels (B,T)   -1 is ignored
    logits (B,T,V), loss
    mtp_loss, mtp_weight    of hf_deepseek_mtp: the mean of the modules' losses, which the gradients include with this
                        weight; labels of a module are the labels k positions later, -1 beyond the end
    grad.NAME           of the loss, under the names and shapes of examples/gpt.h
"""
import os
import struct
import sys

import numpy as np
import torch
from make_gpt2 import write_golden

B, T = 2, 11


IDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def gpt2_config(eps):
    from transformers import GPT2Config
    return GPT2Config(vocab_size=61, n_positions=24, n_embd=16, n_layer=2, n_head=4, layer_norm_epsilon=eps,
                      resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **IDS)


def models():
    """name -> (config, dtype, largest shard)"""
    from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig
    llama = dict(num_hidden_layers=2, max_position_embeddings=24, **IDS)
    wide = LlamaConfig(vocab_size=67, hidden_size=24, intermediate_size=40, num_attention_heads=6,
                       num_key_value_heads=2, rms_norm_eps=1e-2, tie_word_embeddings=False,
                       rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **llama)
    tied = LlamaConfig(vocab_size=53, hidden_size=16, intermediate_size=24, num_attention_heads=4,
                       num_key_value_heads=4, rms_norm_eps=1e-6, tie_word_embeddings=True, **llama)
    mixtral = MixtralConfig(vocab_size=59, hidden_size=16, intermediate_size=24, num_attention_heads=4,
                            num_key_value_heads=2, rms_norm_eps=1e-2, tie_word_embeddings=False, num_local_experts=3,
                            num_experts_per_tok=2, sliding_window=None,
                            rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **llama)
    deepseek = dict(vocab_size=37, hidden_size=16, intermediate_size=22, moe_intermediate_size=6, num_attention_heads=4,
                    num_key_value_heads=4, n_shared_experts=2, n_routed_experts=8, kv_lora_rank=6, qk_rope_head_dim=4,
                    qk_nope_head_dim=5, v_head_dim=3, n_group=4, topk_group=2, num_experts_per_tok=3,
                    max_position_embeddings=24, rms_norm_eps=1e-2, first_k_dense_replace=1, **IDS)
    v3 = DeepseekV3Config(num_hidden_layers=3, q_lora_rank=7, routed_scaling_factor=2.5, num_mtp_layers=1,
                          rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 6.0, "beta_fast": 4, "beta_slow": 1,
                                           "original_max_position_embeddings": 8, "mscale": 0.8, "mscale_all_dim": 1.5},
                          **deepseek)
    mtp = DeepseekV3Config(num_hidden_layers=1, q_lora_rank=None, routed_scaling_factor=1.5, norm_topk_prob=False,
                           num_mtp_layers=2, tie_word_embeddings=True, **deepseek)
    for config in v3, mtp:
        config._experts_implementation = "eager"
    return {"hf_mixtral": (mixtral, torch.float32, "1GB"),
            "hf_deepseek": (v3, torch.float32, "1GB"), "hf_deepseek_mtp": (mtp, torch.float32, "1GB"),
            "hf_gpt2": (gpt2_config(1e-3), torch.float32, "1GB"), "hf_llama": (wide, torch.float32, "20KB"),
            "hf_llama_bf16": (tied, torch.bfloat16, "1GB")}


def make_model(config, dtype):
    """A model in which every weight matters: none is near zero, gains are not 1, biases not 0."""
    from transformers import DeepseekV3ForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM
    torch.manual_seed(len(config.model_type))
    model = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM, "deepseek_v3": DeepseekV3ForCausalLM,
             "mixtral": MixtralForCausalLM}[config.model_type](config)
    if config.model_type == "deepseek_v3" and config.num_mtp_layers > 1:
        model.mtp = torch.nn.ModuleList(Mtp(model, k) for k in range(config.num_mtp_layers))
    with torch.no_grad():
        for name, p in model.named_buffers():
            if "correction_bias" in name:
                p.copy_(torch.randn(p.shape) * 0.3)
        for name, p in model.named_parameters():
            gain = p.dim() == 1 and name.endswith("weight")
            p.copy_((1 if gain else 0) + torch.randn(p.shape) * (0.35 if p.dim() > 1 else 0.2))
        for p in model.parameters():    # but not buffers, which hold the angles
            p.data = p.data.to(dtype)
    return model.eval()


class Mtp(torch.nn.Module):
    """A module of multi-token prediction (arXiv:2412.19437, section 2.2), concatenated as in DeepSeek's files."""
    def __init__(self, model, k):
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm
        super().__init__()
        c = model.config
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.layer = DeepseekV3DecoderLayer(c, c.num_hidden_layers + k)

    def forward(self, model, h, ids):
        e = model.model.embed_tokens(ids)
        x = self.eh_proj(torch.cat([self.enorm(e), self.hnorm(h)], -1))
        at = torch.arange(ids.shape[1])[None]
        return self.norm(self.layer(x, position_embeddings=model.model.rotary_emb(x, at), attention_mask=None,
                                    position_ids=at))


DEEPSEEK_NAMES = {
    "self_attn.q_a_proj": "attn.q_a", "self_attn.q_a_layernorm": "attn.q_a_norm", "self_attn.q_b_proj": "attn.q_b",
    "self_attn.q_proj": "attn.q", "self_attn.kv_a_proj_with_mqa": "attn.kv_a",
    "self_attn.kv_a_layernorm": "attn.kv_a_norm", "self_attn.kv_b_proj": "attn.kv_b", "self_attn.o_proj": "attn.proj",
    "mlp.gate.weight": "moe.router.weight", "mlp.experts.gate_up_proj": "moe.gate_up.weight",
    "mlp.experts.down_proj": "moe.proj.weight", "mlp.shared_experts.": "mlp.", "down_proj": "proj",
    "post_attention_layernorm": "ln_2", "input_layernorm": "ln_1",
}


def deepseek_names(model):
    L = model.config.num_hidden_layers
    grads = {}
    for name, p in model.named_parameters():
        name = name.removeprefix("model.").replace("embed_tokens", "wte").replace("layers.", "h.")
        for k in range(len(getattr(model, "mtp", []))):
            name = name.replace(f"mtp.{k}.layer.", f"h.{L + k}.").replace(f"mtp.{k}.", f"h.{L + k}.mtp.")
        for theirs, own in DEEPSEEK_NAMES.items():
            name = name.replace(theirs, own)
        grads["ln_f.weight" if name == "norm.weight" else name] = p.grad
    for name, g in grads.items():
        if ".gate_proj" in name:
            yield name.replace("gate_proj", "gate_up"), torch.stack([g, grads[name.replace("gate_proj", "up_proj")]])
        elif ".up_proj" not in name:
            yield name, g


def own_names(model):
    """(name and shape of examples/gpt.h, gradient) of every parameter."""
    c = model.config
    if c.model_type == "deepseek_v3":
        yield from deepseek_names(model)
        return
    H = c.num_attention_heads
    for name, p in model.named_parameters():
        g = p.grad
        name = name.removeprefix("transformer.").removeprefix("model.")
        name = name.replace("embed_tokens", "wte").replace("layers.", "h.")
        if c.model_type == "gpt2":
            if ".c_" in name and g.dim() == 2:
                g = g.t()
            if ".c_attn." in name:
                for part, third in zip("qkv", g.chunk(3)):
                    shape = (H, -1, third.shape[-1]) if third.dim() == 2 else (H, -1)
                    yield name.replace("c_attn", part), third.reshape(shape)
                continue
            yield name.replace("c_proj", "proj").replace("c_fc", "fc"), g
            continue
        name = name.replace("input_layernorm", "ln_1").replace("post_attention_layernorm", "ln_2")
        if name == "norm.weight":
            name = "ln_f.weight"
        for part in "qkv":
            if f".{part}_proj." in name:
                heads = H if part == "q" else c.num_key_value_heads
                g = g.reshape(heads, -1, g.shape[1])
                name = name.replace(f"self_attn.{part}_proj", f"attn.{part}")
        if "mlp.gate.weight" in name:
            name = name.replace("mlp.gate", "moe.router")
        if "mlp.experts.gate_up_proj" in name:
            yield name.replace("mlp.experts.gate_up_proj", "moe.gate_up.weight"), g.reshape(g.shape[0], 2, -1, g.shape[2])
        elif "mlp.experts.down_proj" in name:
            yield name.replace("mlp.experts.down_proj", "moe.proj.weight"), g
        elif "gate_proj" in name:
            up = dict(model.named_parameters())["model.layers." + name[2:].replace("gate_proj", "up_proj")].grad
            yield name.replace("gate_proj", "gate_up"), torch.stack([g, up])
        elif "up_proj" not in name:
            yield name.replace("self_attn.o_proj", "attn.proj").replace("down_proj", "proj"), g


class Norm(torch.nn.Module):
    """RMSNorm in float64; transformers' RMSNorm computes in float32."""
    def __init__(self, old):
        super().__init__()
        self.weight, self.eps = old.weight, old.variance_epsilon

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(torch.nn.Module):
    """Cosines and sines in float64; transformers computes them in float32."""
    def __init__(self, config):
        super().__init__()
        self.dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.theta = config.rope_parameters["rope_theta"]
        self.turn = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        self.factor = 1.0
        if config.rope_parameters["rope_type"] == "yarn":
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
            narrow, torch.float, torch.float32 = (torch.float, torch.float32), torch.float64, torch.float64
            torch.set_default_dtype(torch.float64)
            self.turn, self.factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
            torch.float, torch.float32 = narrow
            torch.set_default_dtype(torch.float32)

    def forward(self, x, position_ids):
        angles = (position_ids[..., None] * self.turn).repeat(1, 1, 2)
        return angles.cos() * self.factor, angles.sin() * self.factor


class Router(torch.nn.Module):
    """Mixtral's router in float64; transformers' softmax computes in float32."""
    def __init__(self, old):
        super().__init__()
        self.weight, self.top_k = old.weight, old.top_k

    def forward(self, x):
        logits = x.reshape(-1, x.shape[-1]) @ self.weight.t()
        gates, experts = logits.softmax(-1).topk(self.top_k)
        return logits, gates / gates.sum(-1, keepdim=True), experts


def in_float64(model):
    model = model.to(torch.float64)
    if model.config.model_type == "mixtral":
        model.config._experts_implementation = "eager"
        for layer in model.model.layers:
            layer.mlp.gate = Router(layer.mlp.gate)
    if model.config.model_type in ("llama", "mixtral"):
        model.model.rotary_emb = Rotary(model.config)
        model.model.norm = Norm(model.model.norm)
        for layer in model.model.layers:
            layer.input_layernorm = Norm(layer.input_layernorm)
            layer.post_attention_layernorm = Norm(layer.post_attention_layernorm)
    if model.config.model_type == "deepseek_v3":
        model.model.rotary_emb = Rotary(model.config)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__ == "DeepseekV3RMSNorm":
                    setattr(parent, name, Norm(child))
    return model


def mtp_loss(model, hidden, ids, labels):
    """The mean of the modules' losses."""
    T, h, losses = labels.shape[1], hidden, []
    for k, module in enumerate(model.mtp):
        # the last k + 1 positions have no token so far ahead: they have no label, and no later position reads them
        h = module(model, h, torch.nn.functional.pad(ids[:, k + 1:], (0, k + 1)))
        losses.append(torch.nn.functional.cross_entropy(
            model.lm_head(h)[:, :T - k - 1].reshape(-1, model.config.vocab_size), labels[:, k + 1:].reshape(-1),
            ignore_index=-1, reduction="sum"))
    return sum(losses) / len(losses) / (labels >= 0).sum()


def vectors(model, grads=True):
    """Logits, loss and gradients in float64, from the weights of the file."""
    ids = torch.arange(20).reshape(2, 10)
    deepseek = model.config.model_type == "deepseek_v3"
    plain = model.float()(input_ids=ids, use_cache=False).logits
    model = in_float64(model)
    narrow = torch.float32
    if deepseek:
        torch.float32 = torch.float64    # the router computes in it
    apart = (plain - model(input_ids=ids, use_cache=False).logits).abs().max().item()
    print(f"float32 and float64: logits differ by {apart:.1e}")
    assert apart < 1e-4
    V = model.config.vocab_size
    generator = torch.Generator().manual_seed(V)
    shape = (2, 12) if deepseek else (B, T)    # 12: for context parallelism
    ids = torch.randint(V, shape, generator=generator)
    labels = torch.randint(V, shape, generator=generator)
    labels[0, 3] = labels[1, 0] = -1
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state if hasattr(model, "mtp") else None
    logits = model(input_ids=ids, use_cache=False).logits if hidden is None else model.lm_head(hidden)
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), ignore_index=-1)
    out = {"ids": ids, "labels": labels, "logits": logits, "loss": loss}
    total = loss
    if hidden is not None:
        out |= {"mtp_loss": mtp_loss(model, hidden, ids, labels), "mtp_weight": 0.3}
        total = loss + 0.3 * out["mtp_loss"]
    total.backward()
    torch.float32 = narrow
    return out | ({"grad." + n: g for n, g in own_names(model)} if grads else {})


def write_llmc(path, model, version, padded):
    """llm.c's file: a header of 256 int32, then each tensor of all layers together, matrices (out, in)."""
    c = model.config
    P = {name.removeprefix("transformer."): p.detach().float() for name, p in model.named_parameters()}

    def layers(name):
        each = [P[f"h.{i}.{name}"] for i in range(c.n_layer)]
        return torch.stack([p.t() if p.dim() == 2 else p for p in each])

    wte = torch.zeros(padded, c.n_embd)
    wte[:c.vocab_size] = P["wte.weight"]
    kinds = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight",
             "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight",
             "mlp.c_proj.bias"]
    tensors = [wte, P["wpe.weight"], *map(layers, kinds), P["ln_f.weight"], P["ln_f.bias"]]
    head = [20240326, version, c.n_positions, c.vocab_size, c.n_layer, c.n_head, c.n_embd, padded]
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", *head, *[0] * (256 - len(head))))
        for t in tensors:
            t = t.contiguous()
            f.write((t.numpy() if version == 3 else t.bfloat16().view(torch.int16).numpy()).tobytes())


def save_with_mtp(model, folder):
    """transformers saves no modules: adds their tensors, named as those of further layers."""
    from safetensors.torch import load_file, save_file
    L, file = model.config.num_hidden_layers, os.path.join(folder, "model.safetensors")
    modules = model.mtp
    del model.mtp
    model.save_pretrained(folder)
    tensors = load_file(file)
    for k, module in enumerate(modules):
        for name, t in module.state_dict().items():
            name = "shared_head.norm.weight" if name == "norm.weight" else name.removeprefix("layer.")
            prefix = f"model.layers.{L + k}."
            if name.endswith("experts.gate_up_proj"):
                for e, both in enumerate(t):
                    for which, half in zip(("gate", "up"), both.chunk(2)):
                        tensors[f"{prefix}mlp.experts.{e}.{which}_proj.weight"] = half.contiguous()
            elif name.endswith("experts.down_proj"):
                for e, one in enumerate(t):
                    tensors[f"{prefix}mlp.experts.{e}.down_proj.weight"] = one.contiguous()
            else:
                tensors[prefix + name] = t.contiguous()
        tensors[f"model.layers.{L + k}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, file, metadata={"format": "pt"})
    model.mtp = modules


def make(out, only=None):
    for name, (config, dtype, shard) in models().items():
        if only and name != only:
            continue
        model = make_model(config, dtype)
        folder = os.path.join(out, name)
        if hasattr(model, "mtp"):
            save_with_mtp(model, folder)
        else:
            model.save_pretrained(folder, max_shard_size=shard)
        if os.path.exists(os.path.join(folder, "generation_config.json")):
            os.remove(os.path.join(folder, "generation_config.json"))
        for file in os.listdir(folder):
            os.chmod(os.path.join(folder, file), 0o644)
        write_golden(os.path.join(folder, "vectors.bin"), vectors(model))
    if only:
        return
    for version, dtype in (3, torch.float32), (5, torch.bfloat16):
        model = make_model(gpt2_config(1e-5), dtype)    # llm.c knows no other
        write_llmc(os.path.join(out, f"llmc_v{version}.bin"), model, version, 64)
        write_golden(os.path.join(out, f"llmc_v{version}.vectors.bin"), vectors(model, grads=False))


def read_golden(path):
    data, out = open(path, "rb").read(), {}
    at = data.index(b"\n") + 1
    while at < len(data):
        end = data.index(b"\n", at)
        name, *shape = data[at:end].decode().split(" ")
        shape = [int(d) for d in shape]
        count = int(np.prod(shape, dtype=int))
        out[name] = np.frombuffer(data, "<f8", count, end + 1).reshape(shape)
        at = end + 1 + 8 * count
    return out


def check(top):
    """Prints a line for each folder, which begins with "ok" or "WRONG"."""
    from transformers import AutoModelForCausalLM
    for name in sorted(os.listdir(top)):
        folder = os.path.join(top, name)
        if not os.path.exists(os.path.join(folder, "config.json")):
            continue
        try:
            model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
            model.config._experts_implementation = "eager"     # the others have no float64
            want = read_golden(os.path.join(folder, "logits.bin"))
            with torch.no_grad():
                got = model(input_ids=torch.tensor(want["ids"]).long()).logits.numpy()
            apart = np.abs(got - want["logits"]).max()
            strange = {k: v for k, v in info.items() if v and k != "error_msgs"}
            good = apart < 1e-5 * np.abs(want["logits"]).max() and not strange     # norms go through float32
            print("ok" if good else "WRONG", name, type(model).__name__, f"logits differ by {apart:.1e}", strange or "")
        except Exception as error:
            print("WRONG", name, repr(error).replace("\n", " "))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3 and sys.argv[1] == "--check":
        check(sys.argv[2])
    elif len(sys.argv) in (2, 3):
        make(*sys.argv[1:])
    else:
        sys.exit(__doc__)
