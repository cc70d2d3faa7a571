#!/usr/bin/env python3
"""tfra_table.py - the hash table of TensorFlow Recommenders Addons, for ctr.sh - public domain or MIT, at your choice

Prints "KEYS WIDTH LOOKUP UPSERT": millions of keys a second of the fastest of BATCHES batches, with one thread. As in
bench_table, 4 million rows and batches of 53,248 keys, uniform or skewed.
"""
import os
import sys

os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
os.environ['TF_USE_LEGACY_KERAS'] = '1'
import tensorflow
from tensorflow_recommenders_addons import dynamic_embedding
from table_keys import BATCHES, IDS, ROWS, draw, fastest

tensorflow.config.threading.set_intra_op_parallelism_threads(1)
tensorflow.config.threading.set_inter_op_parallelism_threads(1)
width = int(sys.argv[1]) if len(sys.argv) > 1 else 16
table = dynamic_embedding.get_variable('table', key_dtype=tensorflow.int64, value_dtype=tensorflow.float32, dim=width,
                                       init_size=2 * ROWS, initializer=0.0, devices=['/CPU:0'])
for at in range(0, ROWS, 500_000):
    table.upsert(tensorflow.range(at, at + 500_000, dtype=tensorflow.int64),
                 tensorflow.random.normal([500_000, width]))

for skewed in (0, 1):
    batches = [tensorflow.constant(draw(skewed)) for _ in range(BATCHES)]
    values = tensorflow.random.normal([IDS, width])
    lookup = fastest(table.lookup, batches)
    upsert = fastest(lambda keys: table.upsert(keys, values), batches)
    print('skewed' if skewed else 'uniform', width, '%.2f %.2f' % (lookup, upsert), flush=True)
