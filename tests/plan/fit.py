#!/usr/bin/env python3
"""Fits the planner's profile h100-nanotron to measured rows, and says how well it predicts.

    fit.py MODEL.so [ROWS.csv]    MODEL.so is made of model.c:  cc -O2 -shared -fPIC -I. model.c -o MODEL.so -lm -lpthread

Needs numpy and scipy. The closed form itself is dt_plan_estimate of dt_parallel.h; this script only varies its numbers.
Prints the errors in the sample and in 5-fold cross-validation, how well the memory tells which layouts do not fit,
how good the choices among the measured layouts are, and the profile as a C initializer.

Stalled rows. Of the rows with a pipeline 28 % belong to a second mode: their step takes longer by the same time for each
micro-batch, whatever the model. Repeats of one layout fall in both modes, so this belongs to the job, not to the layout.
The fit estimates the three constants (pp 2, pp 4, pp >= 8), but the profile does not contain them. A row with
pp > 1 counts as stalled if it took more than 1.3 x the prediction and prediction + stall is closer to it."""
import collections, csv, ctypes, math, os, sys
import numpy as np
from scipy.optimize import least_squares

GIB = 2.0**30
SHAPES = {  # layers, width, heads, ffn, tied; vocabulary 131,072, sequences of 4,096 tokens
    '1B': (16, 2048, 32, 8192, 1), '3B': (28, 3072, 32, 8192, 1),
    '8B': (32, 4096, 32, 14336, 0), '80B': (80, 8192, 64, 28672, 0)}
MODEL = 'layers width heads kv_heads ffn gated vocab seq tied experts top_k moe_every'.split()
LAYOUT = ('dp tp cp pp ep expert_tp tp_overlap zero shard_group recompute schedule chunks micro_batch accum sp').split()
COST = ('seconds compute bubble tp cp ep pp dp optimizer bytes params grads optim acts logits base parameters '
        'tokens_per_s_gpu mfu').split()
MODEL_T = np.dtype([(k, 'i4') for k in MODEL])
LAYOUT_T = np.dtype([(k, 'i4') for k in LAYOUT])
COST_T = np.dtype([(k, 'f8') for k in COST] + [('stages_without_layers', 'i4'), ('padding', 'i4')])

# Numbers that are known: data sheets, and what nanotron does (bf16 parameters and gradients, fp32 master, moments and
# accumulated gradients; ring attention and experts do not occur). 72 GiB are nine tenths of the GPU's 80.
KNOWN = dict(peak=989e12, hbm=3.0e12, memory=72 * GIB, node=8, dp_one_way=.7, reduce_bytes=4, param_bytes=2, grad_bytes=6,
             optim_bytes=12, act_shared=0, act_scores=0, logit_count=0, partition=1)
# Fitted: first guess, and the upper bound of shares
TIME = dict(
    product=(.72, 1), product_tokens=(500, 0), product_width=(150, 0), attention=(.45, 1), layer_traffic=(40, 0),
    logit_traffic=(40, 0), host_layer=(2.5e-3, 0), host_tp=(2e-3, 0), host_head_tp=(5e-4, 0), host_pp_tp=(1e-3, 0),
    host_pp_power=(1.3, 0), host_step=(.05, 0), jitter=(.02, 0), tp_near=(200e9, 0), tp_far=(200e9, 0),
    tp_far_latency=(50e-6, 0), dp_near=(250e9, 0), dp_far=(300e9, 0), dp_far_decay=(.5, 0), dp_overlap=(.5, 1),
    gather_latency=(1e-3, 0), pp_link=(30e9, 0), pp_latency=(1e-3, 0), optimizer_layer=(2e-3, 0),
    optimizer_traffic=(40, 0))
MEMORY = dict(act_width=(28, 0), act_ffn=(7, 0), act_gathered=(4, 0), act_ahead=(80, 0), logit_bytes=(12, 0),
              base_bytes=(2.5e8, 0))
STALL = (.55, 1.12, 1.29)  # seconds for each micro-batch with pp 2, pp 4, more


class Form:
    """dt_plan_estimate for many rows"""

    def __init__(self, path):
        self.so = ctypes.CDLL(os.path.abspath(path))
        self.so.plan_fields.restype = ctypes.c_char_p
        self.fields = self.so.plan_fields().decode().split()

    def __call__(self, rows, numbers):
        cost = np.zeros(len(rows.rows), COST_T)
        vector = np.array([float(numbers[f]) for f in self.fields])
        self.so.plan_rows(len(cost), *[a.ctypes.data_as(ctypes.c_void_p) for a in (rows.model, rows.layout, vector, cost)])
        return cost


