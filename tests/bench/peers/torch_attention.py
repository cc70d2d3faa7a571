#!/usr/bin/env python3
"""torch_attention.py - PyTorch's scaled_dot_product_attention for bench_attention - public domain or MIT, at your choice

Answers lines of standard input, each "T HEADS DIM BACKWARD CALLS", with the processor seconds of that many calls of the
forward (BACKWARD 0) or of the backward (1): causal, f32, one sequence, one thread. First it prints its version.
"""
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

torch.set_num_threads(1)
torch.manual_seed(1)
print(torch.__version__, flush=True)
shape = None
for line in sys.stdin:
    *wanted, backward, calls = map(int, line.split())
    if wanted != shape:
        shape = wanted
        T, heads, dim = shape
        # (1,T,heads,dim) in memory, as in a model
        q, k, v = (torch.randn(1, T, heads, dim).transpose(1, 2).requires_grad_() for _ in range(3))
        dout = torch.randn(1, T, heads, dim).transpose(1, 2)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
    start = time.process_time()
    for _ in range(calls):
        if backward:
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        else:
            with torch.no_grad():
                scaled_dot_product_attention(q, k, v, is_causal=True)
    print(time.process_time() - start, flush=True)
