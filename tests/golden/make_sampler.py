"""make_sampler.py - makes the stored orders of PyTorch's DistributedSampler
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_sampler.py OUT     writes OUT/sampler.bin
        python3 make_gpt2.py --show OUT/sampler.bin     prints it as text
Needs torch 2.5 or later and numpy.

FORMAT
    As make_gpt2.py describes; golden.h reads it.
ARRAYS
    cases   (cases, 6): samples n, ranks R, seed, epoch, shuffle, drop_last
    case.I  (R, count): what each rank reads, in order; count may be 0
    long    (4): n, seed, and of torch.randperm(n) with that seed the sum of index * sample, both from 0, and the last
            sample: an order too long to be stored
"""
import os
import sys

import torch
from make_gpt2 import write_golden
from torch.utils.data import DistributedSampler

CASES = [(n, R, seed, epoch, 1, drop)
         for n, R, seed, epoch in [(1, 1, 0, 0), (1, 4, 0, 0), (2, 5, 1, 0), (3, 8, 1, 2), (7, 2, 1, 0), (7, 2, 1, 1),
                                   (10, 4, 0, 0), (10, 4, 0, 1), (10, 4, 1, 0), (10, 5, 3, 0), (23, 7, 42, 9)]
         for drop in (0, 1)]
CASES += [(n, R, 1, 1, 0, drop) for n, R in [(1, 1), (3, 8), (10, 4), (12, 4), (17, 3)] for drop in (0, 1)]
# these draw 623, 624 and 625 numbers, around the 624 words after which the Mersenne twister refills its state
CASES += [(624, 1, 5, 0, 1, 0), (625, 1, 5, 0, 1, 0), (626, 1, 5, 0, 1, 0), (1900, 3, 6, 0, 1, 0)]
# only 32 bits of the seed are used
CASES += [(9, 2, seed, epoch, 1, 0) for seed, epoch in [(2**31, 0), (2**32 - 1, 0), (2**32 - 1, 1), (2**32, 0),
                                                        (2**40 + 7, 3), (2**53 - 5, 4)]]
LONG = (100003, 77)


def orders(n, R, seed, epoch, shuffle, drop):
    ranks = []
    for rank in range(R):
        sampler = DistributedSampler(range(n), R, rank, shuffle=bool(shuffle), seed=seed, drop_last=bool(drop))
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
    return torch.tensor(ranks, dtype=torch.float64)


def main(out):
    arrays = {"cases": CASES}
    for i, case in enumerate(CASES):
        arrays[f"case.{i}"] = orders(*case)
    n, seed = LONG
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    arrays["long"] = [n, seed, (torch.arange(n) * order).sum().item(), order[-1].item()]
    write_golden(os.path.join(out, "sampler.bin"), arrays)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
