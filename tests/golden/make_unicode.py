#!/usr/bin/env python3
"""make_unicode.py - makes examples/unicode_tables.h, the Unicode tables of examples/tokenizer.h
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_unicode.py >examples/unicode_tables.h
Needs tokenizers.

The tables say what the package `tokenizers` does, which is asked about every code point: its regular expressions and its
NFC have the Unicode versions of the libraries that it is built with. Combining classes cannot be asked for: they come from
Python's unicodedata, and the package's order of each two marks must agree.
"""
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
nfc, nfd = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str


def members(pattern):
    """The code points of a class, as the package's regular expressions see it."""
    text = "".join(map(chr, CODES))
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    return {ord(c) for piece, _ in split.pre_tokenize_str(text) for c in piece}


def ranges(codes):
    """Pairs: the gap before a range, and its length."""
    out, end = [], 0
    for c in sorted(codes):
        if out and c == end:
            out[-1] += 1
        else:
            out += [c - end, 1]
        end = c + 1
    return out


def classes():
    """Triples: the gap before a range of marks with the same combining class, its length and the class."""
    out, end = [], 0
    ccc = {c: unicodedata.combining(chr(c)) for c in CODES}
    for c in CODES:
        mark = chr(c)
        # U+0345 has the largest class, 240, and U+0334 the smallest, 1
        early = nfd("\u0345" + mark) != "\u0345" + nfd(mark)
        late = nfd(mark + "\u0334") != nfd(mark) + "\u0334"
        if not early and not late and ccc[c] not in (1, 240):
            ccc[c] = 0  # the package's Unicode version does not have it
        assert early == (0 < ccc[c] < 240) or nfd(mark) != mark, hex(c)
        assert late == (ccc[c] > 1) or nfd(mark) != mark, hex(c)
    for c in CODES:
        if nfd(chr(c)) != chr(c):
            continue
        if ccc[c] and out and c == end and out[-1] == ccc[c]:
            out[-2] += 1
        elif ccc[c]:
            out += [c - end, 1, ccc[c]]
        if ccc[c]:
            end = c + 1
    return out


def decompositions():
    """Runs of consecutive code points that decompose: the first, their number, and for each one word: the first code
    point, the index of the second one in `marks` times 2^18, and 2^31 if NFC keeps or makes this code point."""
    marks, out, start, end = [0], [], 0, -1
    for c in CODES:
        full = nfd(chr(c))
        if full == chr(c) or 0xAC00 <= c < 0xD7A4:
            continue
        first, second = full, 0
        if len(full) > 1:
            # one level: the shortest tail that leaves one code point before it
            first, second = nfc(full[:-1]), ord(full[-1])
            if len(first) != 1:  # the head is excluded from composition: U+1D160 and its like, U+FB2C, ...
                parts = [d for d in CODES_THAT_DECOMPOSE if nfd(chr(d)) == full[:-1]]
                first = chr(parts[0])
        if second not in marks:
            marks.append(second)
        word = ord(first) | marks.index(second) << 18 | (nfc(chr(c)) == chr(c)) << 31
        if c == end:
            out[start + 1] += 1
        else:
            start = len(out)
            out += [c, 1]
        out.append(word)
        end = c + 1
    return marks, out


def table(kind, name, numbers, comment):
    print(f"/* {comment} */\nstatic const {kind} {name}[] = {{")
    line = "   "
    for n in numbers:
        word = f" {n},"
        if len(line + word) > 98:
            print(line)
            line = "   "
        line += word
    print(line + "\n};\n")


CODES_THAT_DECOMPOSE = [c for c in CODES if nfd(chr(c)) != chr(c)]
letters, numbers, spaces = members(r"\p{L}"), members(r"\p{N}"), members(r"\s")
AGES = [(0x16EA0, "17.0 or later"), (0x1C89, "16.0"), (0x2EBF0, "15.1"), (0x31350, "15.0"), (0x0870, "14.0")]
letters_age = next(age for c, age in AGES if c in letters)
MARKS = [(0x16D40, "16.0 or later"), (0x1E4EC, "15.0"), (0x1AC1, "14.0"), (0x1ABF, "13.0"), (0x1E130, "12.0"), (0x08D3, "11.0"), (0x1DF6, "10.0"), (0x1E944, "9.0"), (0x08E3, "8.0")]
marks_age = next(age for c, age in MARKS if nfd("\u0345" + chr(c)) != "\u0345" + chr(c))
print(f"""/* unicode_tables.h - the Unicode tables of tokenizer.h - public domain or MIT, at your choice

   Made by tests/golden/make_unicode.py, which asks the Python package tokenizers {tokenizers.__version__}: do not
   edit. Letters and numbers are those of Unicode {letters_age}, NFC is that of Unicode {marks_age}.
   {len(letters)} letters, {len(numbers)} numbers, {len(CODES_THAT_DECOMPOSE) - 11172} code points that decompose, besides Hangul. */
#ifndef UNICODE_TABLES_H
#define UNICODE_TABLES_H

#include <stdint.h>

// clang-format off
""")
pairs = "pairs: code points before a range, code points in the range"
table("uint16_t", "unicode_letters", ranges(letters), "General category L. In " + pairs + ".")
table("uint16_t", "unicode_numbers", ranges(numbers), "General category N, likewise.")
table("uint16_t", "unicode_spaces", ranges(spaces), "White space, likewise.")
table("uint16_t", "unicode_classes", classes(), "Canonical combining classes above 0: gap, length, class.")
marks, runs = decompositions()
table("uint32_t", "unicode_seconds", marks, "Second code points of decompositions; the first entry means none.")
table("uint32_t", "unicode_decompositions", runs,
      "Canonical decompositions, in runs of consecutive code points: the first one, their number, and\n   for each a word: "
      "the first code point in 18 bits, the index of the second one in 13 bits, and in\n   the highest bit whether NFC "
      "composes the two.")
print("#endif /* UNICODE_TABLES_H */")
print(f"letters {len(letters)}, numbers {len(numbers)}, spaces {len(spaces)}, seconds {len(marks)}, words {len(runs)}, "
      f"unicodedata {unicodedata.unidata_version}", file=sys.stderr)
# what (?i:'s|'t|'re|'ve|'m|'ll|'d) matches besides ASCII
for letter in "strevmld":
    split = pre_tokenizers.Split(Regex("(?i:" + letter + ")"), "removed", invert=True)
    print(letter, [hex(ord(p)) for p, _ in split.pre_tokenize_str("".join(map(chr, CODES)))], file=sys.stderr)
