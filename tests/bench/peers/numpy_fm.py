#!/usr/bin/env python3
"""numpy_fm.py TRAIN TEST - a factorization machine in numpy, for ctr.sh - public domain or MIT, at your choice

Reads text in Criteo's format, of which it uses the categories, and trains for one pass with row-wise Adagrad in batches
of 512, as `train_ctr --model fm --width 4`: linear weights from 0, vectors from a normal distribution, float64. Prints
the AUC on TEST.
"""
import sys

import numpy

WIDTH, BATCH, RATE, INITIAL = 4, 512, 0.05, 0.01


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
vector = numpy.random.default_rng(3).normal(0, 0.01, (len(numbers), WIDTH))
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
print('summary,numpy_auc,%.6f' % auc(logits((weight, vector, bias), test_rows)[0], test_labels))
