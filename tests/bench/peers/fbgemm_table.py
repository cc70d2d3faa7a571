#!/usr/bin/env python3
"""fbgemm_table.py - FBGEMM's table-batched embedding on the CPU, for ctr.sh - public domain or MIT, at your choice

Prints "KEYS WIDTH FORWARD STEP": millions of ids a second of the fastest of BATCHES batches, with one thread. As in
bench_table, 4 million rows with row-wise Adagrad, batches of 53,248 ids, uniform or skewed. A step is forward, backward
and update. Rows are found by their number, without a hash table.
"""
import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen)
from table_keys import BATCHES, IDS, ROWS, draw, fastest

torch.set_num_threads(1)
width = int(sys.argv[1]) if len(sys.argv) > 1 else 16

for skewed in (0, 1):
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, width, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01, pooling_mode=PoolingMode.SUM)
    offsets, grads = torch.arange(IDS + 1), torch.randn(IDS, width)
    batches = [torch.from_numpy(draw(skewed)) for _ in range(BATCHES)]
    forward = fastest(lambda ids: table(ids, offsets), batches)
    step = fastest(lambda ids: table(ids, offsets).backward(grads), batches)
    print('skewed' if skewed else 'uniform', width, '%.2f %.2f' % (forward, step), flush=True)
