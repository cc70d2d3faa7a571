#!/usr/bin/env python3
"""paddle_ctr.py - Wide & Deep on Paddle's parameter server, for ctr.sh - public domain or MIT, at your choice

    python paddle_ctr.py write FILE LINES       writes samples in Criteo's format: Zipf-distributed categories
    DATA=FILE python -m paddle.distributed.launch --run_mode ps --server_num 1 --trainer_num 1 paddle_ctr.py

The model of `train_ctr --model wide-deep`: 26 embeddings of 16 numbers and 13 numbers enter an MLP 256-128; beside it a
linear part over the categories. Batches of 512, asynchronous, lazy Adam. The file is read before the time is measured,
so Paddle's figure is without the parsing of text, which train_ctr's includes. Prints "RESULT samples/s"; the median of
the steps counts.
"""
import os
import sys
import time

import numpy

SLOTS, NUMBERS, BATCH, WIDTH, ROWS = 26, 13, 512, 16, 1_000_000
STEPS, WARMUP, BATCHES = int(os.environ.get('STEPS', '100')), 10, 32


def write(path, lines):
    random = numpy.random.default_rng(1)
    with open(path, 'w') as out:
        for at in range(0, lines, 10_000):
            n = min(10_000, lines - at)
            ids = numpy.minimum(random.zipf(1.2, size=(n, SLOTS)), ROWS // SLOTS)
            labels, numbers = random.random(n) < 0.25, random.integers(0, 100, size=(n, NUMBERS))
            for i in range(n):
                out.write('%d\t' % labels[i] + '\t'.join('%d' % x for x in numbers[i]) + '\t' +
                          '\t'.join('%08x' % (x * 2654435761 % 2**32) for x in ids[i]) + '\n')


def read(path):
    """The first batches of the file, as Paddle's feeds: keys are a category's hash within its slot's range."""
    batches, lines = [], open(path)
    for _ in range(BATCHES):
        rows = [next(lines).rstrip('\n').split('\t') for _ in range(BATCH)]
        keys = numpy.array([[int(x, 16) % (ROWS // SLOTS) + s * (ROWS // SLOTS) for s, x in enumerate(r[14:])]
                            for r in rows], dtype='int64')
        feed = {'C%d' % s: keys[:, s:s + 1] for s in range(SLOTS)}
        feed['label'] = numpy.array([[float(r[0])] for r in rows], dtype='float32')
        feed['numbers'] = numpy.log1p(numpy.array([[float(x) for x in r[1:14]] for r in rows])).astype('float32')
        batches.append(feed)
    return batches


def main():
    import paddle
    from paddle.distributed import fleet
    paddle.enable_static()
    fleet.init(fleet.base.role_maker.PaddleCloudRoleMaker())
    data, nn = paddle.static.data, paddle.static.nn

    def embed(ids, name, width):
        initial = paddle.nn.initializer.Uniform(-0.01, 0.01)
        rows = nn.sparse_embedding(ids, size=[ROWS, width], param_attr=paddle.ParamAttr(name=name, initializer=initial))
        return paddle.reshape(rows, [-1, width])

    ids = [data('C%d' % s, [None, 1], 'int64') for s in range(SLOTS)]
    numbers, label = data('numbers', [None, NUMBERS], 'float32'), data('label', [None, 1], 'float32')
    x = paddle.concat([embed(i, 'embedding', WIDTH) for i in ids] + [numbers], axis=1)
    for width in (256, 128):
        x = nn.fc(x, width, activation='relu')
    y = nn.fc(x, 1)
    if os.environ.get('WIDE', '1') == '1':
        y = y + paddle.add_n([embed(i, 'wide', 1) for i in ids])
    loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(y, label))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    fleet.distributed_optimizer(paddle.optimizer.Adam(1e-3, lazy_mode=True), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    run = paddle.static.Executor(paddle.CPUPlace())
    run.run(paddle.static.default_startup_program())
    fleet.init_worker()
    batches, seconds = read(os.environ['DATA']), []
    for step in range(WARMUP + STEPS):
        begin = time.perf_counter()
        run.run(paddle.static.default_main_program(), feed=batches[step % BATCHES], fetch_list=[loss])
        seconds.append(time.perf_counter() - begin)
    seconds = seconds[WARMUP:]
    print('RESULT %.0f samples/s, median step %.0f samples/s' %
          (BATCH * STEPS / sum(seconds), BATCH / float(numpy.median(seconds))), flush=True)
    fleet.stop_worker()


if len(sys.argv) > 1 and sys.argv[1] == 'write':
    write(sys.argv[2], int(sys.argv[3]))
else:
    main()
