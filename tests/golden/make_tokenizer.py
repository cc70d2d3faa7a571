#!/usr/bin/env python3
"""make_tokenizer.py - makes tokenizers and expected ids with the package tokenizers
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_tokenizer.py OUT                writes OUT/gpt2.json, llama3.json, qwen.json and vectors.json
        python3 make_tokenizer.py --check OUT        has the package the ids of OUT/vectors.json?
        python3 make_tokenizer.py --full OUT MB      larger vocabularies; OUT/text, MB megabytes and many code points, from
                                                     10 MB on all; OUT/lengths, the bytes of its parts; OUT/NAME.ids, for
                                                     each part the number of its ids and the ids (all int32)
        python3 make_tokenizer.py --shard FILE TEXT OUT   writes TEXT's tokens as an llm.c shard; prints the vocabulary's size
        python3 make_tokenizer.py --trained FILE TEXT VOCAB   trains on TEXT and compares with FILE: prints ok or WRONG
Needs tokenizers.

The three kinds have the regex, the normalizer, the options and the template of GPT-2, Llama 3 and Qwen 2.5; the
vocabularies are trained here, on the sources of dt and on generated text.
"""
import json
import os
import random
import struct
import sys
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
LLAMA = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
QWEN = LLAMA.replace("{1,3}", "")
# first code point and number of code points of 24 scripts, combining marks included
SCRIPTS = [(0x41, 58), (0xC0, 400), (0x370, 130), (0x400, 256), (0x531, 90), (0x591, 100), (0x600, 200), (0x700, 90),
           (0x900, 128), (0x980, 120), (0xB80, 120), (0xC80, 120), (0xE01, 90), (0xE81, 90), (0xF00, 200), (0x1000, 160),
           (0x10A0, 90), (0x1100, 256), (0x1200, 380), (0x13A0, 90), (0x1780, 110), (0x3041, 90), (0x30A1, 90),
           (0x4E00, 20000), (0xAC00, 11172), (0x1D400, 1000), (0xF900, 500), (0x1E00, 512), (0x2F800, 540), (0x10330, 27),
           (0x1E900, 100), (0x2150, 60), (0xFF10, 90)]
EMOJI = ["\U0001F469\u200D\U0001F4BB", "\U0001F468\u200D\U0001F469\u200D\U0001F467", "\U0001F44D\U0001F3FD", "\u2764\uFE0F",
         "\U0001F1E9\U0001F1EA", "\U0001F600", "\u0031\uFE0F\u20E3", "\U0001F3F4\U000E0067\U000E007F"]
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u3000", "\u2028", "\u0085", "\u200b", "   \n", "\x0b"]
WORDS = "I'm you're they'll HE'S it'S we'D don't \u2019s 'S 'LL 'rE 'Ve 'x 's' a'\u017f '\u017ft ''s 12345 3.14159 1,000,000 x_1 foo() {}".split()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end", "<|begin_of_text|>", "<|eot_id|>", "<|im_start|", "<mask>", " <mask> ",
           "\u00e9\u0301<norm>", "cafe\u0301", "caf\u00e9"]


def piece(r):
    k = r.random()
    if k < 0.3:
        first, n = r.choice(SCRIPTS)
        return "".join(chr(first + r.randrange(n)) for _ in range(r.randrange(1, 9)))
    if k < 0.4:
        return "".join(chr(r.choice([0x61, 0x65, 0x41, 0x6F, 0xE9, 0x1EA1, 0x3B1, 0x915])) +
                       "".join(chr(r.choice([0x300, 0x301, 0x323, 0x327, 0x345, 0x308, 0x93C, 0x5B0, 0x302]))
                               for _ in range(r.randrange(4))) for _ in range(r.randrange(1, 4)))
    if k < 0.5:
        return r.choice(EMOJI)
    if k < 0.7:
        return r.choice(SPACES) * r.choice([1, 1, 1, 2, 3])
    if k < 0.8:
        return r.choice(WORDS)
    if k < 0.83:
        return r.choice(SPECIAL)
    if k < 0.9:
        return str(r.randrange(10 ** r.randrange(1, 9)))
    if k < 0.93:
        c = r.randrange(0x110000)
        return chr(c if not 0xD800 <= c < 0xE000 else 0xFFFD)
    return "".join(r.choice("!?.,;:-_=+*/\\()[]{}<>|&^%$#@~`'\"") for _ in range(r.randrange(1, 6)))


def generated(seed, size):
    r = random.Random(seed)
    out, n = [], 0
    while n < size:
        out.append(piece(r))
        n += len(out[-1].encode())
    return "".join(out)


def sources():
    files = []
    for folder, _, names in os.walk(ROOT):
        if "/build" in folder or "/.git" in folder:
            continue
        files += [os.path.join(folder, n) for n in names if n.endswith((".c", ".h", ".md", ".sh", ".py", ".cu"))]
    return "\n".join(open(f, encoding="utf-8").read() for f in sorted(files))


