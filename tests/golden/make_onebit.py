"""make_onebit.py - makes the stored steps of 1-bit Adam with PyTorch in float64
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_onebit.py OUT      writes OUT/onebit.bin
        python3 make_gpt2.py --show OUT/onebit.bin      prints it as text
Needs torch 2.5 or later and numpy.

Written from the algorithm of H. Tang et al., "1-bit Adam", arXiv:2102.02888: N workers and N servers are simulated,
each with its own error. Server s averages piece s of N of a vector, which is padded to N pieces of a multiple of 1,024 each.

FORMAT
    As make_gpt2.py describes; golden.h reads it.
ARRAYS
    settings        steps, freeze, beta1, beta2, eps, weight_decay, clip
    CASE.norm       (steps) the norm that clipping uses: of the averaged gradient, later the root of the mean over
                    workers of their gradient's square
    CASE.NAME.p, .m, .v     parameter and moments after the last step; of a parameter sharded over tp: (tp, local)
    CASE is n1, n2, n4: 1, 2 or 4 workers, parameters of SETS["dp"]; or tp: 2 workers, each of 2 ranks, SETS["tp"]
GRADIENTS AND INITIAL VALUES
    A worker's gradient is N times the term that a rank of N adds to the sum; gradient() is that term, start() an initial
    value. Both are exact in 16 bits. Every 53rd element of w has no gradient before the freeze.
"""
import os
import sys

import torch
from make_gpt2 import unit, write_golden

STEPS, FREEZE, BETA1, BETA2, EPS, DECAY, CLIP = 12, 5, 0.9, 0.99, 1e-8, 0.1, 40.0
RUN = 1024
# name, rows, columns (0: one dimension), bucket, factor of the learning rate, placement over tp
SETS = {"dp": [("w", 33, 32, 0, 1, "same"), ("b", 44, 0, 0, 0.5, "same"), ("g", 100, 0, 1, 1, "same")],
        "tp": [("cut", 21, 10, 0, 1, "cut"), ("part", 60, 0, 1, 1, "part"), ("same", 10, 9, 2, 1, "same")]}


def count(p):
    return p[1] * max(p[2], 1)


def short(key, e):
    """A multiple of 2^-10 with 8 bits at most, between -1 and 1."""
    return int((unit(key, e) + 0.5) * 256 - 128) / 128 / (1 << e % 4)


def start(p, e):
    return short(900 + p, e)


def gradient(p, e, step, rank, tp):
    """The gradient of element e that `rank` of the data group computes in a step, from 1. tp: its tp rank, if partial."""
    return short(((step * 8 + rank) * 4 + tp) * 8 + p, e) * (2 if step % 3 == 0 else 1)


def compress(x, real):
    """The decompressed message of x, and the compression error. real: the elements that count."""
    if not real.any():
        return torch.zeros_like(x), torch.zeros_like(x)
    scale = x[real].norm() / float(real.sum()) ** 0.5
    sent = torch.where(x >= 0, scale, -scale) * real
    return sent, (x - sent) * real


