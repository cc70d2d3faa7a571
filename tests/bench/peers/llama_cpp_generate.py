#!/usr/bin/env python3
"""llama_cpp_generate.py - the model of bench_generate in llama.cpp - public domain or MIT, at your choice

    python3 llama_cpp_generate.py --variant f32|bf16 --weights FILE [--tokens N] [--steps N]

Needs the packages llama-cpp-python (or llama.cpp's own library under that name) and gguf. It writes the model to a
temporary GGUF file: matrices in the variant's type, the rest in f32, as llama.cpp's converter does. It runs in one thread,
calls llama.cpp's C functions, and computes the largest logit with NumPy. Keys and values are cached in f16, llama.cpp's
default.

It prints a line "step,N,CHECK,MS" for each run until it is killed or --steps are done: CHECK is the mean cross-entropy of
8 given tokens after the prompt, MS the time of --tokens greedy tokens after the prompt and its first token.

--weights holds the parameters as 32-bit floats in the order in which examples/gpt.h registers them.
"""
import argparse
import os
import tempfile
import time

import gguf
import llama_cpp as L
import numpy as np

PROMPT, GIVEN = 64, 8


def options():
    p = argparse.ArgumentParser()
    for name, value in (("layers", 12), ("width", 768), ("heads", 12), ("seq", 1024), ("vocab", 50257), ("tokens", 64),
                        ("steps", 1 << 40)):
        p.add_argument("--" + name, type=int, default=value)
    p.add_argument("--variant", choices=("f32", "bf16"), default="f32")
    p.add_argument("--weights", required=True)
    return p.parse_args()


def write_gguf(path, o):
    flat, at = np.fromfile(o.weights, dtype=np.float32), 0
    C, w = o.width, gguf.GGUFWriter(path, "gpt2")

    def take(*shape):
        nonlocal at
        n = int(np.prod(shape))
        at += n
        return flat[at - n:at].reshape(shape)

    def add(name, x):
        if x.ndim == 2 and o.variant == "bf16" and name != "position_embd.weight":
            kind = gguf.GGMLQuantizationType.BF16
            w.add_tensor(name, gguf.quantize(x, kind), raw_dtype=kind)
        else:
            w.add_tensor(name, x)

    def both(name, *shape):
        add(name + ".weight", take(*shape))
        add(name + ".bias", take(shape[0]))

    w.add_context_length(o.seq)
    w.add_embedding_length(C)
    w.add_feed_forward_length(4 * C)
    w.add_block_count(o.layers)
    w.add_head_count(o.heads)
    w.add_layer_norm_eps(1e-5)
    w.add_vocab_size(o.vocab)
    w.add_tokenizer_model("none")
    add("token_embd.weight", take(o.vocab, C))
    add("position_embd.weight", take(o.seq, C))
    for i in range(o.layers):
        b = "blk.%d." % i
        both(b + "attn_norm", C)
        q, q_bias, k, k_bias, v, v_bias = (take(C, C), take(C), take(C, C), take(C), take(C, C), take(C))
        add(b + "attn_qkv.weight", np.concatenate((q, k, v)))
        add(b + "attn_qkv.bias", np.concatenate((q_bias, k_bias, v_bias)))
        both(b + "attn_output", C, C)
        both(b + "ffn_norm", C)
        both(b + "ffn_up", 4 * C, C)
        both(b + "ffn_down", C, 4 * C)
    both("output_norm", C)
    assert at == flat.size, "--weights: %d numbers, the model has %d" % (flat.size, at)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def load(o):
    L.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.gguf")
        write_gguf(path, o)
        params = L.llama_model_default_params()
        params.use_mmap = False
        model = L.llama_model_load_from_file(path.encode(), params)
    params = L.llama_context_default_params()
    params.n_ctx = params.n_batch = 256
    params.n_threads = params.n_threads_batch = 1
    return model, L.llama_init_from_model(model, params)


def main():
    o = options()
    model, ctx = load(o)
    assert model and ctx, "llama.cpp does not load the model"

    def logits(ids):
        tokens = (L.llama_token * len(ids))(*ids)
        status = L.llama_decode(ctx, L.llama_batch_get_one(tokens, len(ids)))
        assert status == 0, "llama_decode: %d" % status
        return np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, -1), shape=(o.vocab,))

    def clear():
        L.llama_memory_clear(L.llama_get_memory(ctx), True)

    given, check = [i * 7919 % o.vocab for i in range(PROMPT + GIVEN)], 0.0
    for i in range(GIVEN):
        x = logits(given[PROMPT + i - 1 if i else 0:PROMPT + i]).astype(np.float64)
        check += (np.log(np.exp(x - x.max()).sum()) + x.max() - x[given[PROMPT + i]]) / GIVEN
    for step in range(1, o.steps + 1):
        clear()
        token = int(logits(given[:PROMPT]).argmax())
        start = time.perf_counter()
        for _ in range(o.tokens):
            token = int(logits([token]).argmax())
        print("step,%d,%.9g,%.3f" % (step, check, 1000 * (time.perf_counter() - start)), flush=True)


if __name__ == "__main__":
    main()
