#!/usr/bin/env python3
"""torch_generate.py - the model of bench_generate in PyTorch, with a KV cache - public domain or MIT, at your choice

    python3 torch_generate.py --variant compile-freeze-bf16 --weights FILE [--tokens N] [--steps N]

A variant is the words eager|compile and optionally freeze (Inductor packs the weights for its matrix products) and bf16
(all parameters in bf16), joined by '-'. It runs in one thread, under torch.inference_mode.

It prints a line "step,N,CHECK,MS" for each run until it is killed or --steps are done: CHECK is the mean cross-entropy of
8 given tokens after the prompt, MS the time of --tokens greedy tokens after the prompt and its first token.

The cache has a fixed number of rows. The eager variant attends to the rows that are filled. The compiled variants, whose
shapes should not change, attend to all rows under a mask, which they extend by one row for each token.

--weights holds the parameters as 32-bit floats in the order in which examples/gpt.h registers them.
"""
import argparse
import os
import time

PROMPT, GIVEN = 64, 8


def options():
    p = argparse.ArgumentParser()
    for name, value in (("layers", 12), ("width", 768), ("heads", 12), ("seq", 1024), ("vocab", 50257), ("tokens", 64),
                        ("steps", 1 << 40)):
        p.add_argument("--" + name, type=int, default=value)
    p.add_argument("--variant", default="eager")
    p.add_argument("--weights", required=True)
    o = p.parse_args()
    words = o.variant.split("-")
    o.compile, o.bf16, o.freeze = "compile" in words, "bf16" in words, "freeze" in words
    o.rows = PROMPT + max(GIVEN, o.tokens + 1)
    return o


def make_model(o):
    import torch
    from torch import nn
    from torch.nn import functional as F
    D = o.width // o.heads

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(o.width), nn.LayerNorm(o.width)
            self.qkv, self.attn_proj = nn.Linear(o.width, 3 * o.width), nn.Linear(o.width, o.width)
            self.fc, self.mlp_proj = nn.Linear(o.width, 4 * o.width), nn.Linear(4 * o.width, o.width)
            self.register_buffer("keys", torch.zeros(1, o.heads, o.rows, D))
            self.register_buffer("values", torch.zeros(1, o.heads, o.rows, D))

        def forward(self, x, at, mask, filled):
            T = x.shape[1]
            q, k, v = (part.view(1, T, o.heads, D).transpose(1, 2)
                       for part in self.qkv(self.ln_1(x)).split(o.width, dim=2))
            self.keys.index_copy_(2, at, k)
            self.values.index_copy_(2, at, v)
            k, v = self.keys[:, :, :filled], self.values[:, :, :filled]
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + self.attn_proj(heads.transpose(1, 2).reshape(1, T, o.width))
            return x + self.mlp_proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(o.vocab, o.width), nn.Embedding(o.seq, o.width)
            self.layers = nn.ModuleList(Layer() for _ in range(o.layers))
            self.ln_f = nn.LayerNorm(o.width)
            self.head = nn.Linear(o.width, o.vocab, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, ids, at, mask, filled):
            """The logits after the last of the tokens `ids` (1,T), which have the positions `at` (T)."""
            x = self.wte(ids) + self.wpe(at)
            for layer in self.layers:
                x = layer(x, at, mask, filled)
            return self.head(self.ln_f(x[:, -1]))

    return GPT()


def load_weights(model, o):
    import torch
    flat = torch.frombuffer(bytearray(open(o.weights, "rb").read()), dtype=torch.float32)
    C, at = o.width, 0

    def fill(*places):
        nonlocal at
        for p in places:
            p.data.copy_(flat[at:at + p.numel()].view(p.shape))
            at += p.numel()

    fill(model.wte.weight, model.wpe.weight)
    for layer in model.layers:
        w, b = layer.qkv.weight.data, layer.qkv.bias.data
        fill(layer.ln_1.weight, layer.ln_1.bias)
        fill(w[:C], b[:C], w[C:2 * C], b[C:2 * C], w[2 * C:], b[2 * C:])
        for module in (layer.attn_proj, layer.ln_2, layer.fc, layer.mlp_proj):
            fill(module.weight, module.bias)
    fill(model.ln_f.weight, model.ln_f.bias)
    assert at == flat.numel(), "--weights: %d numbers, the model has %d" % (flat.numel(), at)


def main():
    o = options()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    torch.set_num_threads(1)
    model = make_model(o)
    load_weights(model, o)
    if o.bf16:
        model.to(torch.bfloat16)
    model.eval()
    if o.freeze:
        import torch._inductor.config
        torch._inductor.config.freezing = True
    one = torch.compile(model) if o.compile else model
    rows = torch.arange(o.rows)

    def logits(ids, first):
        """The logits after `ids`, a tensor (1,T), whose first token has position `first`."""
        at, filled = rows[first:first + ids.shape[1]], first + ids.shape[1]
        if ids.shape[1] > 1:
            return model(ids, at, rows[:filled] <= at[:, None], filled)
        if o.compile:
            return one(ids, at, (rows <= first)[None, None, None], o.rows)
        return model(ids, at, None, filled)

    given = torch.tensor([[i * 7919 % o.vocab for i in range(PROMPT + GIVEN)]])
    with torch.inference_mode() if not o.freeze else torch.no_grad():
        check = 0.0
        for i in range(GIVEN):
            first = PROMPT + i - 1 if i else 0
            x = logits(given[:, first:PROMPT + i], first)
            check += torch.nn.functional.cross_entropy(x.float(), given[:, PROMPT + i]).item() / GIVEN
        for step in range(1, o.steps + 1):
            x = logits(given[:, :PROMPT], 0).argmax(dim=1, keepdim=True)
            start = time.perf_counter()
            for i in range(o.tokens):
                x = logits(x, PROMPT + i).argmax(dim=1, keepdim=True)
            x.item()
            print("step,%d,%.9g,%.3f" % (step, check, 1000 * (time.perf_counter() - start)), flush=True)


if __name__ == "__main__":
    main()
