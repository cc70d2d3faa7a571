"""make_models.py - makes the stored training steps of four models that are not GPTs, with PyTorch in float64
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_models.py OUT      writes OUT/models.bin
        python3 make_gpt2.py --show OUT/models.bin      prints it as text
Needs torch 2.5 or later and numpy. The last bits (1e-16) may differ with another version of torch
or another processor.

CASES
    mixer          MLP-Mixer (arXiv:2105.01601): token mixing, channel mixing, mean of the tokens
    gru            two layers of torch.nn.GRU; the target is a value at each time step
    towers         two-tower retrieval: each pair is compared with the other pairs of its group of 4
    towers_global  the same with all pairs of the step as negatives, as in CLIP (arXiv:2103.00020)
    vit            transformer over patches (arXiv:2010.11929): learned positions, every token
                   attends to every token, mean of the tokens
tests/programs/models.h has the same models; their sizes are below.
FORMAT
    As make_gpt2.py describes; golden.h reads it.
ARRAYS
    settings         steps, weight decay, clip, beta1, beta2, eps, momentum
    lr               of AdamW, of SGD
    DATA.x, DATA.y   (steps * sequences, ..) inputs and targets; DATA is the case, or towers
    CASE.grad.NAME   gradient of the first step, before clipping
    CASE.OPT.loss, CASE.OPT.norm    (steps) loss before the update, and gradient norm before clipping;
                     OPT is adamw or sgd
    CASE.OPT.NAME    value after the last step
INITIAL VALUES
    Those of dt itself with seed 1, made again here: ones for the gains of norms, all others uniform
    in [-0.5, 0.5) by Philox4x32-10 from the parameter's name. So they are not stored.
"""
import math
import os
import sys

sys.dont_write_bytecode = True      # no __pycache__ beside the sources

import torch
import torch.nn.functional as F
from make_gpt2 import units, write_golden
from torch.func import functional_call

STEPS, SEQUENCES, PAIRS, NEGATIVES = 3, 8, 16, 4
DECAY, CLIP, BETAS, EPS, MOMENTUM = 0.1, 0.8, (0.9, 0.95), 1e-4, 0.9
LR = {"adamw": 0.02, "sgd": 0.1}
MASK = (1 << 64) - 1
LAYERS = 2