class Unit:
    """A vector of parameters with moments and the errors of N workers and N servers."""

    def __init__(self, values, N):
        n = values.numel()
        self.N, self.n = N, n
        self.piece = -(-n // (N * RUN)) * RUN
        pad = torch.zeros(N * self.piece - n, dtype=torch.float64)
        self.p = torch.cat([values, pad])
        self.m, self.v = torch.zeros_like(self.p), torch.zeros_like(self.p)
        self.worker = [torch.zeros_like(self.p) for _ in range(N)]
        self.server = [torch.zeros(self.piece, dtype=torch.float64) for _ in range(N)]

    def padded(self, g):
        return torch.cat([g, torch.zeros(self.p.numel() - self.n, dtype=torch.float64)])

    def warm(self, grads):
        g = self.padded(sum(grads) / self.N)
        self.m = BETA1 * self.m + (1 - BETA1) * g
        self.v = BETA2 * self.v + (1 - BETA2) * g * g

    def compressed(self, grads):
        real = self.v > 0
        sent = []
        for i, g in enumerate(grads):
            m = BETA1 * self.m + (1 - BETA1) * self.padded(g)
            out, self.worker[i] = compress(m * real + self.worker[i], real)
            sent.append(out)
        pieces = []
        for s in range(self.N):
            here = slice(s * self.piece, (s + 1) * self.piece)
            mean = sum(out[here] for out in sent) / self.N
            out, self.server[s] = compress(mean + self.server[s], real[here])
            pieces.append(out)
        self.m = torch.cat(pieces)

    def update(self, lr, decay):
        self.p = self.p - lr * (self.m / (self.v.sqrt() + EPS) + decay * self.p)


def local(p, tp):
    """The elements of a parameter that one of two tp ranks holds; in a sharded one the last may be padding (None)."""
    rows, cols = p[1], max(p[2], 1)
    first = tp * -(-rows // 2) if p[5] == "cut" else 0
    held = -(-rows // 2) if p[5] == "cut" else rows
    return [e if e < rows * cols else None for e in range(first * cols, (first + held) * cols)]


def worker_gradient(p, index, elements, step, rank, N, parts):
    def of(e):
        if e is None or (p[0] == "w" and e % 53 == 7 and step <= FREEZE):
            return 0.0
        return N * sum(gradient(index, e, step, rank, t) for t in (range(parts) if p[5] == "part" else [0]))
    return torch.tensor([of(e) for e in elements], dtype=torch.float64)


def run(case, params, N, tp, out):
    n_units = params[-1][3] + 1
    held = [[local(p, t) for p in params] for t in range(tp)]
    mine = [[i for i, p in enumerate(params) if p[3] == u] for u in range(n_units)]

    def vector(t, u, f):
        return torch.cat([f(i, held[t][i]) for i in mine[u]])

    def first(i, elements):
        return torch.tensor([0.0 if e is None else start(i, e) for e in elements], dtype=torch.float64)

    units = [[Unit(vector(t, u, first), N) for u in range(n_units)] for t in range(tp)]
    norms = []
    for step in range(1, STEPS + 1):
        g = [[[vector(t, u, lambda i, el: worker_gradient(params[i], i, el, step, r, N, tp)) for r in range(N)]
              for u in range(n_units)] for t in range(tp)]
        squares = 0.0
        for t in range(tp):
            for u in range(n_units):
                if t > 0 and params[mine[u][0]][5] != "cut":
                    continue
                each = [sum(g[t][u]) / N] if step <= FREEZE else g[t][u]
                squares += sum(float((x * x).sum()) for x in each) / len(each)
        norms.append(squares ** 0.5)
        clip = min(1.0, CLIP / (norms[-1] + 1e-6))
        for t in range(tp):
            for u in range(n_units):
                x = units[t][u]
                clipped = [clip * w for w in g[t][u]]
                x.warm(clipped) if step <= FREEZE else x.compressed(clipped)
                lr, decay = [], []
                for i in mine[u]:
                    n = len(held[t][i])
                    lr += [0.004 * step * params[i][4]] * n
                    decay += [DECAY if params[i][2] else 0.0] * n
                x.update(x.padded(torch.tensor(lr, dtype=torch.float64)),
                         x.padded(torch.tensor(decay, dtype=torch.float64)))
    out[case + ".norm"] = norms
    print(case, " ".join(f"{x:.1f}" for x in norms))
    for u in range(n_units):
        at = 0
        for i in mine[u]:
            n = len(held[0][i])
            ranks = range(tp) if params[i][5] == "cut" else [0]
            for what in "pmv":
                rows = [getattr(units[t][u], what)[at:at + n] for t in ranks]
                out[f"{case}.{params[i][0]}.{what}"] = torch.stack(rows)
            at += n


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = {"settings": [STEPS, FREEZE, BETA1, BETA2, EPS, DECAY, CLIP]}
    for N in (1, 2, 4):
        run(f"n{N}", SETS["dp"], N, 1, out)
    run("tp", SETS["tp"], 2, 2, out)
    write_golden(os.path.join(sys.argv[1], "onebit.bin"), out)


main()
