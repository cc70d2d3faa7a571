"""make_ops.py - makes the stored vectors of single ops with PyTorch in float64
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_ops.py OUT         writes OUT/ops.bin
        python3 make_gpt2.py --show OUT/ops.bin     prints it as text
Needs torch 2.5 or later and numpy. The last bits (1e-16) may differ with another version of torch
or another processor.

FORMAT
    As make_gpt2.py describes; golden.h reads it. Shapes are stored with the arrays. Each op has a
    scalar array OP.cases, and its cases are OP.0.x, OP.1.x, ... In every case dy is the gradient
    that arrives at the output y, so the stored gradients are those of sum(y * dy); a scalar loss
    has no dy, which is then 1. A case without one of the arrays below (a bias, say) was run without
    it.
ARRAYS
    linear         x (..,I), w (O..,I), b (O..), dy, y (..,O..), dx, dw, db
                   y = x w^T + b
    layernorm      x (..,C), gain (C), bias (C), eps, dy, y, dx, dgain, dbias
                   biased variance
    gelu           x, dy, y, dx
                   tanh form
    embedding      table (V,C), ids (..), dy, y (..,C), dtable
    add            a, b (the end of a's shape), dy, y, da, db
                   b broadcasts over leading dimensions
    attention      q (B,TQ,H,D), k and v (B,TK,K,D), full, dy, y, lse (B,H,TQ), dq, dk, dv
                   scale 1/sqrt(D); query head h uses kv head h / (H/K); full 0: query i sees keys
                   up to i + TK - TQ, 1: all keys; lse = log(sum over those keys of exp(scale q.k))
    cross_entropy  logits (..,V), labels (..), denom, loss, dlogits
                   sum over labels >= 0, / denom
    mse            a, b, denom, loss, da, db
                   sum((a - b)^2) / denom
Sizes are odd on purpose (1, 3, 17): no vector width divides them. The inputs of linear, embedding
and add have 20 significant bits at most, so their products and short sums are exact in float64:
these ops have one right answer, to the last bit, in any order of summation.
"""
import math
import os
import sys

sys.dont_write_bytecode = True      # no __pycache__ beside the sources

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from make_gpt2 import units, write_golden

arrays = {}
streams = 0                         # every input tensor is its own stream of units()


def fresh(*shape, scale=4.0, shift=0.0):
    """Values in shift + [-scale/2, scale/2), different at each call, wanting a gradient."""
    global streams
    streams += 1
    return (shift + scale * units(5000 + streams, *shape)).requires_grad_()


def integers(bound, *shape):
    """Integers in [0, bound)."""
    return ((fresh(*shape, scale=1.0).detach() + 0.5) * bound).long()


def add_case(op, inputs, y, wanted, other=None):
    """Stores one case. inputs: name -> tensor; wanted: the names whose gradients to store; other:
    more arrays to store. A scalar y is a loss and is stored as `loss`."""
    n = int(arrays.get(op + ".cases", 0))
    case = {**inputs, **(other or {})}
    dy = fresh(*y.shape, scale=2.0).detach() if y.dim() else None
    grads = torch.autograd.grad(y, [inputs[name] for name in wanted], grad_outputs=dy)
    case |= {"loss": y} if dy is None else {"dy": dy, "y": y}
    case |= {"d" + name: grad for name, grad in zip(wanted, grads)}
    arrays.update({f"{op}.{n}.{name}": value for name, value in case.items()})
    arrays[op + ".cases"] = n + 1


def linear(lead, out, i, bias=True):
    """x (*lead,i), w (*out,i)."""
    x, w = fresh(*lead, i), fresh(*out, i, scale=1.0)
    inputs = {"x": x, "w": w} | ({"b": fresh(*out)} if bias else {})
    y = F.linear(x, w.reshape(-1, i), inputs["b"].reshape(-1) if bias else None)
    add_case("linear", inputs, y.reshape(*lead, *out), list(inputs))


def layernorm(*shape, eps=1e-5, shift=0.0):
    C = shape[-1]
    x = fresh(*shape, shift=shift)
    inputs = {"x": x, "gain": fresh(C), "bias": fresh(C)}
    y = F.layer_norm(x, (C,), inputs["gain"], inputs["bias"], eps=eps)
    add_case("layernorm", inputs, y, list(inputs), {"eps": eps})


def gelu(x):
    add_case("gelu", {"x": x}, F.gelu(x, approximate="tanh"), ["x"])


def embedding(V, C, *shape):
    table, ids = fresh(V, C), integers(V, *shape)
    add_case("embedding", {"table": table}, F.embedding(ids, table), ["table"], {"ids": ids})


def add(a_shape, b_shape):
    a, b = fresh(*a_shape), fresh(*b_shape)
    add_case("add", {"a": a, "b": b}, a + b, ["a", "b"])


