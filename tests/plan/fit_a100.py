#!/usr/bin/env python3
"""Fits the planner's profile a100-megatron to the 18 published rows of megatron_a100.csv.

    fit_a100.py MODEL.so    see fit.py

Four numbers are fitted; the others are data sheets' and Megatron-LM's. The rows of arXiv:2104.04473 do not give the
micro-batch and the chunks of a stage, which the authors chose for speed: the fastest that fits memory is taken."""
import csv, math, os, sys
import numpy as np
from scipy.optimize import least_squares
from fit import Form, GIB, LAYOUT_T, MODEL_T, decode, encode

KNOWN = dict(  # Selene: 8 A100 of 80 GB a node, each with a 200 Gbit/s link; fp16, gradients reduced in fp16
    peak=312e12, hbm=2.0e12, memory=76 * GIB, node=8, dp_near=230e9, dp_far=160e9, dp_far_decay=.1, dp_one_way=.9,
    reduce_bytes=2, tp_far=160e9, tp_far_latency=30e-6, pp_link=20e9, pp_latency=20e-6, product_width=150, attention=.3, logit_traffic=20,
    optimizer_traffic=40, param_bytes=2, grad_bytes=4, optim_bytes=12, act_width=8, act_ffn=4, act_shared=10,
    act_scores=5, logit_bytes=6, base_bytes=1e9)
FITTED = dict(product=(.75, 1), layer_traffic=(60, 0), tp_near=(200e9, 0), jitter=(.01, 0))


class Choices:
    """all layouts that a row may mean"""

    def __init__(self, rows):
        self.row, model, layout = [], [], []
        for i, r in enumerate(rows):
            n = {k: int(r[k]) for k in r if k not in ('source', 'model', 'recompute', 'seconds')}
            for b in [n['micro_batch']] if n['micro_batch'] else [1, 2, 4, 8, 16]:
                micros, rest = divmod(n['batch'], n['dp'] * b)
                if rest: continue
                for v in [n['chunks']] if n['chunks'] else range(1, 7):
                    if v > 1 and not n['chunks'] and (n['pp'] == 1 or n['layers'] // n['pp'] % v or micros % n['pp']): continue
                    self.row.append(i)
                    model.append((n['layers'], n['width'], n['heads'], 0, 4 * n['width'], 0, 51200, 2048, 1, 0, 0, 0))
                    layout.append((n['dp'], n['tp'], 1, n['pp'], 1, 0, 0, 0, 0, 2 if r['recompute'] == 'full' else 1,
                                   3 if v > 1 else 2, v, b, micros, n['sp']))
        self.rows, self.model, self.layout = layout, np.array(model, MODEL_T), np.array(layout, LAYOUT_T)
        self.row = np.array(self.row)


def main():
    form = Form(sys.argv[1])
    here = os.path.dirname(os.path.abspath(__file__))
    rows = list(csv.DictReader(open(os.path.join(here, 'megatron_a100.csv'))))
    choices, seconds = Choices(rows), np.array([float(r['seconds']) for r in rows])
    start = {**{k: 0 for k in form.fields}, **KNOWN}

    def predict(x):
        numbers = {**start, **decode(FITTED, x)}
        cost = form(choices, numbers)
        took = np.where(cost['bytes'] > numbers['memory'], 1e9, cost['seconds'])
        return np.array([took[choices.row == i].min() for i in range(len(rows))])
    first = encode(FITTED)
    x = least_squares(lambda x: np.concatenate([np.log(predict(x) / seconds), .05 * (x - first)]), first, diff_step=1e-3).x
    error = predict(x) / seconds - 1
    for r, e in zip(rows, error): print('%s %-6s %-9s %+.1f %%' % (r['source'], r['model'], r['recompute'], 100 * e))
    for source in sorted({r['source'] for r in rows}):
        e = np.abs(error[[r['source'] == source for r in rows]])
        print('%s: mean %.2f %%, median %.2f, largest %.1f' % (source, 100 * e.mean(), 100 * np.median(e), 100 * e.max()))
    numbers = {**start, **decode(FITTED, x)}
    print(',\n'.join('        .%s = %.4g' % (k, numbers[k]) for k in form.fields if numbers[k]))


if __name__ == '__main__': main()