class Rows:
    def __init__(self, rows):
        n = len(rows)
        self.rows, self.model, self.layout = rows, np.zeros(n, MODEL_T), np.zeros(n, LAYOUT_T)
        for i, r in enumerate(rows):
            layers, width, heads, ffn, tied = SHAPES[r['model']]
            self.model[i] = (layers, width, heads, heads, ffn, 1, 131072, 4096, tied, 0, 0, 0)
            self.layout[i]['dp'], self.layout[i]['tp'], self.layout[i]['pp'] = int(r['dp']), int(r['tp']), int(r['pp'])
            self.layout[i]['zero'], self.layout[i]['micro_batch'] = int(r['zero']), int(r['mbs'])
            self.layout[i]['accum'], self.layout[i]['schedule'], self.layout[i]['sp'] = int(r['gradacc']), 2, 1
        number = lambda k: np.array([float(r[k]) if r[k] not in ('', 'nan') else np.nan for r in rows])
        self.pp, self.tp, self.micros, self.memory = number('pp'), number('tp'), number('gradacc'), number('gpu_mem')
        self.seconds = number('gbs') * 4096 / (number('tok_s_gpu') * number('nodes') * 8)

    def take(self, index): return Rows([self.rows[i] for i in index])


def encode(fields): return np.array([math.log(v / (u - v)) if u else math.log(v) for v, u in fields.values()])


def decode(fields, x):
    return {k: u / (1 + math.exp(-t)) if u else math.exp(min(max(t, -60), 80)) for (k, (_, u)), t in zip(fields.items(), x)}


def start(): return {**KNOWN, **{k: v for k, (v, _) in {**TIME, **MEMORY}.items()}}


def cauchy(error, scale):
    """residuals whose squares are Cauchy's loss of the errors; done here so that the prior stays quadratic"""
    return np.sign(error) * scale * np.sqrt(np.log1p((error / scale)**2))


def stalled_by(stall, rows):
    return rows.micros * np.where(rows.pp == 2, stall[0], np.where(rows.pp == 4, stall[1], stall[2])) * (rows.pp > 1)


def is_stalled(predicted, stall, rows):
    late = np.abs(np.log((predicted + stalled_by(stall, rows)) / rows.seconds))
    return (rows.pp > 1) & (rows.seconds > 1.3 * predicted) & (late < np.abs(np.log(predicted / rows.seconds)))


def fit_time(form, rows, rounds=4):
    """numbers of TIME, and the three stalls; each round decides again which rows are stalled"""
    first = np.concatenate([encode(TIME), np.log(STALL)])
    read = lambda x: ({**start(), **decode(TIME, x[:len(TIME)])}, np.exp(x[len(TIME):]))
    x = first
    for i in range(rounds):
        numbers, stall = read(x)
        late = is_stalled(form(rows, numbers)['seconds'], stall, rows)

        def residuals(x):
            numbers, stall = read(x)
            predicted = form(rows, numbers)['seconds']
            error = np.log(np.where(late, predicted + stalled_by(stall, rows), predicted) / rows.seconds)
            return np.concatenate([cauchy(error, .15), math.sqrt(.05) * (x - first)])
        x = least_squares(residuals, x, max_nfev=25 if i < rounds - 1 else 40, ftol=1e-6).x
    return read(x)


def fit_memory(form, rows):
    first = encode(MEMORY)
    read = lambda x: {**start(), **decode(MEMORY, x)}

    def residuals(x):
        error = np.log(form(rows, read(x))['bytes'] / GIB / rows.memory)
        return np.concatenate([cauchy(error, .05), math.sqrt(.00025) * (x - first)])
    return read(least_squares(residuals, first, max_nfev=80).x)


def text(error):
    a = np.abs(error)
    return 'median %.2f %%, mean %.1f, p90 %.1f, within 10 %%: %.0f %%, bias %+.1f %%, n %d' % (
        100 * np.median(a), 100 * a.mean(), 100 * np.quantile(a, .9), 100 * (a < .1).mean(), 100 * np.median(error), len(a))


def by(error, rows, key):
    values = [r[key] for r in rows.rows]
    groups = sorted(set(values), key=lambda v: (len(v), v))
    pick = lambda v: error[[i for i, w in enumerate(values) if w == v]]
    return '    by %-8s' % key + '  '.join('%s: %.0f/%+.0f (%d)' % (
        v, 100 * np.median(abs(pick(v))), 100 * np.median(pick(v)), len(pick(v))) for v in groups)


def folds(rows, seed):
    fold = np.random.default_rng(seed).integers(0, 5, len(rows.rows))
    return [(np.where(fold != k)[0], np.where(fold == k)[0]) for k in range(5)]