def attention(B, TQ, TK, H, K, D, full=0, q_shift=0.0, k_shift=0.0):
    q, k = fresh(B, TQ, H, D, shift=q_shift), fresh(B, TK, K, D, shift=k_shift)
    v = fresh(B, TK, K, D)
    # PyTorch's is_causal lines query 0 up with key 0; here the last query sees up to the last key.
    seen = torch.ones(TQ, TK, dtype=torch.bool).tril(TK if full else TK - TQ)
    qh, kh, vh = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)      # (B,heads,T,D)
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(qh, kh, vh, attn_mask=seen, enable_gqa=H != K)
    scores = qh @ kh.repeat_interleave(H // K, dim=1).transpose(2, 3) / math.sqrt(D)
    lse = scores.masked_fill(~seen, -math.inf).logsumexp(dim=-1)
    add_case("attention", {"q": q, "k": k, "v": v}, y.transpose(1, 2), ["q", "k", "v"],
             {"full": full, "lse": lse})


def cross_entropy(V, *shape, ignore=0.0, denom=1.0, scale=4.0):
    """ignore: the part of labels that become -1."""
    logits, labels = fresh(*shape, V, scale=scale), integers(V, *shape)
    labels[fresh(*shape, scale=1.0) + 0.5 < ignore] = -1
    loss = F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), reduction="sum",
                           ignore_index=-1) / denom
    add_case("cross_entropy", {"logits": logits}, loss, ["logits"],
             {"labels": labels, "denom": denom})


def mse(*shape, denom):
    a, b = fresh(*shape), fresh(*shape)
    loss = F.mse_loss(a, b, reduction="sum") / denom
    add_case("mse", {"a": a, "b": b}, loss, ["a", "b"], {"denom": denom})


def all_cases():
    linear((1,), (1,), 1)
    linear((3,), (17,), 1)
    linear((17,), (3,), 17)
    linear((1,), (17,), 3, bias=False)
    linear((3, 3), (3, 1), 17)                      # w (3,1,17): several output dimensions
    linear((2, 3), (3, 5), 3, bias=False)

    layernorm(1, 1)                                 # one element: y is the bias, dx is zero
    layernorm(17, 3)
    layernorm(3, 17)
    layernorm(1, 3, 17, shift=1000.0)               # E[x^2] - E[x]^2 would lose digits here
    layernorm(3, 3, eps=0.5)

    gelu(fresh(1))
    gelu(fresh(3, 17, scale=8.0))
    gelu(torch.tensor([0.0, -0.0, 1e-300, -1e-8, 5.0, -5.0, 12.0, -12.0, 40.0, -40.0, 1e4, -1e4,
                       0.75], dtype=torch.float64, requires_grad=True))

    embedding(1, 1, 1)
    embedding(17, 3, 3, 3)
    embedding(3, 17, 17)                            # every row many times
    embedding(17, 1, 1, 3, 1)

    add((1,), (1,))
    add((3, 17), (17,))
    add((3, 17), (3, 17))
    add((3, 1, 17), (1, 17))
    add((17, 1), (1,))

    attention(1, 1, 1, 1, 1, 1)
    attention(1, 3, 3, 1, 1, 17)
    attention(1, 17, 17, 3, 3, 3)
    attention(1, 17, 17, 9, 3, 1)                   # 3 query heads to each of 3 kv heads
    attention(3, 3, 3, 3, 1, 3)                     # one kv head for all
    attention(1, 3, 17, 2, 1, 5)                    # 3 new queries over 17 keys
    attention(1, 1, 17, 1, 1, 3)
    attention(1, 17, 17, 3, 1, 3, full=1)
    attention(1, 3, 17, 1, 1, 3, full=1)
    attention(1, 17, 3, 3, 3, 1, full=1)
    attention(1, 17, 17, 1, 1, 3, q_shift=10.0, k_shift=60.0)   # scores near 1000: exp overflows

    cross_entropy(1, 1)                             # one class: loss 0
    cross_entropy(17, 3, denom=3.0)
    cross_entropy(3, 17, ignore=0.4, denom=7.0)     # a denominator that is nobody's count
    cross_entropy(17, 3, 3, ignore=0.4, denom=5.0)
    cross_entropy(3, 3, ignore=1.1)                 # nothing left: loss and gradients 0
    cross_entropy(17, 3, denom=3.0, scale=3000.0)   # exp overflows

    mse(1, denom=1.0)
    mse(3, 17, denom=51.0)
    mse(1, 3, 3, denom=2.0)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    all_cases()
    write_golden(os.path.join(sys.argv[1], "ops.bin"), arrays)


if __name__ == "__main__":
    main()
