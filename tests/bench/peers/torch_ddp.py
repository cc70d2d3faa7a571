#!/usr/bin/env python3
"""torch_ddp.py - the models of bench_train in PyTorch, data parallel over gloo - public domain or MIT, at your choice

    python3 torch_ddp.py --variant compile-fused-2x1 --data FILE... [--weights FILE] [--steps N]

A variant is the words eager|compile, loop|foreach|fused (how AdamW runs), RxT (R processes of T threads; 1x2 has no data
parallelism) and optionally zero1 (ZeroRedundancyOptimizer: each rank updates its part of the parameters), bf16
(autocast), pure (with bf16: parameters, gradients and AdamW's moments in bf16, no autocast, no master weights), autotune
(compile tries several matrix product kernels) and arena (glibc's allocator keeps freed memory), joined by '-'. All
variants have the same batch: --batch sequences a step over all processes.

--arch gpt2 is GPT-2 with a tied head; --arch llama has RMSNorm, rotary embedding (rotated halves), SwiGLU and a head of
its own, without biases.

It prints a line "pid,P" for each rank, then a line "step,N,LOSS,MS" a step until it is killed or --steps are done. The
loss is the mean over all ranks in the first --checked steps, and the first rank's loss in timed steps.

--weights holds the parameters as 32-bit floats in the order in which examples/gpt.h registers them. With the same data
and weights, dt and PyTorch compute the same function: their losses agree up to rounding.
"""
import argparse
import math
import multiprocessing
import os
import socket
import sys
import time


def options():
    p = argparse.ArgumentParser()
    for name, value in (("layers", 6), ("width", 384), ("heads", 6), ("ffn", 1536), ("seq", 256), ("vocab", 256),
                        ("batch", 16), ("steps", 1 << 40), ("checked", 5)):
        p.add_argument("--" + name, type=int, default=value)
    p.add_argument("--arch", choices=("gpt2", "llama"), default="gpt2")
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--variant", default="eager-fused-2x1")
    p.add_argument("--data", nargs="+", required=True)
    p.add_argument("--weights")
    o = p.parse_args()
    words = o.variant.split("-")
    o.ranks, o.threads = next(tuple(map(int, w.split("x"))) for w in words if w[0].isdigit())
    o.compile, o.bf16, o.autotune = "compile" in words, "bf16" in words, "autotune" in words
    o.update = next((w for w in ("loop", "foreach", "fused") if w in words), "fused")
    o.arena, o.pure, o.zero1 = "arena" in words, "pure" in words, "zero1" in words
    return o


