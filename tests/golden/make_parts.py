"""make_parts.py - makes tiny models with the parts of gpt_parts (examples/gpt.h) as transformers saves them
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_parts.py OUT       writes folders parts/NAME into folder OUT
Needs transformers 5.24, safetensors and torch; the files' bytes may differ with other versions.

FILES
    parts/llama3        RoPE scaling of Llama 3, grouped heads, its own head
    parts/yarn          RoPE scaling by YaRN, heads of another width than C/H
    parts/yarn_mscale   Mistral: YaRN with mscale and bounds that are not rounded, a sliding window in all layers
    parts/linear        Qwen 2: biases of q, k and v, linear RoPE scaling
    parts/qwen3         QK-norm, head_dim, tied
    parts/gemma3        QK-norm, a sliding window in two of three layers, a local theta, linear scaling in the global one
    parts/gemma2        soft-capping of scores and logits, a sliding window in every other layer
    parts/*/vectors.bin its results, computed in float64 from the file's weights, in the arrays of make_hf.py

A part is only tested if it matters: the bounds of RoPE scaling divide the pairs of a head, the window is shorter than the
sequence, and scores reach the soft cap.
"""
import os
import sys

import torch
from make_gpt2 import write_golden

B, T = 2, 12
IDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def models():
    """name -> config"""
    from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
                 max_position_embeddings=64, **IDS)

    def rope(theta, kind, **more):
        return {"rope_parameters": {"rope_theta": theta, "rope_type": kind, **more}}

    llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    yarn = dict(factor=4.0, beta_fast=4.0, beta_slow=1.0, original_max_position_embeddings=16)
    flat = dict(mscale=1.0, mscale_all_dim=0.6, truncate=False)
    gemma = dict(sizes, num_hidden_layers=3, head_dim=8, query_pre_attn_scalar=24, sliding_window=5)
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    gemma_rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
                  "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0}}
    return {
        "llama3": LlamaConfig(vocab_size=37, head_dim=16, tie_word_embeddings=False, **sizes,
                              **rope(500.0, "llama3", **llama3)),
        "yarn": LlamaConfig(vocab_size=35, head_dim=12, tie_word_embeddings=True, **sizes, **rope(100.0, "yarn", **yarn)),
        "yarn_mscale": MistralConfig(vocab_size=36, head_dim=12, tie_word_embeddings=False, sliding_window=4, **sizes,
                                     **rope(100.0, "yarn", **yarn, **flat)),
        "linear": Qwen2Config(vocab_size=34, tie_word_embeddings=False, **sizes, **rope(50.0, "linear", factor=2.5)),
        "qwen3": Qwen3Config(vocab_size=33, head_dim=6, tie_word_embeddings=True, **sizes, **rope(1000.0, "default")),
        "gemma3": Gemma3TextConfig(vocab_size=38, layer_types=layers, rope_parameters=gemma_rope, **gemma),
        "gemma2": Gemma2Config(vocab_size=39, layer_types=layers, attn_logit_softcapping=2.0,
                               final_logit_softcapping=3.0, **gemma, **rope(40.0, "default")),
    }


def model_of(config):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def random_model(config):
    """A model in which every weight matters: no gain is 1 and no bias 0."""
    torch.manual_seed(config.vocab_size)
    model = model_of(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            gain = name.endswith("norm.weight") and not config.model_type.startswith("gemma")
            p.copy_((1 if gain else 0) + torch.randn(p.shape) * (0.35 if p.dim() > 1 else 0.2))
    return model


def own_names(model):
    """(name and shape of examples/gpt.h, gradient) of every parameter."""
    c = model.config
    grads = {name.removeprefix("model."): p.grad for name, p in model.named_parameters()}
    gemma = c.model_type.startswith("gemma")
    norms = {"input_layernorm": "ln_1", "post_attention_layernorm": "attn.norm" if gemma else "ln_2",
             "pre_feedforward_layernorm": "ln_2", "post_feedforward_layernorm": "mlp.norm",
             "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm", "self_attn.o_proj": "attn.proj",
             "mlp.down_proj": "mlp.proj", "mlp.gate_proj": "mlp.gate_up", "self_attn.q_proj": "attn.q",
             "self_attn.k_proj": "attn.k", "self_attn.v_proj": "attn.v"}
    for name, g in grads.items():
        if "up_proj" in name:
            continue
        if "gate_proj" in name:
            g = torch.stack([g, grads[name.replace("gate_proj", "up_proj")]])
        for part in "qkv":
            if f".{part}_proj." in name:
                g = g.reshape(c.num_attention_heads if part == "q" else c.num_key_value_heads, -1, *g.shape[1:])
        for theirs, own in norms.items():
            name = name.replace(f".{theirs}.", f".{own}.")
        name = name.replace("embed_tokens", "wte").replace("layers.", "h.")
        yield "ln_f.weight" if name == "norm.weight" else name, g


def vectors(config, weights):
    """Logits, loss and gradients in float64. transformers computes norms, angles and softmax in float32, whatever the
    type of the model, so here float32 is another name of float64."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    model = model_of(config).double()
    model.load_state_dict({name: w.double() for name, w in weights.items()}, assign=False)
    V = config.vocab_size
    generator = torch.Generator().manual_seed(V)
    ids = torch.randint(V, (B, T), generator=generator)
    labels = torch.randint(V, (B, T), generator=generator)
    labels[0, 3] = labels[1, 0] = -1
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), ignore_index=-1)
    loss.backward()
    assert logits.dtype == torch.float64
    out = {"ids": ids, "labels": labels, "logits": logits, "loss": loss}
    return out | {"grad." + n: g for n, g in own_names(model)}


def make(out):
    saved = {}
    for name, config in models().items():
        model = random_model(config)
        folder = os.path.join(out, "parts", name)
        model.save_pretrained(folder)
        for file in os.listdir(folder):
            if file == "generation_config.json":
                os.remove(os.path.join(folder, file))
            else:
                os.chmod(os.path.join(folder, file), 0o644)
        saved[name] = (config, model.state_dict(), folder)
    for config, weights, folder in saved.values():      # after all models of float32
        write_golden(os.path.join(folder, "vectors.bin"), vectors(config, weights))


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)))