def report_time(form, rows, seed):
    error, late = np.zeros(len(rows.rows)), np.zeros(len(rows.rows), bool)
    for train, test in folds(rows, seed):
        numbers, stall = fit_time(form, rows.take(train), 3)
        part = rows.take(test)
        predicted = form(part, numbers)['seconds']
        error[test], late[test] = predicted / part.seconds - 1, is_stalled(predicted, stall, part)
    print('5-fold cross-validation, seed %d, stalled rows %d of %d' % (seed, late.sum(), len(late)))
    print('  time, healthy rows:', text(error[~late]))
    print('  time, pp = 1 rows: ', text(error[rows.pp == 1]))
    print('  time, all rows:    ', text(error))
    return error


def report_choice(rows, error):
    """among the measured layouts of a model and a number of nodes: how good is the best of the predicted first three?"""
    groups = collections.defaultdict(list)
    for i, r in enumerate(rows.rows): groups[r['model'], r['nodes']].append(i)
    one, three, regret, bad = 0, 0, [], []
    groups = {k: v for k, v in sorted(groups.items()) if len(v) >= 5}
    for name, index in groups.items():
        took, predicted = rows.seconds[index], rows.seconds[index] * (1 + error[index])
        order = np.argsort(predicted)
        regret.append(took[order[0]] / took.min() - 1)
        best = took[order[:3]].min() / took.min() - 1
        one, three = one + (regret[-1] <= .05), three + (best <= .05)
        if best > .05: bad.append('%s on %s nodes %.0f %%' % (*name, 100 * best))
    print('  choice in %d groups: first within 5 %% of the best in %d (median %.1f %% slower), best of three in %d; not in: %s' % (
        len(groups), one, 100 * np.median(regret), three, ', '.join(bad) or 'none'))


def report_memory(form, fits, fails, numbers, seed):
    error = np.zeros(len(fits.rows))
    for train, test in folds(fits, seed):
        part = fits.take(test)
        error[test] = form(part, fit_memory(form, fits.take(train)))['bytes'] / GIB / part.memory - 1
    print('  memory:            ', text(error))
    good, bad = form(fits, numbers), form(fails, numbers)
    runs = bad['stages_without_layers'] == 0   # the others fail for another reason
    wrong, right = (good['bytes'] > numbers['memory']).sum(), bad['bytes'] > numbers['memory']
    print('  does not fit: precision %.1f %%, recall %.1f %% of the %d failed rows without an empty stage' % (
        100 * right.sum() / (right.sum() + wrong), 100 * right[runs].mean(), runs.sum()))


def main():
    form = Form(sys.argv[1])
    path = sys.argv[2] if len(sys.argv) > 2 else os.path.join(os.path.dirname(os.path.abspath(__file__)), 'nanotron_h100.csv')
    rows = [r for r in csv.DictReader(l for l in open(path) if not l.startswith('#'))]
    print('%d rows' % len(rows), end='')
    rows = [r for r in rows if int(r['dp']) * int(r['mbs']) * int(r['gradacc']) == int(r['gbs'])]
    missing = lambda r, k: r[k] in ('', 'nan')
    timed = Rows([r for r in rows if not missing(r, 'tok_s_gpu')])
    fits, fails = Rows([r for r in rows if not missing(r, 'gpu_mem')]), Rows([r for r in rows if missing(r, 'gpu_mem')])
    print(', %d of them consistent, %d timed' % (len(rows), len(timed.rows)))
    numbers, stall = fit_time(form, timed)
    memory = fit_memory(form, fits)
    numbers.update({k: memory[k] for k in MEMORY})
    numbers = {k: float('%.4g' % numbers[k]) if k not in KNOWN else numbers[k] for k in form.fields}
    cost = form(timed, numbers)
    error, late = cost['seconds'] / timed.seconds - 1, is_stalled(cost['seconds'], stall, timed)
    print('in the sample, stalled rows %d; stalls %s s' % (late.sum(), ' '.join('%.3f' % s for s in stall)))
    print('  time, healthy rows:', text(error[~late]))
    print('  time, pp = 1 rows: ', text(error[timed.pp == 1]))
    for key in 'model nodes tp pp dp mbs zero'.split():
        print(by(error[~late], timed.take(np.where(~late)[0]), key))
    e = form(fits, numbers)['bytes'] / GIB / fits.memory - 1
    print('  memory:            ', text(e))
    for key in 'model tp pp mbs zero'.split(): print(by(e, fits, key))
    for seed in (1, 2):
        report_choice(timed, report_time(form, timed, seed))
        report_memory(form, fits, fails, numbers, seed)
    print('    { .name = "h100-nanotron",')
    print(',\n'.join('        .%s = %.4g' % (k, numbers[k]) for k in form.fields if numbers[k]) + ' },')


if __name__ == '__main__': main()