def philox(key, counter):
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def initial(name, shape):
    if name.endswith(".gain"):
        return torch.ones(shape, dtype=torch.float64)
    key = 0xCBF29CE484222325
    for byte in name.encode():
        key = ((key ^ byte) * 0x100000001B3) & MASK
    mixed = philox(1, key)
    key = mixed[0] << 32 | mixed[1]
    values = []
    for e in range(math.prod(shape)):
        w = philox(key, e // 2)[2 * (e % 2):]
        values.append(0.5 * (2 * ((w[0] << 32 | w[1]) >> 11) / 9007199254740992.0 - 1))
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def norm(p, name, x):
    return F.layer_norm(x, x.shape[-1:], p[name + ".gain"], p[name + ".bias"], eps=1e-5)


def mlp_shapes(name, width, hidden, out):
    return {name + ".up": (hidden, width), name + ".up_bias": (hidden,),
            name + ".down": (out, hidden), name + ".down_bias": (out,)}


def mlp(p, name, x, approximate="none"):
    h = F.gelu(F.linear(x, p[name + ".up"], p[name + ".up_bias"]), approximate=approximate)
    return F.linear(h, p[name + ".down"], p[name + ".down_bias"])


def norm_shapes(name, width):
    return {name + ".gain": (width,), name + ".bias": (width,)}


class Mixer:
    PATCHES, IN, WIDTH, TOKENS, CHANNELS, CLASSES = 6, 5, 8, 5, 11, 5

    def shapes(self):
        out = {"patch": (self.WIDTH, self.IN), "patch_bias": (self.WIDTH,)}
        for l in range(LAYERS):
            out |= norm_shapes(f"{l}.norm_1", self.WIDTH)
            out |= mlp_shapes(f"{l}.tokens", self.PATCHES, self.TOKENS, self.PATCHES)
            out |= norm_shapes(f"{l}.norm_2", self.WIDTH)
            out |= mlp_shapes(f"{l}.channels", self.WIDTH, self.CHANNELS, self.WIDTH)
        return out | norm_shapes("norm", self.WIDTH) | {"head": (self.CLASSES, self.WIDTH), "head_bias": (self.CLASSES,)}

    def data(self):
        n = STEPS * SEQUENCES
        return 4 * units(100, n, self.PATCHES, self.IN), ((units(101, n) + 0.5) * self.CLASSES).long()

    def loss(self, p, x, y):
        x = F.linear(x, p["patch"], p["patch_bias"])
        for l in range(LAYERS):
            x = x + mlp(p, f"{l}.tokens", norm(p, f"{l}.norm_1", x).transpose(1, 2)).transpose(1, 2)
            x = x + mlp(p, f"{l}.channels", norm(p, f"{l}.norm_2", x))
        x = norm(p, "norm", x).mean(1)
        return F.cross_entropy(F.linear(x, p["head"], p["head_bias"]), y)


class Gru:
    TIME, IN, HIDDEN, OUT = 5, 3, 6, 2

    def shapes(self):
        out = {}
        for l in range(LAYERS):
            out |= {f"{l}.x": (3, self.HIDDEN, self.HIDDEN if l else self.IN), f"{l}.x_bias": (3, self.HIDDEN),
                    f"{l}.h": (3, self.HIDDEN, self.HIDDEN), f"{l}.h_bias": (3, self.HIDDEN)}
        return out | {"head": (self.OUT, self.HIDDEN), "head_bias": (self.OUT,)}

    def data(self):
        n = STEPS * SEQUENCES
        return 4 * units(200, n, self.TIME, self.IN), 4 * units(201, n, self.TIME, self.OUT)

    def loss(self, p, x, y):
        module = torch.nn.GRU(self.IN, self.HIDDEN, LAYERS, batch_first=True).double()
        names = {"x": "weight_ih", "x_bias": "bias_ih", "h": "weight_hh", "h_bias": "bias_hh"}
        weights = {f"{to}_l{l}": p[f"{l}.{name}"].flatten(0, 1)
                   for l in range(LAYERS) for name, to in names.items()}
        out = functional_call(module, weights, (x,))[0]
        return F.mse_loss(F.linear(out, p["head"], p["head_bias"]), y)


class Towers:
    USERS, WORDS, BAG, WIDTH, HIDDEN, OUT = 11, 13, 3, 6, 9, 4

    def __init__(self, negatives):
        self.negatives = negatives

    def shapes(self):
        out = {"user.table": (self.USERS, self.WIDTH), "item.table": (self.WORDS, self.WIDTH)}
        for side in "user", "item":
            out |= mlp_shapes(side, self.WIDTH, self.HIDDEN, self.OUT)
        return out | {"temperature": (1,)}

    def data(self):
        n = STEPS * PAIRS
        ids = [((units(300 + i, n) + 0.5) * (self.WORDS if i else self.USERS)).long() for i in range(1 + self.BAG)]
        return torch.stack(ids, 1), None

    def loss(self, p, x, y):
        def tower(side, h):
            h = mlp(p, side, h)
            return h / (h.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() / math.sqrt(self.OUT)
        user = tower("user", F.embedding(x[:, 0], p["user.table"])).reshape(-1, self.negatives, self.OUT)
        item = tower("item", F.embedding(x[:, 1:], p["item.table"]).mean(1)).reshape(-1, self.negatives, self.OUT)
        scores = (p["temperature"] + 2).exp() * user @ item.transpose(1, 2)
        labels = torch.arange(self.negatives).repeat(scores.shape[0], 1)
        return (F.cross_entropy(scores.transpose(1, 2), labels) + F.cross_entropy(scores, labels)) / 2


class Vit:
    PATCHES, IN, WIDTH, HEADS, HEAD, HIDDEN, CLASSES = 8, 5, 8, 4, 2, 11, 3

    def shapes(self):
        out = {"patch": (self.WIDTH, self.IN), "patch_bias": (self.WIDTH,), "position": (self.PATCHES, self.WIDTH)}
        for l in range(LAYERS):
            out |= norm_shapes(f"{l}.norm_1", self.WIDTH)
            out |= {f"{l}.{part}": (self.HEADS, self.HEAD, self.WIDTH) for part in "qkv"}
            out |= {f"{l}.out": (self.WIDTH, self.HEADS * self.HEAD), f"{l}.out_bias": (self.WIDTH,)}
            out |= norm_shapes(f"{l}.norm_2", self.WIDTH)
            out |= mlp_shapes(f"{l}.mlp", self.WIDTH, self.HIDDEN, self.WIDTH)
        return out | norm_shapes("norm", self.WIDTH) | {"head": (self.CLASSES, self.WIDTH), "head_bias": (self.CLASSES,)}

    def data(self):
        n = STEPS * SEQUENCES
        return 4 * units(400, n, self.PATCHES, self.IN), ((units(401, n) + 0.5) * self.CLASSES).long()

    def loss(self, p, x, y):
        x = F.linear(x, p["patch"], p["patch_bias"]) + p["position"]
        for l in range(LAYERS):
            h = norm(p, f"{l}.norm_1", x)
            q, k, v = (torch.einsum("btc,hdc->bhtd", h, p[f"{l}.{part}"]) for part in "qkv")
            h = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(self.HEAD), -1) @ v
            x = x + F.linear(h.transpose(1, 2).flatten(2), p[f"{l}.out"], p[f"{l}.out_bias"])
            x = x + mlp(p, f"{l}.mlp", norm(p, f"{l}.norm_2", x), "tanh")
        x = norm(p, "norm", x).mean(1)
        return F.cross_entropy(F.linear(x, p["head"], p["head_bias"]), y)


def train(case, model, kind):
    """The arrays of one case and optimizer."""
    p = {name: torch.nn.Parameter(initial(name, shape)) for name, shape in model.shapes().items()}
    decays = [v for name, v in p.items() if v.dim() > 1 and not name.endswith("_bias")]
    others = [v for name, v in p.items() if v.dim() < 2 or name.endswith("_bias")]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = (torch.optim.SGD(groups, lr=LR[kind], momentum=MOMENTUM) if kind == "sgd" else
                 torch.optim.AdamW(groups, lr=LR[kind], betas=BETAS, eps=EPS))
    x, y = model.data()
    rows = len(x) // STEPS
    out, losses, norms = {}, [], []
    for step in range(STEPS):
        here = slice(step * rows, (step + 1) * rows)
        optimizer.zero_grad()
        loss = model.loss(p, x[here], None if y is None else y[here])
        loss.backward()
        if step == 0 and kind == "adamw":
            out |= {f"{case}.grad.{name}": v.grad.clone() for name, v in p.items()}
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(p.values(), CLIP).item())
        optimizer.step()
    print(f"  {case} {kind}: {sum(v.numel() for v in p.values())} values, losses {losses}, norms {norms}")
    out |= {f"{case}.{kind}.loss": losses, f"{case}.{kind}.norm": norms}
    return out | {f"{case}.{kind}.{name}": v for name, v in p.items()}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    arrays = {"settings": [STEPS, DECAY, CLIP, *BETAS, EPS, MOMENTUM], "lr": [LR["adamw"], LR["sgd"]]}
    cases = {"mixer": Mixer(), "gru": Gru(), "towers": Towers(NEGATIVES), "towers_global": Towers(PAIRS), "vit": Vit()}
    for case, model in cases.items():
        x, y = model.data()
        if case != "towers_global":
            arrays[case + ".x"] = x
            if y is not None:
                arrays[case + ".y"] = y
        for kind in "adamw", "sgd":
            arrays |= train(case, model, kind)
    write_golden(os.path.join(sys.argv[1], "models.bin"), arrays)


if __name__ == "__main__":
    main()
