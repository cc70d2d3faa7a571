"""make_muon.py - makes the stored steps of Muon with PyTorch in float64
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_muon.py OUT      writes OUT/muon.bin, and compares the update with torch.optim.Muon where it exists
        python3 make_gpt2.py --show OUT/muon.bin      prints it as text
Needs torch 2.5 or later and numpy.

Written from K. Jordan's post (https://kellerjordan.github.io/posts/muon/) and arXiv:2502.16982, in the order of operations
of torch.optim.Muon, which runs the Newton-Schulz iteration in bf16; here everything is float64.

FORMAT
    As make_gpt2.py describes; golden.h reads it.
ARRAYS
    settings        steps, weight_decay, beta1, beta2, eps
    CASE.settings   momentum, nesterov, scale ("match" 0, "original" 1), clip
    CASE.norm       (steps) the norm that clipping uses
    CASE.NAME.p, .m, .v     parameter, momentum and second moment after the last step; .v only of vectors
    CASE is match or original
GRADIENTS AND INITIAL VALUES
    gradient() and start() are exact in 16 bits. Matrix 5 of `experts` never has a gradient.
"""
import sys

import torch
from make_gpt2 import unit, write_golden

STEPS, DECAY, BETA1, BETA2, EPS = 6, 0.1, 0.9, 0.99, 1e-8
# name, shape, number of leading dimensions that count matrices, factor of the learning rate
PARAMS = [("tall", (70, 40), 0, 1), ("vector", (37,), 0, 1), ("wide", (20, 33), 0, 1), ("heads", (4, 6, 20), 0, 0.5),
          ("pair", (2, 15, 12), 1, 1), ("experts", (4, 2, 9, 10), 2, 1), ("square", (16, 16), 0, 1)]
# momentum, nesterov, scale, clip
CASES = {"match": (0.95, 1, 0, 0.0), "original": (0.9, 0, 1, 20.0)}


def short(key, e):
    """A multiple of 2^-10 with 8 bits at most, between -1 and 1."""
    return int((unit(key, e) + 0.5) * 256 - 128) / 128 / (1 << e % 4)


def matrices(p):
    """The shape (matrices, rows, columns) of a parameter."""
    shape, lead = p[1], p[2]
    n = int(torch.tensor(shape[:lead]).prod()) if lead else 1
    return n, int(torch.tensor(shape[lead:-1]).prod()), shape[-1]


def values(p, key):
    count = int(torch.tensor(p[1]).prod())
    return torch.tensor([short(key, e) for e in range(count)], dtype=torch.float64).reshape(p[1])


def gradient(index, step):
    p = PARAMS[index]
    g = values(p, step * 16 + index)
    if p[0] == "experts":
        g.reshape(matrices(p))[5] = 0
    return g


def newton_schulz(u):
    x = u.T if u.size(0) > u.size(1) else u
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if u.size(0) > u.size(1) else x


def muon(p, value, m, g, lr, momentum, nesterov, scale):
    m.lerp_(g, 1 - momentum)
    u = g.lerp(m, momentum) if nesterov else m
    n, rows, cols = matrices(p)
    x = torch.stack([newton_schulz(a) for a in u.reshape(n, rows, cols)]).reshape(p[1])
    factor = max(1, rows / cols) ** 0.5 if scale else 0.2 * max(rows, cols) ** 0.5
    value.mul_(1 - lr * DECAY).add_(x, alpha=-lr * factor)


def adamw(value, m, v, g, lr, step):
    m.mul_(BETA1).add_((1 - BETA1) * g)
    v.mul_(BETA2).add_((1 - BETA2) * g * g)
    value.sub_(lr * (m / (1 - BETA1 ** step)) / ((v / (1 - BETA2 ** step)).sqrt() + EPS))


def compare_with_torch():
    """The direction of torch.optim.Muon's first update, in bf16, against this one."""
    p = PARAMS[0]
    value, g = values(p, 900), gradient(0, 1)
    ours, m = value.clone(), torch.zeros(p[1], dtype=torch.float64)
    theirs = torch.nn.Parameter(value.clone())
    theirs.grad = g.clone()
    for adjust, scale in (("match_rms_adamw", 0), ("original", 1)):
        torch.optim.Muon([theirs], lr=0.01, weight_decay=DECAY, momentum=0.95, adjust_lr_fn=adjust).step()
        muon(p, ours, m, g, 0.01, 0.95, 1, scale)
        m.zero_()
        a, b = theirs.detach() - value, ours - value
        print(adjust, "differs from torch.optim.Muon by", f"{float((a - b).norm() / b.norm()):.4f} of the update")
        assert (a - b).norm() < 0.02 * b.norm()


def run(case, momentum, nesterov, scale, clip, out):
    value = [values(p, 900 + i) for i, p in enumerate(PARAMS)]
    m, v = ([torch.zeros(p[1], dtype=torch.float64) for p in PARAMS] for _ in range(2))
    norms = []
    for step in range(1, STEPS + 1):
        g = [gradient(i, step) for i in range(len(PARAMS))]
        norms.append(float(sum((x * x).sum() for x in g)) ** 0.5)
        factor = min(1.0, clip / (norms[-1] + 1e-6)) if clip else 1.0
        for i, p in enumerate(PARAMS):
            lr = 0.004 * step * p[3]
            if len(p[1]) < 2:
                adamw(value[i], m[i], v[i], factor * g[i], lr, step)
            else:
                muon(p, value[i], m[i], factor * g[i], lr, momentum, nesterov, scale)
    out[case + ".settings"] = [momentum, nesterov, scale, clip]
    out[case + ".norm"] = norms
    print(case, " ".join(f"{x:.1f}" for x in norms))
    for i, p in enumerate(PARAMS):
        out[f"{case}.{p[0]}.p"] = value[i]
        out[f"{case}.{p[0]}.m"] = m[i]
        if len(p[1]) < 2:
            out[f"{case}.{p[0]}.v"] = v[i]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = {"settings": [STEPS, DECAY, BETA1, BETA2, EPS]}
    if hasattr(torch.optim, "Muon"):
        compare_with_torch()
    for case, settings in CASES.items():
        run(case, *settings, out)
    write_golden(sys.argv[1] + "/muon.bin", out)


if __name__ == "__main__":
    main()