def make(kind, vocab, text):
    t = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    level = dict(add_prefix_space=False, use_regex=False)
    if kind == "gpt2":
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        pattern = Regex(LLAMA if kind == "llama3" else QWEN)
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(**level)])
    if kind == "qwen":
        t.normalizer = normalizers.NFC()
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ["<|endoftext|>"] if kind == "gpt2" else []
    t.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if kind == "gpt2":
        t.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    if kind == "llama3":
        t.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>", "<|end", "<|end_of_text|>"])
        bos = t.token_to_id("<|begin_of_text|>")
        t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
            single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B",
            special_tokens=[("<|begin_of_text|>", bos)])])
    if kind == "qwen":
        t.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        t.add_tokens([AddedToken("cafe\u0301", normalized=True), AddedToken("<norm>", normalized=False, special=False)])
    return t


KINDS = ["gpt2", "llama3", "qwen"]


def golden(out):
    r = random.Random(1)
    text = sources()[:300000] + generated(2, 20000)
    vectors = []
    for kind in KINDS:
        t = make(kind, 330, text)
        t.save(os.path.join(out, kind + ".json"), pretty=False)
        texts = ["", " ", "Hello world", "  two  spaces\n\nand lines \n", "1234567 don't DON'T", "a<|endoftext|>b",
                 "x <|eot_id|><|end_of_text|><|end", "caf\u00e9 cafe\u0301 a\u0323\u0301", "if (x)\n\n    return;\n", "a <mask>  b"]
        texts += [generated(r.randrange(10 ** 6), 40) for _ in range(20)]
        for s in texts:
            vectors.append({"tokenizer": kind, "text": s, "ids": t.encode(s).ids})
    with open(os.path.join(out, "vectors.json"), "w") as f:
        f.write("[" + ",\n".join(json.dumps(v, separators=(",", ":")) for v in vectors) + "]\n")


def check(out):
    for v in json.load(open(os.path.join(out, "vectors.json"))):
        ids = Tokenizer.from_file(os.path.join(out, v["tokenizer"] + ".json")).encode(v["text"]).ids
        assert ids == v["ids"], v


def code_points(every):
    """All code points, or those on both sides of each border between two categories or two combining classes, which tables
    of ranges may have wrong, and one of every 61."""
    kind = [(unicodedata.category(chr(c)), unicodedata.combining(chr(c))) for c in range(0x110000)]
    kind.append(None)
    return [c for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000 and
            (every or c % 61 == 0 or kind[c] != kind[c - 1] or kind[c] != kind[c + 1])]


def full(out, megabytes):
    size = int(megabytes * 1e6)
    text = sources()[: 2 * size]
    train = text + generated(3, len(text) // 4)
    points = [chr(c) for c in code_points(every=megabytes >= 10)]
    whole = (text * (1 + size // len(text)))[: size // 2] + generated(4, size // 2)
    r = random.Random(5)
    parts, at = [], 0
    while at < len(whole):
        n = r.choice([1, 2, 3, 10, 100, 1000, 10000, 100000])
        parts.append(whole[at:at + n])
        at += n
    parts += ["\u0300" * 5000, "a" * 20000, " " * 20000, "\u0323\u0301" * 1000]
    parts += [chr(c) for c in range(0x250, 0x110000, 37) if not 0xD800 <= c < 0xE000]
    parts.append("".join(c + "x" for c in points))
    parts.append("".join("\u0345" + c + "\u0334" for c in points))
    with open(os.path.join(out, "text"), "wb") as f, open(os.path.join(out, "lengths"), "wb") as g:
        for p in parts:
            data = p.encode()
            f.write(data)
            g.write(struct.pack("<i", len(data)))
    for kind, vocab in zip(KINDS, [8000, 12000, 10000]):
        t = make(kind, vocab, train)
        t.save(os.path.join(out, kind + ".json"), pretty=kind == "qwen")
        with open(os.path.join(out, kind + ".ids"), "wb") as f:
            for e in t.encode_batch(parts):
                f.write(struct.pack(f"<{len(e.ids) + 1}i", len(e.ids), *e.ids))


def trained(file, path, vocab):
    text = open(path, encoding="utf-8", newline="").read()
    mine, theirs = json.load(open(file)), json.loads(make("gpt2", vocab, text).to_str())
    for key in ["vocab", "merges"]:
        same = mine["model"][key] == theirs["model"][key]
        print("ok" if same else "WRONG", key, len(mine["model"][key]), len(theirs["model"][key]))
    ids = Tokenizer.from_file(file).encode(text[:100000]).ids
    print("ok" if Tokenizer.from_file(file).decode(ids) == text[:100000] else "WRONG", "the package reads the file")


def shard(file, path, out):
    t = Tokenizer.from_file(file)
    ids = t.encode(open(path, encoding="utf-8", newline="").read()).ids
    with open(out, "wb") as f:
        f.write(struct.pack("<256i", 20240801, 7, len(ids), *[0] * 253) + struct.pack(f"<{len(ids)}i", *ids))
    print(t.get_vocab_size())


if __name__ == "__main__":
    if sys.argv[1] == "--full":
        full(sys.argv[2], float(sys.argv[3]))
    elif sys.argv[1] == "--check":
        check(sys.argv[2])
    elif sys.argv[1] == "--shard":
        shard(*sys.argv[2:])
    elif sys.argv[1] == "--trained":
        trained(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        golden(sys.argv[1])
