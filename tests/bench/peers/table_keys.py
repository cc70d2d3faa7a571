"""table_keys.py - the keys and the clock of fbgemm_table.py and tfra_table.py - public domain or MIT, at your choice"""
import time

import numpy

ROWS, IDS, BATCHES = 4_000_000, 53_248, 12
random = numpy.random.default_rng(1)


def draw(skewed):
    """A batch of keys below ROWS, uniform or from a power law, as in bench_table."""
    u = random.random(IDS)
    rows = (1 - u) ** (-1 / 0.05) - 1 if skewed else u * ROWS
    return numpy.fmod(rows, ROWS).astype('int64')


def fastest(call, batches):
    """Millions of keys a second of the fastest batch."""
    best = float('inf')
    for batch in batches:
        begin = time.perf_counter()
        call(batch)
        best = min(best, time.perf_counter() - begin)
    return IDS / best / 1e6
