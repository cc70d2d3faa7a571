"""make_models.py - makes the stored training steps of models that are not GPTs, with PyTorch in float64
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
    bert           encoder that classifies texts of unequal length (arXiv:1810.04805): padded
                   sequences, no query attends to padding, the first token through a tanh layer
    bert_mean      the same with the mean of the real tokens
    gru_state      gru on 5 consecutive pieces of each sequence: a step begins with the hidden state
                   in which the step before ended (truncated backpropagation through time)
    cnn            convolutions, group norm and pooling on 8 x 8 images of the ten digits
    gan            generative adversarial network (arXiv:1406.2661): discriminator and generator
                   have an optimizer each and step in turn
    agent          actor-critic on a grid (arXiv:1602.01783): one loss, an optimizer for the actor
                   and one for the critic, which step at the same time
    agent_apart    the same with a loss, a backward and a norm for each
tests/programs/models.h and models_groups.h have the same models; their sizes are below.
FORMAT
    As make_gpt2.py describes; golden.h reads it.
ARRAYS
    settings         steps, weight decay, clip, beta1, beta2, eps, momentum
    lr               of AdamW, of SGD
    DATA.group       the second optimizer of gan and agent: lr of AdamW, of SGD, weight decay, beta1,
                     beta2, eps, momentum
    DATA.x, DATA.y   (steps * sequences, ..) inputs and targets; DATA is the case, or towers
                     or gru or bert
    CASE.grad.NAME   gradient of the first step, before clipping
    CASE.OPT.loss, CASE.OPT.norm    (steps) loss before the update, and gradient norm before clipping;
                     OPT is adamw or sgd; gan and agent_apart have one for each part
                     of the step, for example CASE.OPT.disc.loss
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

STEPS, SEQUENCES, PAIRS, NEGATIVES = 5, 8, 16, 4
DECAY, CLIP, BETAS, EPS, MOMENTUM = 0.1, 0.8, (0.9, 0.95), 1e-4, 0.9
LR = {"adamw": 0.02, "sgd": 0.1}
# of the second optimizer of a model with two
GROUP_LR, GROUP_DECAY, GROUP_BETAS, GROUP_EPS, GROUP_MOMENTUM = {"adamw": 0.03, "sgd": 0.05}, 0.02, (0.6, 0.99), 1e-3, 0.5
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


def tanh_mlp(p, name, x):
    h = torch.tanh(F.linear(x, p[name + ".up"], p[name + ".up_bias"]))
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

    def __init__(self, carry):
        self.carry = carry

    def shapes(self):
        out = {}
        for l in range(LAYERS):
            out |= {f"{l}.x": (3, self.HIDDEN, self.HIDDEN if l else self.IN), f"{l}.x_bias": (3, self.HIDDEN),
                    f"{l}.h": (3, self.HIDDEN, self.HIDDEN), f"{l}.h_bias": (3, self.HIDDEN)}
        return out | {"head": (self.OUT, self.HIDDEN), "head_bias": (self.OUT,)}

    def data(self):
        n = STEPS * SEQUENCES
        self.h = None
        return 4 * units(200, n, self.TIME, self.IN), 4 * units(201, n, self.TIME, self.OUT)

    def loss(self, p, x, y):
        module = torch.nn.GRU(self.IN, self.HIDDEN, LAYERS, batch_first=True).double()
        names = {"x": "weight_ih", "x_bias": "bias_ih", "h": "weight_hh", "h_bias": "bias_hh"}
        weights = {f"{to}_l{l}": p[f"{l}.{name}"].flatten(0, 1)
                   for l in range(LAYERS) for name, to in names.items()}
        out, h = functional_call(module, weights, (x, self.h) if self.h is not None else (x,))
        self.h = h.detach() if self.carry else None
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


class Bert:
    VOCAB, TOKENS, WIDTH, HEADS, HEAD, HIDDEN, CLASSES = 13, 8, 8, 4, 2, 11, 3
    PAD, CLS = 0, 1

    def __init__(self, mean):
        self.mean = mean

    def shapes(self):
        out = {"word": (self.VOCAB, self.WIDTH), "position": (self.TOKENS, self.WIDTH)} | norm_shapes("norm", self.WIDTH)
        for l in range(LAYERS):
            for part in "qkv":
                out |= {f"{l}.{part}": (self.HEADS, self.HEAD, self.WIDTH), f"{l}.{part}_bias": (self.HEADS, self.HEAD)}
            out |= {f"{l}.out": (self.WIDTH, self.HEADS * self.HEAD), f"{l}.out_bias": (self.WIDTH,)}
            out |= norm_shapes(f"{l}.norm_1", self.WIDTH)
            out |= mlp_shapes(f"{l}.mlp", self.WIDTH, self.HIDDEN, self.WIDTH)
            out |= norm_shapes(f"{l}.norm_2", self.WIDTH)
        return out | {"pooler": (self.WIDTH, self.WIDTH), "pooler_bias": (self.WIDTH,),
                      "head": (self.CLASSES, self.WIDTH), "head_bias": (self.CLASSES,)}

    def data(self):
        n = STEPS * SEQUENCES
        ids = (2 + (units(500, n, self.TOKENS) + 0.5) * (self.VOCAB - 2)).long()
        length = (2 + (units(501, n) + 0.5) * (self.TOKENS - 1)).long()
        ids[:, 0] = self.CLS
        ids[torch.arange(self.TOKENS) >= length[:, None]] = self.PAD
        return ids, ((units(502, n) + 0.5) * self.CLASSES).long()

    def loss(self, p, x, y):
        real = x != self.PAD
        h = norm(p, "norm", F.embedding(x, p["word"]) + p["position"])
        for l in range(LAYERS):
            q, k, v = (torch.einsum("btc,hdc->bhtd", h, p[f"{l}.{part}"]) + p[f"{l}.{part}_bias"][:, None]
                       for part in "qkv")
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :])
            a = F.linear(a.transpose(1, 2).flatten(2), p[f"{l}.out"], p[f"{l}.out_bias"])
            h = norm(p, f"{l}.norm_1", h + a)
            h = norm(p, f"{l}.norm_2", h + mlp(p, f"{l}.mlp", h))
        h = (h * real[..., None]).sum(1) / real.sum(1, keepdim=True) if self.mean else h[:, 0]
        h = torch.tanh(F.linear(h, p["pooler"], p["pooler_bias"]))
        return F.cross_entropy(F.linear(h, p["head"], p["head_bias"]), y)


class Cnn:
    SIZE, CHANNELS, GROUPS, CLASSES = 8, (1, 4, 8), 2, 10
    DIGITS = ("0e11131519110e", "040c040404040e", "0e11010204081f", "1f02040201110e", "02060a121f0202",
              "1f101e0101110e", "0608101e11110e", "1f010204080808", "0e11110e11110e", "0e11110f01020c")

    def shapes(self):
        out = {}
        for l in range(LAYERS):
            out |= {f"{l}.conv": (self.CHANNELS[l + 1], 3, 3, self.CHANNELS[l]), f"{l}.conv_bias": (self.CHANNELS[l + 1],)}
            out |= norm_shapes(f"{l}.norm", self.CHANNELS[l + 1])
        return out | {"head": (self.CLASSES, self.CHANNELS[-1] * (self.SIZE // 4) ** 2), "head_bias": (self.CLASSES,)}

    def data(self):
        """Each image is a digit of 7 rows of 5 pixels at one of eight places, and noise."""
        n = STEPS * SEQUENCES
        digits = ((units(600, n) + 0.5) * self.CLASSES).long()
        place = ((units(601, n) + 0.5) * 8).long()
        x = 0.5 * units(602, n, self.SIZE, self.SIZE)
        for i in range(n):
            for r, row in enumerate(bytes.fromhex(self.DIGITS[digits[i]])):
                for c in range(5):
                    x[i, r + place[i] // 4, c + place[i] % 4] += row >> (4 - c) & 1
        return x, digits

    def loss(self, p, x, y):
        x = x[:, None]
        for l in range(LAYERS):
            x = F.conv2d(x, p[f"{l}.conv"].permute(0, 3, 1, 2), p[f"{l}.conv_bias"], padding=1)
            x = F.group_norm(x, self.GROUPS, p[f"{l}.norm.gain"], p[f"{l}.norm.bias"], eps=1e-5)
            x = F.max_pool2d(F.relu(x), 2)
        return F.cross_entropy(F.linear(x.permute(0, 2, 3, 1).flatten(1), p["head"], p["head_bias"]), y)


class Gan:
    NOISE, WIDTH, HIDDEN = 3, 4, 9
    PARTS = ("disc.", "gen.")

    def shapes(self):
        return (mlp_shapes("disc", self.WIDTH, self.HIDDEN, 1) | mlp_shapes("gen", self.NOISE, self.HIDDEN, self.WIDTH))

    def data(self):
        return 4 * units(700, STEPS * SEQUENCES, 2 * self.NOISE + self.WIDTH), None

    def loss(self, p, x, part):
        def judge(samples, real):
            logits = tanh_mlp(p, "disc", samples)
            return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))
        fake = tanh_mlp(p, "gen", x[:, part * self.NOISE:(part + 1) * self.NOISE])
        if part == 1:
            return judge(fake, 1.0)
        return judge(x[:, 2 * self.NOISE:], 1.0) + judge(fake.detach(), 0.0)


class Agent:
    SIDE, MOVES, IN, HIDDEN, ACTIONS = 4, 6, 2, 7, 4
    DISCOUNT, ENTROPY = 0.9, 0.01
    NAMES = ("actor.", "critic.")

    def __init__(self, apart):
        self.PARTS = self.NAMES if apart else ("",)

    def shapes(self):
        return (mlp_shapes("actor", self.IN, self.HIDDEN, self.ACTIONS) | mlp_shapes("critic", self.IN, self.HIDDEN, 1))

    def data(self):
        """The first cell of a walk, and a random number for each move."""
        n = STEPS * SEQUENCES
        first = ((units(800, n, 1) + 0.5) * (self.SIDE ** 2 - 1)).floor()
        return torch.cat((first, units(801, n, self.MOVES) + 0.5), 1), None

    def look(self, cells):
        return torch.tensor([[c // self.SIDE / (self.SIDE - 1), c % self.SIDE / (self.SIDE - 1)] for c in cells],
                            dtype=torch.float64)

    def move(self, cell, move, first):
        row, column = cell // self.SIDE + (-1, 1, 0, 0)[move], cell % self.SIDE + (0, 0, -1, 1)[move]
        if 0 <= row < self.SIDE and 0 <= column < self.SIDE:
            cell = row * self.SIDE + column
        return (first, 1.0) if cell == self.SIDE ** 2 - 1 else (cell, -0.1)

    @torch.no_grad()
    def walk(self, p, x):
        first = [int(c) for c in x[:, 0]]
        cells, seen, moves, rewards = list(first), [], [], []
        for t in range(self.MOVES):
            seen.append(self.look(cells))
            q = torch.softmax(tanh_mlp(p, "actor", seen[-1]), -1).cumsum(-1)[:, :-1]
            moves.append((q <= x[:, 1 + t, None]).sum(-1))
            made = [self.move(c, m, f) for c, m, f in zip(cells, moves[-1].tolist(), first)]
            cells = [c for c, _ in made]
            rewards.append(torch.tensor([r for _, r in made], dtype=torch.float64))
        rest, returns = tanh_mlp(p, "critic", self.look(cells))[:, 0], []
        for r in reversed(rewards):
            rest = r + self.DISCOUNT * rest
            returns.insert(0, rest)
        return torch.stack(seen, 1), torch.stack(moves, 1), torch.stack(returns, 1)

    def loss(self, p, x, part):
        if part == 0:
            self.walks = self.walk(p, x)
        seen, moves, returns = self.walks
        values = tanh_mlp(p, "critic", seen)[..., 0]
        critic = F.mse_loss(values, returns) / 2
        if part == 1:
            return critic
        policy = torch.distributions.Categorical(logits=tanh_mlp(p, "actor", seen))
        actor = -(policy.log_prob(moves) * (returns - values.detach())).mean() - self.ENTROPY * policy.entropy().mean()
        return actor if len(self.PARTS) == 2 else actor + critic


def two_optimizers(p, names, kind):
    """An optimizer for the parameters of each prefix."""
    out = []
    for i, prefix in enumerate(names):
        lr, betas, eps, momentum = ((LR, BETAS, EPS, MOMENTUM), (GROUP_LR, GROUP_BETAS, GROUP_EPS, GROUP_MOMENTUM))[i]
        own = [(name, v) for name, v in p.items() if name.startswith(prefix)]
        groups = [{"params": [v for name, v in own if not name.endswith("_bias")],
                   "weight_decay": (DECAY, GROUP_DECAY)[i]},
                  {"params": [v for name, v in own if name.endswith("_bias")], "weight_decay": 0.0}]
        out.append(torch.optim.SGD(groups, lr=lr[kind], momentum=momentum) if kind == "sgd" else
                   torch.optim.AdamW(groups, lr=lr[kind], betas=betas, eps=eps))
    return out


def train_parts(case, model, kind):
    """As train, for a model with two optimizers."""
    p = {name: torch.nn.Parameter(initial(name, shape)) for name, shape in model.shapes().items()}
    optimizers = two_optimizers(p, getattr(model, "NAMES", model.PARTS), kind)
    x, out = model.data()[0], {}
    for step in range(STEPS):
        for i, part in enumerate(model.PARTS):
            own = {name: v for name, v in p.items() if name.startswith(part)}
            for v in p.values():
                v.grad = None
            loss = model.loss(p, x[step * SEQUENCES:(step + 1) * SEQUENCES], i)
            loss.backward()
            if step == 0 and kind == "adamw":
                out |= {f"{case}.grad.{name}": v.grad.clone() for name, v in own.items()}
            out.setdefault(f"{case}.{kind}.{part}loss", []).append(loss.item())
            out.setdefault(f"{case}.{kind}.{part}norm", []).append(torch.nn.utils.clip_grad_norm_(own.values(), CLIP).item())
            for optimizer in optimizers if part == "" else [optimizers[i]]:
                optimizer.step()
    print(f"  {case} {kind}:", *(f"{name} {values}" for name, values in out.items() if isinstance(values, list)))
    return out | {f"{case}.{kind}.{name}": v for name, v in p.items()}


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
    cases = {"mixer": Mixer(), "gru": Gru(False), "towers": Towers(NEGATIVES), "towers_global": Towers(PAIRS), "vit": Vit(),
             "bert": Bert(False), "bert_mean": Bert(True), "gru_state": Gru(True), "cnn": Cnn(), "gan": Gan(),
             "agent": Agent(False), "agent_apart": Agent(True)}
    for case, model in cases.items():
        x, y = model.data()
        if case not in ("towers_global", "bert_mean", "gru_state", "agent_apart"):
            arrays[case + ".x"] = x
            if y is not None:
                arrays[case + ".y"] = y
        if case in ("gan", "agent"):
            arrays[case + ".group"] = [*GROUP_LR.values(), GROUP_DECAY, *GROUP_BETAS, GROUP_EPS, GROUP_MOMENTUM]
        for kind in "adamw", "sgd":
            arrays |= (train_parts if hasattr(model, "PARTS") else train)(case, model, kind)
    write_golden(os.path.join(sys.argv[1], "models.bin"), arrays)


if __name__ == "__main__":
    main()
