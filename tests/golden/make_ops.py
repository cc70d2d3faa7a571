"""make_ops.py - makes the stored vectors of single ops with PyTorch in float64
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_ops.py OUT         writes OUT/ops.bin and OUT/ops_shapes.bin
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
    linear_at      as linear, and activation, residual, dresidual
                   act(x w^T + b) + residual; activations by number: 1 gelu, 2 gelu_erf, 3 silu, 4 relu, 5 tanh
    gelu_erf, silu, relu, tanh, exp, ln, softmax      x, dy, y, dx
    affine         x, scale, shift, dy, y, dx
    rmsnorm        x (..,C), gain (C), eps, dy, y, dx, dgain
    swiglu         x (..,2,F), dy, y, dx
                   silu(x[..,0,:]) x[..,1,:]
    sub, mul, div  a, b, dy, y, da, db
                   any broadcasting
    sum, mean, max x, dim (-1: all of them), dy, y, dx
    topk           x (..,N), k, dy, y, index, dx
    slice          x, dim, first, count, dy, y, dx
    concat         a, b, dim, dy, y, da, db
    transpose      x, dim_a, dim_b, dy, y, dx
    gather_rows    x (R,C), rows (-1: zeros), dy, y, dx
    scatter_rows   x (..,C), rows (-1: dropped), count, dy, y, dx
    rope           x (B,T,H,D), positions (B,T), rotary, interleaved, theta, dy, y, dx
                   halves as Hugging Face's rotate_half, neighbours as Meta's complex numbers
    sight          attention with a mask: as attention, and positions (B,TQ), key_positions (B,TK), documents,
                   key_documents: any may be missing; a causal query attends to keys of its document whose position is
                   not after its own; rows without a key are 0 with lse -infinity, which is stored as -1e300
    smoothed       logits, labels, denom, vocab (0: all), smoothing, z_weight, loss, dlogits, z
                   the loss is without z_weight * z, the gradient with it; z = sum of lse^2 / denom
    linear_loss    x (..,C), w (V,C) and the rest of smoothed, dx, dw
    sigmoid, softplus, sqrt, abs      x, dy, y, dx
    pow            x, scale (the exponent), dy, y, dx
    clamp          x, scale and shift (the bounds), dy, y, dx
    minimum, maximum      a, b, dy, y, da, db
                   any broadcasting; equal elements share the gradient
    where          mask (0 or not 0), a, b, dy, y, da, db
                   any broadcasting
    masked_fill    x, mask, value, dy, y, dx
    bce            logits, targets, denom, loss, dlogits, dtargets
                   binary cross-entropy with logits, summed, / denom
ARRAYS OF ops_shapes.bin
    sum_dims, mean_dims, max_dims    x, dims, keepdim, dy, y, dx
    cumsum         x, dim, dy, y, dx
    permute        x, dims, dy, y, dx
    select         x, dim, index_at, dy, y, dx
    broadcast      x, shape, dy, y, dx
    reshape        x, shape (one size may be -1), dy, y, dx
                   the square of the reshaped x
    matmul         a, b, trans_a, trans_b, dy, y, da, db
    patches, max_pool, avg_pool      x (B,H,W,C), window (kernel, stride, padding, dilation; height and width), dy, y, dx
    conv2d         x (B,H,W,C), w (O,KH,KW,C), b (O), window, dy, y (B,OH,OW,O), dx, dw, db
    conv1d         x (B,W,C), w (O,K,C), b (O), window, dy, y, dx, dw, db
    group_norm     x (B,..,C), gain (C), bias (C), groups, eps, dy, y, dx, dgain, dbias
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
    """ignore: the fraction of labels that become -1."""
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


ACTIVATIONS = [lambda x: x, lambda x: F.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="none"),
               F.silu, F.relu, torch.tanh]


def linear_at(lead, out, i, activation, bias=True, residual=True):
    inputs = {"x": fresh(*lead, i), "w": fresh(*out, i, scale=1.0)}
    inputs |= {"b": fresh(*out)} if bias else {}
    inputs |= {"residual": fresh(*lead, *out)} if residual else {}
    y = F.linear(inputs["x"], inputs["w"].reshape(-1, i), inputs["b"].reshape(-1) if bias else None)
    y = ACTIVATIONS[activation](y.reshape(*lead, *out)) + inputs.get("residual", 0)
    add_case("linear_at", inputs, y, list(inputs), {"activation": activation})


def unary(op, f, x, **other):
    add_case(op, {"x": x}, f(x), ["x"], other)


def rmsnorm(*shape, eps=1e-5):
    x, gain = fresh(*shape), fresh(shape[-1])
    add_case("rmsnorm", {"x": x, "gain": gain}, F.rms_norm(x, (shape[-1],), gain, eps), ["x", "gain"], {"eps": eps})


def binary(op, f, a_shape, b_shape):
    a, b = fresh(*a_shape), fresh(*b_shape, shift=4.0 if op == "div" else 0.0)
    add_case(op, {"a": a, "b": b}, f(a, b), ["a", "b"])


def over(x, dim):
    unary("sum", lambda x: x.sum() if dim < 0 else x.sum(dim), x, dim=dim)
    unary("mean", lambda x: x.mean() if dim < 0 else x.mean(dim), x, dim=dim)
    unary("max", lambda x: x.max() if dim < 0 else x.max(dim).values, x, dim=dim)


def topk(x, k):
    values, index = torch.sort(x, dim=-1, descending=True, stable=True)     # ties to the lower index
    add_case("topk", {"x": x}, values[..., :k], ["x"], {"k": k, "index": index[..., :k]})


def rows_by_index(R, C, rows, count):
    x, rows = fresh(R, C), torch.tensor(rows)
    y = torch.where((rows >= 0)[..., None], x[rows.clamp(min=0)], 0.0)
    add_case("gather_rows", {"x": x}, y, ["x"], {"rows": rows})
    x = fresh(*rows.shape, C)
    kept = rows.reshape(-1) >= 0
    y = torch.zeros(count, C, dtype=torch.float64).index_add(0, rows.reshape(-1)[kept], x.reshape(-1, C)[kept])
    add_case("scatter_rows", {"x": x}, y, ["x"], {"rows": rows, "count": count})


def rotate_half(x):
    """As transformers' modeling_llama.py does it."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rope(B, T, H, D, rotary=0, interleaved=0, theta=10000.0, most=100):
    x, positions, turns = fresh(B, T, H, D), integers(most, B, T), rotary or D
    rate = 1.0 / theta ** (torch.arange(0, turns, 2, dtype=torch.float64) / turns)
    angle = positions[:, :, None, None] * rate                                  # (B,T,1,turns/2)
    head, tail = x[..., :turns], x[..., turns:]
    if interleaved:                                                             # as Meta's model.py does it
        pairs = torch.view_as_complex(head.reshape(B, T, H, turns // 2, 2).contiguous())
        head = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(3)
    else:
        both = torch.cat((angle, angle), dim=-1)
        head = head * both.cos() + rotate_half(head) * both.sin()
    add_case("rope", {"x": x}, torch.cat((head, tail), dim=-1), ["x"],
             {"positions": positions, "rotary": rotary, "interleaved": interleaved, "theta": theta})


def sight(B, TQ, TK, H, K, D, full=0, positions=None, key_positions=None, documents=None, key_documents=None):
    """Attention with a mask from the four lists, one entry per token; the second sequence has the lists reversed."""
    q, k, v = fresh(B, TQ, H, D), fresh(B, TK, K, D), fresh(B, TK, K, D)

    def each(numbers):
        rows = [numbers if b % 2 == 0 else numbers[::-1] for b in range(B)]
        return torch.tensor(rows)

    given = {name: each(value) for name, value in (("positions", positions), ("key_positions", key_positions),
             ("documents", documents), ("key_documents", key_documents)) if value is not None}
    p = given.get("positions", (torch.arange(TQ) + TK - TQ).expand(B, TQ))
    kp = given.get("key_positions", p if TQ == TK else torch.arange(TK).expand(B, TK))
    seen = torch.ones(B, TQ, TK, dtype=torch.bool) if full else kp[:, None, :] <= p[:, :, None]
    if documents is not None:
        kd = given.get("key_documents", given["documents"])
        seen = seen & (given["documents"][:, :, None] == kd[:, None, :])
    qh, kh, vh = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    blind = ~seen.any(dim=-1)                               # rows without a key: SDPA gives NaN, so unmask them and set y to 0
    mask = (seen | blind[:, :, None])[:, None]
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(qh, kh, vh, attn_mask=mask, enable_gqa=H != K).transpose(1, 2)
    y = torch.where(blind[:, :, None, None], 0.0, y)
    scores = qh @ kh.repeat_interleave(H // K, dim=1).transpose(2, 3) / math.sqrt(D)
    lse = scores.masked_fill(~seen[:, None], -math.inf).logsumexp(dim=-1).clamp(min=-1e300)
    add_case("sight", {"q": q, "k": k, "v": v}, y, ["q", "k", "v"], {"full": full, "lse": lse, **given})


def smoothed(V, *shape, C=0, vocab=0, smoothing=0.0, z_weight=0.0, ignore=0.3, denom=5.0):
    """With C the logits are x w^T."""
    inputs = {"x": fresh(*shape, C), "w": fresh(V, C, scale=2.0)} if C else {"logits": fresh(*shape, V)}
    logits = inputs["x"] @ inputs["w"].T if C else inputs["logits"]
    labels = integers(vocab or V, *shape)
    labels[fresh(*shape, scale=1.0) + 0.5 < ignore] = -1
    real = logits[..., :vocab or V].reshape(-1, vocab or V)
    loss = F.cross_entropy(real, labels.reshape(-1), reduction="sum", ignore_index=-1, label_smoothing=smoothing) / denom
    z = (real.logsumexp(dim=-1)[labels.reshape(-1) >= 0] ** 2).sum() / denom
    op = "linear_loss" if C else "smoothed"
    add_case(op, inputs, loss + z_weight * z, list(inputs), {"labels": labels, "denom": denom, "vocab": vocab,
             "smoothing": smoothing, "z_weight": z_weight, "z": z})
    arrays[f"{op}.{int(arrays[op + '.cases']) - 1}.loss"] = loss


def channels_first(x):
    return x.movedim(-1, 1)


def channels_last(x):
    return x.movedim(1, -1)


def image_cases():
    def window(*pairs):
        return {"window": torch.tensor(pairs)}

    for shape, kernel, stride, padding, dilation in (
            ((2, 5, 7, 3), (3, 3), (1, 1), (1, 1), (1, 1)), ((1, 6, 5, 2), (2, 3), (2, 1), (0, 1), (1, 2)),
            ((3, 4, 4, 1), (1, 1), (1, 1), (0, 0), (1, 1)), ((1, 9, 8, 5), (3, 2), (3, 2), (2, 1), (2, 3))):
        C = shape[-1]

        def patches(x):
            columns = F.unfold(channels_first(x), kernel, dilation, padding, stride)    # (B,C*K,L)
            y = columns.reshape(shape[0], C, -1, columns.shape[-1]).permute(0, 3, 2, 1)
            size = [(n + 2 * p - d * (k - 1) - 1) // s + 1
                    for n, p, d, k, s in zip(shape[1:3], padding, dilation, kernel, stride)]
            return y.reshape(shape[0], *size, kernel[0] * kernel[1], C)

        unary("patches", patches, fresh(*shape), **window(kernel, stride, padding, dilation))
        for bias in (True, False):
            inputs = {"x": fresh(*shape), "w": fresh(4, *kernel, C, scale=1.0)} | ({"b": fresh(4)} if bias else {})
            y = F.conv2d(channels_first(inputs["x"]), channels_first(inputs["w"]), inputs.get("b"), stride, padding,
                         dilation)
            add_case("conv2d", inputs, channels_last(y), list(inputs), window((0, 0), stride, padding, dilation))
        inputs = {"x": fresh(2, 11, C), "w": fresh(4, kernel[1], C, scale=1.0), "b": fresh(4)}
        y = F.conv1d(channels_first(inputs["x"]), channels_first(inputs["w"]), inputs["b"], stride[1], padding[1],
                     dilation[1])
        add_case("conv1d", inputs, channels_last(y), list(inputs),
                 window((0, 0), (stride[1], 0), (padding[1], 0), (dilation[1], 0)))
    for shape, kernel, stride, padding in (((2, 6, 8, 3), (2, 2), None, (0, 0)), ((1, 7, 5, 2), (3, 3), (2, 2), (1, 1)),
                                           ((3, 5, 4, 1), (3, 2), (1, 2), (1, 0))):
        unary("max_pool", lambda x: channels_last(F.max_pool2d(channels_first(x), kernel, stride, padding)),
              fresh(*shape), **window(kernel, stride or (0, 0), padding, (0, 0)))
        unary("avg_pool", lambda x: channels_last(F.avg_pool2d(channels_first(x), kernel, stride, padding)),
              fresh(*shape), **window(kernel, stride or (0, 0), padding, (0, 0)))
    for shape, groups, eps in (((3, 6), 2, 1e-5), ((2, 5, 6), 3, 1e-5), ((2, 3, 4, 6), 1, 0.5), ((1, 3, 3, 4), 4, 1e-5)):
        inputs = {"x": fresh(*shape), "gain": fresh(shape[-1]), "bias": fresh(shape[-1])}
        y = F.group_norm(channels_first(inputs["x"]), groups, inputs["gain"], inputs["bias"], eps)
        add_case("group_norm", inputs, channels_last(y), list(inputs), {"groups": groups, "eps": eps})


def shape_cases():
    """The cases of ops_shapes.bin."""
    for dims in ([0], [-1], [1, 2], [2, 0], [0, 1, 3], [3, -3], [0, 1, 2, 3]):
        for keep in (0, 1):
            x, other = fresh(3, 2, 5, 3), {"dims": torch.tensor(dims), "keepdim": keep}
            unary("sum_dims", lambda x: x.sum(dims, keepdim=bool(keep)), x, **other)
            unary("mean_dims", lambda x: x.mean(dims, keepdim=bool(keep)), x, **other)
            unary("max_dims", lambda x: x.amax(dims, keepdim=bool(keep)), x, **other)
    for shape, dim in (((17,), 0), ((3, 17), -1), ((3, 5, 7), 1), ((3, 5, 1), 0), ((2, 521), 1)):
        unary("cumsum", lambda x: x.cumsum(dim), fresh(*shape), dim=dim)
    for order in ([1, 0], [2, 0, 1], [0, 2, 1], [-1, 1, 0, 2], [3, 2, -3, 0], [0, 1, 3, 2]):
        x = fresh(*(3, 5, 2, 7)[:len(order)])
        unary("permute", lambda x: x.permute(order), x, dims=torch.tensor(order))
    for shape, dim, index in (((5,), 0, 2), ((3, 5), -1, -1), ((3, 5, 2), 1, 4), ((3, 5, 2), 0, -3)):
        unary("select", lambda x: x.select(dim, index), fresh(*shape), dim=dim, index_at=index)
    for shape, to in (((3,), (5, 3)), ((3, 1), (3, 5)), ((2, 1, 3), (7, 2, 5, 3)), ((1, 1), (3, 5)), ((3, 5), (3, 5))):
        unary("broadcast", lambda x: x.broadcast_to(to), fresh(*shape), shape=torch.tensor(to))
    for to in ((-1,), (5, -1), (3, -1, 2), (1, 30, -1)):
        unary("reshape", lambda x: x.reshape(to) ** 2, fresh(3, 5, 2), shape=torch.tensor(to))
    for trans_a in (0, 1):
        for trans_b in (0, 1):
            for lead_a, lead_b in (((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), ()), ((), (3,)), ((1,), ())):
                a = fresh(*lead_a, *((5, 3) if trans_a else (3, 5)))
                b = fresh(*lead_b, *((7, 5) if trans_b else (5, 7)), scale=1.0)
                y = (a.mT if trans_a else a) @ (b.mT if trans_b else b)
                add_case("matmul", {"a": a, "b": b}, y, ["a", "b"], {"trans_a": trans_a, "trans_b": trans_b})


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
    embedding(3, 17, 17)                            # every row is used many times
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
    cross_entropy(3, 17, ignore=0.4, denom=7.0)     # a denominator that is not the number of labels
    cross_entropy(17, 3, 3, ignore=0.4, denom=5.0)
    cross_entropy(3, 3, ignore=1.1)                 # all labels ignored: loss and gradients 0
    cross_entropy(17, 3, denom=3.0, scale=3000.0)   # exp overflows

    mse(1, denom=1.0)
    mse(3, 17, denom=51.0)
    mse(1, 3, 3, denom=2.0)

    for activation in range(6):
        linear_at((3,), (5,), 3, activation, bias=activation % 2 == 0, residual=activation != 3)
    linear_at((2, 3), (3, 5), 3, 3)

    tails = torch.tensor([0.0, -0.0, 1e-8, -3.0, 3.0, -6.5, 6.5, -12.0, 12.0, -40.0, 40.0, 0.5, -0.5],
                         dtype=torch.float64)
    for x in (lambda: fresh(1), lambda: fresh(3, 17, scale=8.0), lambda: tails.clone().requires_grad_()):
        unary("gelu_erf", lambda x: F.gelu(x, approximate="none"), x())
        unary("silu", F.silu, x())
        unary("relu", F.relu, x())
        unary("tanh", torch.tanh, x())
        unary("softmax", lambda x: x.softmax(dim=-1), x())
        unary("affine", lambda x: x * -1.75 + 0.5, x(), scale=-1.75, shift=0.5)
    for n in (1, 3, 17):
        unary("exp", torch.exp, fresh(3, n))
        unary("ln", torch.log, fresh(3, n, shift=2.5))
        rmsnorm(2, 3, n, eps=0.5 if n == 3 else 1e-5)
        unary("swiglu", lambda x: F.silu(x[..., 0, :]) * x[..., 1, :], fresh(3, 2, n))
    unary("softmax", lambda x: x.softmax(dim=-1), fresh(3, 17, scale=3000.0))

    for op, f in (("sub", torch.sub), ("mul", torch.mul), ("div", torch.div)):
        binary(op, f, (3, 5), (3, 5))
        binary(op, f, (5,), (3, 1))
        binary(op, f, (2, 1, 3), (2, 5, 1))
        binary(op, f, (1,), (3, 5))

    for dim in (-1, 0, 1, 2):
        over(fresh(3, 5, 2), dim)
    topk(fresh(3, 17), 3)
    topk(fresh(2, 3, 5), 5)
    topk(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 5.0, -1.0, 4.0]],
                      dtype=torch.float64, requires_grad=True), 3)

    for dim, first, count in ((0, 1, 2), (1, 0, 5), (2, 1, 1)):
        unary("slice", lambda x: x.narrow(dim, first, count), fresh(3, 5, 2), dim=dim, first=first, count=count)
    for dim in range(3):
        a, b = fresh(3, 5, 2), fresh(*(7 if d == dim else n for d, n in enumerate((3, 5, 2))))
        add_case("concat", {"a": a, "b": b}, torch.cat((a, b), dim), ["a", "b"], {"dim": dim})
    for dim_a, dim_b in ((0, 1), (0, 2), (2, 1)):
        unary("transpose", lambda x: x.transpose(dim_a, dim_b), fresh(3, 5, 2), dim_a=dim_a, dim_b=dim_b)
    rows_by_index(5, 3, [3, -1, 0, 3, 4], 7)
    rows_by_index(1, 1, [0, 0, -1], 1)
    rows_by_index(5, 17, [[1, 4], [-1, 1]], 5)

    rope(1, 3, 1, 2)
    rope(2, 5, 3, 6)
    rope(2, 5, 3, 6, interleaved=1)
    rope(1, 3, 2, 8, rotary=4)
    rope(1, 3, 2, 8, rotary=6, interleaved=1, theta=500000.0, most=100000)
    rope(1, 3, 2, 8, theta=500000.0, most=100000)

    zigzag = [0, 6, 1, 5, 2, 4, 3]
    sight(2, 7, 7, 4, 2, 3, positions=zigzag)
    sight(2, 7, 7, 2, 1, 3, documents=[0, 0, 0, 1, 1, 2, 2])
    sight(2, 7, 7, 2, 2, 3, positions=zigzag, documents=[1, 1, 0, 0, 0, 1, 2])
    sight(1, 7, 7, 2, 1, 3, full=1, documents=[0, 0, 0, 1, 1, 2, 2])
    sight(2, 3, 7, 2, 1, 3, positions=[4, 0, 2], key_positions=[3, 1, 6, 2, 5, 4, 0])
    sight(2, 3, 7, 2, 1, 3, positions=[-1, 8, 2], key_positions=[3, 1, 6, 2, 5, 4, 0])      # one query has no key
    sight(1, 3, 7, 2, 2, 3, documents=[0, 9, 1], key_documents=[0, 0, 0, 0, 1, 1, 1])       # a query without key

    for C in (0, 3):
        smoothed(17, 5, C=C, smoothing=0.1)
        smoothed(17, 5, C=C, vocab=13)
        smoothed(17, 5, C=C, z_weight=0.01)
        smoothed(17, 2, 3, C=C, vocab=13, smoothing=0.2, z_weight=0.1, denom=7.0)
        smoothed(3, 3, C=C, smoothing=0.1, ignore=1.1)          # nothing left

    for x in (lambda: fresh(1), lambda: fresh(3, 17, scale=8.0), lambda: tails.clone().requires_grad_()):
        unary("sigmoid", torch.sigmoid, x())
        unary("softplus", lambda x: F.softplus(x, threshold=100.0), x())    # the default gives x from 20 on
        unary("abs", torch.abs, x())
        unary("clamp", lambda x: x.clamp(-0.5, 3.0), x(), scale=-0.5, shift=3.0)    # tails has both bounds
    for n in (1, 3, 17):
        unary("sqrt", torch.sqrt, fresh(3, n, shift=2.5))
    for exponent in (-1.5, 0.5, 0.0, 1.0, 2.0, 3.0):
        unary("pow", lambda x: x.pow(exponent), fresh(3, 5, shift=2.5 if exponent % 1 else 0.0), scale=exponent)

    for op, f in (("minimum", torch.minimum), ("maximum", torch.maximum)):
        binary(op, f, (3, 5), (3, 5))
        binary(op, f, (5,), (3, 1))
        binary(op, f, (2, 1, 3), (2, 5, 1))
        a, b = tails.clone().requires_grad_(), tails.flip(0).clone().requires_grad_()     # some are equal
        add_case(op, {"a": a, "b": b}, f(a, b), ["a", "b"])
    for mask_shape, a_shape, b_shape in (((3, 5), (3, 5), (3, 5)), ((5, 1), (1, 3), (2, 1, 3)), ((1,), (3, 5), (1,))):
        mask, a, b = integers(2, *mask_shape), fresh(*a_shape), fresh(*b_shape)
        add_case("where", {"a": a, "b": b}, torch.where(mask != 0, a, b), ["a", "b"], {"mask": mask})
        if mask.dim() <= a.dim():
            mask = integers(2, *mask_shape[:-1], a_shape[-1])
            add_case("masked_fill", {"x": a}, a.masked_fill(mask != 0, -2.5), ["x"], {"mask": mask, "value": -2.5})
    for shape, scale in (((1,), 4.0), ((3, 17), 4.0), ((2, 3, 5), 100.0)):
        logits, targets = fresh(*shape, scale=scale), fresh(*shape, scale=1.0, shift=0.5)
        loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / 7.0
        add_case("bce", {"logits": logits, "targets": targets}, loss, ["logits", "targets"], {"denom": 7.0})


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    all_cases()
    write_golden(os.path.join(sys.argv[1], "ops.bin"), arrays)
    arrays.clear()
    shape_cases()
    image_cases()
    write_golden(os.path.join(sys.argv[1], "ops_shapes.bin"), arrays)


if __name__ == "__main__":
    main()