def make_gpt2(o):
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(o.width), nn.LayerNorm(o.width)
            self.qkv, self.attn_proj = nn.Linear(o.width, 3 * o.width), nn.Linear(o.width, o.width)
            self.fc, self.mlp_proj = nn.Linear(o.width, o.ffn), nn.Linear(o.ffn, o.width)

        def forward(self, x):
            B, T, C = x.shape
            q, k, v = (part.view(B, T, o.heads, C // o.heads).transpose(1, 2)
                       for part in self.qkv(self.ln_1(x)).split(C, dim=2))
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attn_proj(heads.transpose(1, 2).reshape(B, T, C))
            return x + self.mlp_proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(o.vocab, o.width), nn.Embedding(o.seq, o.width)
            self.layers = nn.ModuleList(Layer() for _ in range(o.layers))
            self.ln_f = nn.LayerNorm(o.width)

        def forward(self, ids, labels):
            x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
            for layer in self.layers:
                x = layer(x)
            logits = F.linear(self.ln_f(x), self.wte.weight)
            return F.cross_entropy(logits.view(-1, o.vocab).float(), labels.view(-1))

    return GPT()


def make_llama(o):
    import torch
    from torch import nn
    from torch.nn import functional as F
    D = o.width // o.heads

    def rotated(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.RMSNorm(o.width, eps=1e-5), nn.RMSNorm(o.width, eps=1e-5)
            self.qkv = nn.Linear(o.width, 3 * o.width, bias=False)
            self.attn_proj = nn.Linear(o.width, o.width, bias=False)
            self.gate_up = nn.Linear(o.width, 2 * o.ffn, bias=False)
            self.mlp_proj = nn.Linear(o.ffn, o.width, bias=False)

        def forward(self, x, cos, sin):
            B, T, C = x.shape
            q, k, v = (part.view(B, T, o.heads, D).transpose(1, 2)
                       for part in self.qkv(self.ln_1(x)).split(C, dim=2))
            heads = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
            x = x + self.attn_proj(heads.transpose(1, 2).reshape(B, T, C))
            gate, up = self.gate_up(self.ln_2(x)).chunk(2, dim=-1)
            return x + self.mlp_proj(F.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(o.vocab, o.width)
            self.layers = nn.ModuleList(Layer() for _ in range(o.layers))
            self.ln_f = nn.RMSNorm(o.width, eps=1e-5)
            self.head = nn.Linear(o.width, o.vocab, bias=False)
            angle = torch.outer(torch.arange(o.seq), 10000.0 ** (-torch.arange(0, D, 2) / D)).repeat(1, 2)
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())

        def forward(self, ids, labels):
            x = self.wte(ids)
            for layer in self.layers:
                x = layer(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
            return F.cross_entropy(self.head(self.ln_f(x)).view(-1, o.vocab).float(), labels.view(-1))

    return Llama()


def make_model(o):
    import torch
    from torch import nn
    torch.manual_seed(1)
    model = make_llama(o) if o.arch == "llama" else make_gpt2(o)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            small = math.sqrt(2 * o.layers) if name.endswith("_proj.weight") else 2 if "wpe" in name else 1
            nn.init.normal_(p, std=0.02 / small)
        else:
            nn.init.constant_(p, 1 if "ln_" in name and name.endswith("weight") else 0)
    return model


def load_weights(model, path, o):
    """Reads the parameters in the order of gpt_register, where q, k and v are three parameters; here they are one."""
    import torch
    flat = torch.frombuffer(bytearray(open(path, "rb").read()), dtype=torch.float32)
    C, at = o.width, 0

    def fill(*places):
        nonlocal at
        for p in places:
            p.data.copy_(flat[at:at + p.numel()].view(p.shape))
            at += p.numel()

    def both(module):  # weight and, in GPT-2, bias
        fill(module.weight, *([module.bias] if o.arch == "gpt2" else []))

    fill(model.wte.weight, *([model.wpe.weight] if o.arch == "gpt2" else []))
    for layer in model.layers:
        both(layer.ln_1)
        for i in range(3):
            rows = slice(i * C, i * C + C)
            fill(layer.qkv.weight.data[rows], *([layer.qkv.bias.data[rows]] if o.arch == "gpt2" else []))
        for module in (layer.attn_proj, layer.ln_2, layer.fc if o.arch == "gpt2" else layer.gate_up, layer.mlp_proj):
            both(module)
    both(model.ln_f)
    if o.arch == "llama":
        fill(model.head.weight)
    assert at == flat.numel(), "--weights: %d numbers, the model has %d" % (flat.numel(), at)


def make_optimizer(model, o):
    import torch
    how = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}[o.update]
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    how.update(lr=o.lr, betas=(0.9, 0.95), eps=1e-8)
    if o.zero1:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **how)
    return torch.optim.AdamW(groups, **how)


def make_batches(rank, o):
    """Sequences ((n-1)B + k) mod S of step n, k by replica: the data order of dt."""
    import torch
    text = torch.frombuffer(bytearray(b"".join(open(f, "rb").read() for f in o.data)), dtype=torch.uint8)
    S, B, mine = (len(text) - 1) // o.seq, o.batch, o.batch // o.ranks

    def batch(step):
        at = [((step - 1) * B + rank * mine + i) % S * o.seq for i in range(mine)]
        rows = torch.stack([text[a:a + o.seq + 1] for a in at]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return batch


def one_rank(rank, port, o):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(o.threads)
    print("pid,%d" % os.getpid(), flush=True)
    model = make_model(o)
    if o.weights:
        load_weights(model, o.weights, o)
    if o.pure:
        model.to(torch.bfloat16)
    if o.ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=o.ranks)
    optimizer, parameters, batch = make_optimizer(model, o), list(model.parameters()), make_batches(rank, o)
    if o.ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True,
                                                          static_graph=not o.compile)
    if o.compile:
        model = torch.compile(model, mode="max-autotune" if o.autotune else None)
    for step in range(1, o.steps + 1):
        start = time.perf_counter()
        ids, labels = batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=o.bf16 and not o.pure):
            loss = model(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        if step <= o.checked and o.ranks > 1:
            dist.all_reduce(mean)
            mean = mean / o.ranks
        if rank == 0:
            print("step,%d,%.9g,%.3f" % (step, mean.item(), 1000 * (time.perf_counter() - start)), flush=True)


def main():
    o = options()
    os.environ["OMP_NUM_THREADS"] = str(o.threads)
    if o.arena and "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # glibc reads it when a program starts
        os.environ.update(MALLOC_TRIM_THRESHOLD_="4294967296", MALLOC_MMAP_THRESHOLD_="4294967296")
        os.execv(sys.executable, [sys.executable] + sys.argv)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=one_rank, args=(r, port, o), daemon=True) for r in range(o.ranks)]
    for r in ranks:
        r.start()
    for r in ranks:
        r.join()
    sys.exit(max(abs(r.exitcode) for r in ranks) != 0)


if __name__ == "__main__":
    main()
