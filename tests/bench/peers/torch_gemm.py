#!/usr/bin/env python3
"""torch_gemm.py - PyTorch's matrix product in bf16 (oneDNN) for bench_gemm - public domain or MIT, at your choice

Answers lines of standard input, each "M N K TRANS_A TRANS_B CALLS", with the processor seconds of that many calls of
torch.mm on bf16 matrices, with one thread. First it prints its version.
"""
import sys
import time

import torch

torch.set_num_threads(1)
torch.manual_seed(1)
print(torch.__version__, flush=True)
shape = None
for line in sys.stdin:
    *wanted, calls = map(int, line.split())
    if wanted != shape:
        shape = wanted
        m, n, k, trans_a, trans_b = shape
        a = torch.randn(k, m).bfloat16().t() if trans_a else torch.randn(m, k).bfloat16()
        b = torch.randn(n, k).bfloat16().t() if trans_b else torch.randn(k, n).bfloat16()
        c = torch.empty(m, n, dtype=torch.bfloat16)
        torch.mm(a, b, out=c)
    start = time.process_time()
    for _ in range(calls):
        torch.mm(a, b, out=c)
    print(time.process_time() - start, flush=True)
