#!/usr/bin/env python3
"""torch_gpu.py - PyTorch on the same GPU: products, attention, GPT-2 124M - public domain or MIT, at your choice

    python3 torch_gpu.py [--batch 16 32] [--steps 20]

Prints lines summary,NAME,VALUE, as bench_gpu and train_gpt do for dt. All in bf16; attention is
torch.nn.functional.scaled_dot_product_attention, causal, over (8, 16, 4096, 64 and 128); the model is GPT-2 124M with
1,024 tokens a sequence, its weights in bf16 under autocast, AdamW fused, torch.compile; tokens a second of the best of
three runs of --steps steps.
"""
import argparse
import time

import torch
import torch.nn.functional as F


def seconds(fn, enough=0.2):
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    best, calls = 1e9, 4
    rounds = 0
    while rounds < 5:
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        if took < enough:
            calls *= 2
            continue
        best = min(best, took / calls)
        rounds += 1
    return best


def products():
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print("summary,torch_matmul_bf16_tflops,%.1f" % (2 * n**3 / seconds(lambda: a @ b.T) / 1e12), flush=True)


def attention(dim):
    B, H, T = 8, 16, 4096
    q, k, v = (torch.randn(B, H, T, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    flops = 2 * B * H * T * T * dim
    with torch.no_grad():
        s = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    print("summary,torch_attention_d%d_bf16_tflops,%.1f" % (dim, flops / s / 1e12))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(out)
    s = seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    print("summary,torch_attention_back_d%d_bf16_tflops,%.1f" % (dim, 2.5 * flops / s / 1e12), flush=True)


class Block(torch.nn.Module):
    def __init__(self, C, H):
        super().__init__()
        self.H = H
        self.n1, self.n2 = torch.nn.LayerNorm(C), torch.nn.LayerNorm(C)
        self.qkv, self.proj = torch.nn.Linear(C, 3 * C), torch.nn.Linear(C, C)
        self.up, self.down = torch.nn.Linear(C, 4 * C), torch.nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.H, C // self.H).transpose(1, 2) for t in self.qkv(self.n1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class GPT2(torch.nn.Module):
    def __init__(self, L=12, C=768, H=12, T=1024, V=50304):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(V, C), torch.nn.Embedding(T, C)
        self.blocks = torch.nn.ModuleList(Block(C, H) for _ in range(L))
        self.norm = torch.nn.LayerNorm(C)

    def forward(self, ids, labels):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))


def model(batch, steps):
    torch.set_float32_matmul_precision("high")
    torch._dynamo.reset()
    net = GPT2().cuda()
    fast = torch.compile(net)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, 50257, (batch, 1025), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = fast(ids[:, :-1], ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    best = 0
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        best = max(best, batch * 1024 * steps / (time.perf_counter() - begin))
    print("summary,torch_gpt2_124m_b%d_tokens_per_s,%.0f" % (batch, best), flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, nargs="+", default=[16])
    p.add_argument("--steps", type=int, default=20)
    args = p.parse_args()
    print("# PyTorch %s on %s" % (torch.__version__, torch.cuda.get_device_name()))
    products()
    attention(64)
    attention(128)
    for batch in args.batch:
        model(batch, args.steps)
