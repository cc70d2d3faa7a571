"""make_groups.py - makes the stored steps of several optimizers over parameter groups, with PyTorch in float64
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_groups.py OUT      writes OUT/groups.bin
Needs torch 2.5 or later and numpy.

Three optimizers as in a GAN: AdamW of gen, AdamW of disc with other betas, decay and learning rate, SGD of head. In each
step some of them step; the gradients of the others are zeroed. The gradient norm is that of the parameters that step, and
clip_grad_norm_ clips it. Matrices decay, vectors do not, so each optimizer has two of PyTorch's groups.

FORMAT
    As make_gpt2.py describes; golden.h reads it.
ARRAYS
    norm            (steps) the gradient norm before clipping
    NAME.k          the parameter after step k
    ema.NAME.k      its exponential moving average with EMA_DECAY, from the initial value, updated when it steps
"""
import os
import sys

import torch
from make_gpt2 import write_golden

CLIP, EMA_DECAY = 3.0, 0.75
PARAMS = [("gen.w", 34, 40), ("gen.b", 34, 0), ("disc.w", 12, 16), ("disc.b", 12, 0), ("head.w", 6, 8), ("head.tied", 4, 4)]
# which of gen, disc, head step
STEPS = [(1, 1, 1), (0, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 0), (0, 1, 0), (1, 1, 1), (1, 0, 1)]
LR = [(0.01, 0.02, 0.05), (0.0, 0.03, 0.0), (0.02, 0.0, 0.04), (0.0, 0.02, 0.03), (0.03, 0.0, 0.0), (0.0, 0.01, 0.0),
      (0.02, 0.02, 0.02), (0.01, 0.0, 0.03)]


def start(p, n):
    return torch.tensor([((p * 31 + e * 17) % 97 - 48) / 64 for e in range(n)], dtype=torch.float64)


def gradient(p, n, step):
    return torch.tensor([((p * 7919 + step * 10473 + e * 15485) % 1009 - 504) / 4096 for e in range(n)],
                        dtype=torch.float64)


def groups(params, names, decay):
    return [{"params": [params[n] for n in names if params[n].dim() > 1], "weight_decay": decay},
            {"params": [params[n] for n in names if params[n].dim() == 1], "weight_decay": 0.0}]


def main():
    params = {}
    for i, (name, rows, cols) in enumerate(PARAMS):
        x = start(i, rows * max(cols, 1))
        params[name] = torch.nn.Parameter(x.reshape(rows, cols) if cols else x)
    members = {kind: [n for n in params if n.startswith(kind)] for kind in ("gen", "disc", "head")}
    optimizers = [
        torch.optim.AdamW(groups(params, members["gen"], 0.1), betas=(0.9, 0.999), eps=1e-8),
        torch.optim.AdamW(groups(params, members["disc"], 0.3), betas=(0.5, 0.99), eps=1e-6),
        torch.optim.SGD(groups(params, members["head"], 0.05), lr=1, momentum=0.9)]
    ema = {n: x.detach().clone() for n, x in params.items()}
    arrays, norms = {}, []
    for k, (which, lr) in enumerate(zip(STEPS, LR), 1):
        moving = [n for on, names in zip(which, members.values()) if on for n in names]
        for i, (name, x) in enumerate(params.items()):
            x.grad = gradient(i, x.numel(), k).reshape(x.shape) if name in moving else None
        norms.append(torch.nn.utils.clip_grad_norm_([params[n] for n in moving], CLIP))
        for on, rate, optimizer in zip(which, lr, optimizers):
            for group in optimizer.param_groups:
                group["lr"] = rate
            if on:
                optimizer.step()
        for n in moving:
            ema[n].mul_(EMA_DECAY).add_(params[n].detach(), alpha=1 - EMA_DECAY)
        if k in (4, len(STEPS)):
            arrays.update({f"{n}.{k}": x.detach().clone() for n, x in params.items()})
            arrays.update({f"ema.{n}.{k}": x.clone() for n, x in ema.items()})
    write_golden(os.path.join(sys.argv[1], "groups.bin"), {"norm": torch.stack(norms), **arrays})


if __name__ == "__main__":
    main()
