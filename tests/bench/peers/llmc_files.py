#!/usr/bin/env python3
"""llmc_files.py - the input files of llm.c's train_gpt2 for the model of bench_train - public domain or MIT, at your choice

    python3 llmc_files.py DIR FILE...        writes DIR/gpt2_124M.bin and DIR/dev/data/tinyshakespeare/*.bin

llm.c is measured from DIR, a copy of https://github.com/karpathy/llm.c. Its batch size is set in its source: 16
sequences of 256 tokens are the batch of two ranks of bench_train.

    sed -i 's/int B = 4;/int B = 16;/; s/int T = 64;/int T = 256;/' train_gpt2.c
    sed -i 's/val_num_batches = 5/val_num_batches = 0/' train_gpt2.c
    make train_gpt2 && OMP_NUM_THREADS=2 build/bench_train --llmc DIR/train_gpt2

The weights are random, which does not change the speed. The tokens are the bytes of the files.
"""
import array
import os
import random
import sys

L, C, H, T, V = 6, 384, 6, 256, 256


def header(*numbers):
    return array.array("i", list(numbers) + [0] * (256 - len(numbers))).tobytes()


def main():
    folder, files = sys.argv[1], sys.argv[2:]
    order = [("n", V * C), ("n", T * C), ("1", L * C), ("0", L * C), ("n", L * 3 * C * C), ("0", L * 3 * C),
             ("n", L * C * C), ("0", L * C), ("1", L * C), ("0", L * C), ("n", L * 4 * C * C), ("0", L * 4 * C),
             ("n", L * 4 * C * C), ("0", L * C), ("1", C), ("0", C)]
    draw = random.Random(1)
    with open(os.path.join(folder, "gpt2_124M.bin"), "wb") as f:
        f.write(header(20240326, 3, T, V, L, H, C, V))
        for kind, n in order:
            f.write(array.array("f", [draw.gauss(0, 0.02) if kind == "n" else float(kind) for _ in range(n)]).tobytes())
    text = b"".join(open(name, "rb").read() for name in files)
    data = os.path.join(folder, "dev/data/tinyshakespeare")
    os.makedirs(data, exist_ok=True)
    for part in ("train", "val"):
        with open(os.path.join(data, "tiny_shakespeare_%s.bin" % part), "wb") as f:
            f.write(header(20240520, 1, len(text)))
            f.write(array.array("H", list(text)).tobytes())


if __name__ == "__main__":
    main()
