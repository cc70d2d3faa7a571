#!/usr/bin/env python3
"""numpy_fm.py TRAIN TEST SEED - a factorization machine in numpy, for ctr.sh - public domain or MIT, at your choice

Reads text in Criteo's format, of which it uses the categories, and trains for one pass with row-wise Adagrad in batches
of 512, as `train_ctr --model fm --width 4 --seed SEED`, in float64. Linear weights start from 0. Vectors start from the
values that dt gives the same key: the AUC of another initial vector differs by more than the two programs do. Prints the
AUC on TEST.
"""
import sys

import numpy

WIDTH, BATCH, RATE, INITIAL = 4, 512, 0.05, 0.01
U64 = numpy.uint64


def philox(key, counter):
    """The four words of Philox4x32-10 (Salmon et al., SC11) for arrays of 64-bit keys and counters."""
    low, shift = U64(0xFFFFFFFF), U64(32)
    k0, k1, c0, c1 = key & low, key >> shift, counter & low, counter >> shift
    c2, c3 = numpy.zeros_like(c0), numpy.zeros_like(c0)
    for _ in range(10):
        p0, p1 = U64(0xD2511F53) * c0, U64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + U64(0x9E3779B9)) & low, (k1 + U64(0xBB67AE85)) & low
    return c0, c1, c2, c3


def stream_key(key, counter):
    words = philox(key, counter)
    return words[0] << U64(32) | words[1]


def criteo_key(text, slot):
    """The key of a category: criteo_key of examples/criteo.h."""
    mask, n = (1 << 64) - 1, len(text)
    h = (slot + 1) * 0x9E3779B97F4A7C15 & mask ^ n * 0xFF51AFD7ED558CCD & mask
    for at in range(0, n, 8):
        h = (h ^ int.from_bytes(text[at:at + 8], 'little')) * 0xC4CEB9FE1A85EC53 & mask
        h ^= h >> 32
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ h >> 33) * factor & mask
    return h ^ h >> 33


def initial_vectors(keys, seed):
    """Normal numbers with deviation 0.01: a function of seed, table, key and column."""
    name = 0xCBF29CE484222325
    for byte in b'embedding':
        name = (name ^ byte) * 0x100000001B3 & (1 << 64) - 1
    table = stream_key(numpy.array([seed], U64), numpy.array([name], U64))[0]
    has_index = keys < U64(((1 << 64) - 1) // WIDTH)  # the number of an element then fits 64 bits
    stream = numpy.where(has_index, table, stream_key(numpy.full_like(keys, table), keys))
    first = numpy.where(has_index, keys * U64(WIDTH // 2), U64(0))
    vector = numpy.empty((len(keys), WIDTH))
    for pair in range(WIDTH // 2):
        a, b, c, d = philox(stream, first + U64(pair))
        u, v = (((x << U64(21)) | (y >> U64(11))).astype(float) / 2**53 for x, y in ((a, b), (c, d)))
        radius = 0.01 * numpy.sqrt(-2 * numpy.log(1 - u))
        vector[:, 2 * pair] = radius * numpy.cos(2 * numpy.pi * v)
        vector[:, 2 * pair + 1] = radius * numpy.sin(2 * numpy.pi * v)
    return vector


def read(path, numbers):
    labels, rows = [], []
    for line in open(path):
        fields = line.rstrip('\n').split('\t')
        labels.append(float(fields[0]))
        rows.append([numbers.setdefault((slot, text), len(numbers)) for slot, text in enumerate(fields[14:])])
    return numpy.array(labels), numpy.array(rows, dtype=numpy.int32)


def logits(model, ids):
    weight, vector, bias = model
    e = vector[ids]
    total = e.sum(1)
    return bias + weight[ids].sum(1) + ((total**2).sum(1) - (e**2).sum((1, 2))) / 2, e, total


def auc(scores, labels):
    order = numpy.argsort(scores, kind='stable')
    ranks = numpy.empty(len(scores))
    ranks[order] = numpy.arange(1, len(scores) + 1)
    clicks = labels.sum()
    return (ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks))


numbers = {}
labels, rows = read(sys.argv[1], numbers)
test_labels, test_rows = read(sys.argv[2], numbers)
weight, weight_squares = numpy.zeros(len(numbers)), numpy.full(len(numbers), INITIAL / BATCH)
keys = numpy.array([criteo_key(text.encode(), slot) for slot, text in numbers], U64)
vector = initial_vectors(keys, int(sys.argv[3]))
vector_squares = numpy.full(len(numbers), INITIAL / BATCH)
bias, bias_squares = 0.0, INITIAL / BATCH
for at in range(0, len(labels), BATCH):
    ids = rows[at:at + BATCH]
    y, e, total = logits((weight, vector, bias), ids)
    slope = (1 / (1 + numpy.exp(-y)) - labels[at:at + BATCH]) / BATCH
    keys, place = numpy.unique(ids, return_inverse=True)
    place = place.reshape(-1)
    g = numpy.bincount(place, numpy.repeat(slope, ids.shape[1]), len(keys))
    of_vectors = (slope[:, None, None] * (total[:, None, :] - e)).reshape(-1, WIDTH)
    g_vector = numpy.stack([numpy.bincount(place, of_vectors[:, c], len(keys)) for c in range(WIDTH)], 1)
    weight_squares[keys] += g * g
    weight[keys] -= RATE * g / numpy.sqrt(weight_squares[keys])
    vector_squares[keys] += (g_vector**2).mean(1)
    vector[keys] -= RATE * g_vector / numpy.sqrt(vector_squares[keys])[:, None]
    bias_squares += slope.sum()**2
    bias -= RATE * slope.sum() / numpy.sqrt(bias_squares)
print('%.6f' % auc(logits((weight, vector, bias), test_rows)[0], test_labels))
