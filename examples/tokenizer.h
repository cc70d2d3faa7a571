/* tokenizer.h - byte-level BPE tokenizers: GPT-2's, Llama 3's and Qwen's tokenizer.json - public
   domain or MIT, at your choice

   Include tokenizer.h after dt_tensor.h. All functions are static. A tokenizer turns bytes into
   token ids as the Python package `tokenizers` does, and ids into bytes:

       tok *t = tok_open(ctx, "tokenizer.json");      // NULL after a failure
       int64_t n = 0;
       const int32_t *ids = tok_encode(t, text, bytes, (tok_encode_desc){ .add_special = 1 }, &n);
       ...
       const char *back = tok_decode(t, ids, n, (tok_decode_desc){ .skip_special = 1 }, &bytes);
       tok_close(t);

       tok_train(ctx, text, bytes, (tok_train_desc){ .vocab = 8000 }, "tokenizer.json");

   A text passes these stages:

       text --> added tokens --> normalizer --> words --> bytes --> merges --> ids
                "<|endoftext|>"  none, NFC      regex               BPE

   Byte-level BPE (Sennrich et al., arXiv:1508.07909; GPT-2): each byte of a word is a token at
   first. Then the pair of neighbours that is earliest in the list of merges becomes one token, the
   leftmost such pair first, until no pair is in the list. Every byte is a token, so every text can
   be encoded. The package takes only valid UTF-8; here a byte that is no part of a valid sequence
   counts as a symbol, NFC leaves it, and decoding returns it.

   These are errors: a file with another model, normalizer, pre-tokenizer, post-processor or
   decoder, or with another regex; options of a supported one that change the ids and are not listed
   here; a vocabulary without one of the 256 bytes; a merge whose parts or result are no tokens; an
   id that two tokens have. The error text has the file's name and the position. As in the package,
   ids may have gaps: an id in a gap is never encoded, and tok_decode fails for it. `truncation` and
   `padding` are ignored. Letters and numbers are those of Unicode 16, and NFC is that of Unicode 9,
   as in version 0.23 of the package, which made unicode_tables.h.

   A tok has scratch memory and a cache, so two threads must not share one. Its memory is of class
   DT_MEM_HOST, 3 to 5 MB and about 100 bytes per token.

   CONTENTS  Memory and hash tables - UTF-8 and Unicode - NFC - Words: the regexes - Merges: BPE -
             Reading tokenizer.json - Opening and closing - Encoding - Decoding - Training */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "unicode_tables.h"

typedef struct tok tok;

typedef struct tok_encode_desc {
    int add_special; /* 1: add what the post-processor's template adds, for example Llama 3's bos */
    /* A text may be encoded in parts that end at tok_safe_end. All but the first continue the text:
       the template and add_prefix_space add nothing before them. All but the last have more after
       them: the template adds nothing there. */
    int continues, has_more;
} tok_encode_desc;

/* The end of a stream of decoded text: the first bytes of a UTF-8 sequence that is not complete.
   Zero it before the first call. */
typedef struct tok_held {
    int bytes;
    unsigned char byte[4];
} tok_held;

typedef struct tok_decode_desc {
    int skip_special; /* 1: special tokens decode to nothing */
    /* NULL, or the state of a stream: tok_decode returns complete UTF-8 sequences, holds back the
       bytes of the last one if it may still become complete, and returns these first in the next
       call. Invalid bytes are not held back. */
    tok_held *held;
} tok_decode_desc;

/* Receives ids of tok_encode_file, which are valid during the call. */
typedef void (*tok_put_fn)(void *user, const int32_t *ids, int64_t n);

typedef struct tok_train_desc {
    int vocab;                  /* size of the vocabulary, at least 256 plus the special tokens */
    int64_t min_frequency;      /* a pair that occurs less often is not merged; 0 means 1 */
    const char *const *special; /* special tokens, which get the first ids; may be NULL */
    int n_special;
} tok_train_desc;

/* Limits. TOK_MAX_IDS: ids of a vocabulary. TOK_CACHE: entries of the cache of words. */
enum { TOK_MAX_IDS = 1 << 22, TOK_CACHE = 1 << 15, TOK_MAX_FILE = 100000000, TOK_BLOCKS = 16 };

/* The kind of a code point is in the low bits of tok.kind; the other bits are for NFC. */
enum { TOK_OTHER = 0, TOK_LETTER = 1, TOK_NUMBER = 2, TOK_SPACE = 3 };
enum {
    TOK_KIND = 3,
    TOK_JOINS = 4,   /* may change with the code points before it */
    TOK_CHANGES = 8, /* NFC changes it even if it is alone */
    TOK_CODES = 0x110000
};

/* What splits a text into words. */
enum { TOK_GPT2 = 0, TOK_LLAMA3, TOK_QWEN, TOK_REGEXES };
static const char *const tok_regex[TOK_REGEXES] = {
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
};

/* Memory that grows; `bytes` is its capacity. */
typedef struct tok_block {
    void *data;
    size_t bytes;
} tok_block;

/* A slot of a hash table from 64-bit keys to a value and, in some tables, a rank. It is empty if
   `value` is -1. */
typedef struct tok_slot {
    uint64_t key;
    int32_t rank, value;
} tok_slot;

typedef struct tok_map {
    tok_slot *slot;
    uint64_t mask; /* slots - 1; the number of slots is a power of two */
} tok_map;

typedef struct tok_token {
    uint32_t offset, bytes; /* of its text in tok.text */
    unsigned char exists, special, added;
} tok_token;

/* A token that is found before the text is split into words. */
typedef struct tok_added {
    const unsigned char *find; /* the text to find, of `bytes` bytes */
    uint32_t bytes;
    int32_t id;
    int normalized, lstrip, rstrip;
} tok_added;

/* A cached word and its ids, of the size of a cache line. */
typedef struct tok_cached {
    uint32_t hash;
    unsigned char bytes, count;
    unsigned char word[26];
    int32_t id[8];
} tok_cached;

/* A token of a word that is being merged, in a list. */
typedef struct tok_symbol {
    int32_t id, before, after; /* id -1: merged into the token before */
} tok_symbol;

struct tok {
    dt_ctx *ctx;
    tok_block fixed[TOK_BLOCKS]; /* memory of the arrays below */
    int n_fixed;
    int32_t vocab, n_added;
    tok_token *token;    /* (vocab) */
    unsigned char *text; /* the texts of all tokens */
    size_t text_bytes;
    int32_t byte_id[256];
    tok_map merge;              /* pair of ids -> rank and id */
    tok_map by_text;            /* hash of a text -> id, for tokens that merges make */
    tok_added *added;           /* (n_added), by first byte, the longest first */
    int32_t added_from[2][257]; /* [normalized][first byte]: range of `added` */
    unsigned char *kind;        /* (TOK_CODES) */
    int nfc;                    /* 1: the normalizer is NFC */
    unsigned char *combining;   /* (TOK_CODES) combining classes, if nfc */
    tok_map decompose, compose; /* if nfc: code point -> pair; pair -> code point */
    int regex, prefix_space, ignore_merges;
    int can_cut;             /* 1: no added token spans a safe end */
    int continues;           /* 1: the text at hand continues another one */
    size_t piece_bytes;      /* of the pieces of tok_encode_file */
    int32_t *before, *after; /* ids that the template adds */
    int n_before, n_after;
    tok_cached *cache; /* (TOK_CACHE) */
    /* scratch memory */
    tok_block ids, symbols, heap, normal, segment, prefixed, decoded, piece;
    int64_t n_ids;
};

// ==== Memory and hash tables =====================================================================

/* Allocates an array of the tokenizer, zeroed; tok_close frees it. */
static inline void *tok_alloc(tok *t, size_t count, size_t size, const char *what) {
    size_t bytes = count * size;
    void *p = dt_alloc(t->ctx, DT_MEM_HOST, bytes ? bytes : 1, what);
    if (!p) return NULL;
    memset(p, 0, bytes);
    t->fixed[t->n_fixed].data = p;
    t->fixed[t->n_fixed++].bytes = bytes ? bytes : 1;
    return p;
}

/* Makes a block at least `bytes` long and keeps the first `used` bytes. Returns its data, or NULL
   after a failure. */
static inline void *tok_reserve(dt_ctx *ctx, tok_block *b, size_t bytes, size_t used) {
    if (bytes <= b->bytes && b->data) return b->data;
    size_t capacity = bytes + bytes / 2 + 64;
    void *data = dt_alloc(ctx, DT_MEM_HOST, capacity, "tokenizer");
    if (!data) return NULL;
    if (used) memcpy(data, b->data, used);
    if (b->data) dt_free(ctx, DT_MEM_HOST, b->data, b->bytes);
    b->data = data;
    b->bytes = capacity;
    return data;
}

static inline void tok_release(dt_ctx *ctx, tok_block *b) {
    if (b->data) dt_free(ctx, DT_MEM_HOST, b->data, b->bytes);
    b->data = NULL;
    b->bytes = 0;
}

static inline uint64_t tok_mix(uint64_t x) {
    x *= UINT64_C(0x9E3779B97F4A7C15);
    return x ^ x >> 32;
}

static inline uint64_t tok_hash(const unsigned char *s, size_t n) {
    uint64_t h = n, word;
    for (; n >= 8; s += 8, n -= 8) h = tok_mix(h ^ (memcpy(&word, s, 8), word));
    for (word = 0; n > 0; n--) word = word << 8 | s[n - 1];
    return tok_mix(h ^ word);
}

static inline uint64_t tok_pair(int64_t a, int64_t b) { return (uint64_t)a << 32 | (uint64_t)b; }

/* Makes an empty table with room for `count` keys. */
static inline void tok_map_make(tok *t, tok_map *m, size_t count, const char *what) {
    size_t slots = 8;
    while (slots < 2 * count + 2) slots *= 2;
    m->slot = (tok_slot *)tok_alloc(t, slots, sizeof *m->slot, what);
    m->mask = slots - 1;
    for (size_t i = 0; m->slot && i < slots; i++) m->slot[i].value = -1;
}

/* Returns the slot of a key, or the empty slot where it belongs. */
static inline tok_slot *tok_map_at(const tok_map *m, uint64_t key) {
    uint64_t i = tok_mix(key) & m->mask;
    while (m->slot[i].value >= 0 && m->slot[i].key != key) i = (i + 1) & m->mask;
    return &m->slot[i];
}

/* Returns the slot in by_text of a token with this text, or the empty slot where it belongs. */
static inline tok_slot *tok_text_slot(const tok *t, const unsigned char *s, size_t n) {
    uint64_t i = tok_hash(s, n) & t->by_text.mask;
    for (;; i = (i + 1) & t->by_text.mask) {
        tok_slot *slot = &t->by_text.slot[i];
        const tok_token *k = slot->value < 0 ? NULL : &t->token[slot->value];
        if (!k || (k->bytes == n && memcmp(t->text + k->offset, s, n) == 0)) return slot;
    }
}

// ==== UTF-8 and Unicode ==========================================================================

/* Decodes the code point at s, of n >= 1 bytes, and sets *bytes to its length. Returns -1 and sets
   *bytes to 1 if there is no valid UTF-8. */
static inline int32_t tok_utf8(const unsigned char *s, size_t n, size_t *bytes) {
    static const int32_t least[5] = { 0, 0, 0x80, 0x800, 0x10000 };
    unsigned first = s[0];
    size_t length = first < 0x80   ? 1
                    : first < 0xC2 ? 0
                    : first < 0xE0 ? 2
                    : first < 0xF0 ? 3
                    : first < 0xF5 ? 4
                                   : 0;
    *bytes = 1;
    if (length == 1) return (int32_t)first;
    if (length == 0 || length > n) return -1;
    int32_t c = (int32_t)(first & (0x7Fu >> length));
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80) return -1;
        c = c << 6 | (s[i] & 0x3F);
    }
    if (c < least[length] || c >= TOK_CODES || (c >= 0xD800 && c < 0xE000)) return -1;
    *bytes = length;
    return c;
}

/* Writes a code point and returns its length. */
static inline size_t tok_utf8_put(unsigned char *out, uint32_t c) {
    size_t length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    if (length == 1) return out[0] = (unsigned char)c, 1;
    for (size_t i = length; i-- > 1; c >>= 6) out[i] = (unsigned char)(0x80 | (c & 0x3F));
    out[0] = (unsigned char)(0xF00u >> length | c);
    return length;
}

static inline int tok_kind(
    const tok *t, const unsigned char *s, size_t n, size_t at, size_t *bytes) {
    *bytes = 1;
    if (s[at] < 0x80) return t->kind[s[at]] & TOK_KIND;
    int32_t c = tok_utf8(s + at, n - at, bytes);
    return c < 0 ? TOK_OTHER : t->kind[c] & TOK_KIND;
}

/* Returns the end of the run of code points of one kind that begins at `at`. */
static inline size_t tok_run(const tok *t, const unsigned char *s, size_t n, size_t at, int kind) {
    size_t bytes;
    while (at < n && tok_kind(t, s, n, at, &bytes) == kind) at += bytes;
    return at;
}

static inline void tok_mark(tok *t, const uint16_t *pairs, size_t count, int kind) {
    size_t at = 0;
    for (size_t i = 0; i + 1 < count; i += 2) {
        at += pairs[i];
        memset(t->kind + at, kind, pairs[i + 1]);
        at += pairs[i + 1];
    }
}

#define TOK_COUNT(table) (sizeof(table) / sizeof *(table))

static inline void tok_unicode_make(tok *t) {
    t->kind = (unsigned char *)tok_alloc(t, TOK_CODES, 1, "kinds of code points");
    if (!t->kind) return;
    tok_mark(t, unicode_letters, TOK_COUNT(unicode_letters), TOK_LETTER);
    tok_mark(t, unicode_numbers, TOK_COUNT(unicode_numbers), TOK_NUMBER);
    tok_mark(t, unicode_spaces, TOK_COUNT(unicode_spaces), TOK_SPACE);
}

// ==== NFC ========================================================================================

/* Normalization form C (Unicode Standard Annex 15): decompose each code point, sort each run of
   marks by combining class, then compose each mark with the last starter (a code point of class 0)
   if they have a composition and no mark between them has the same class or a higher one:

       e + dot below + acute   --> dot below has class 220 and acute 230
       e-acute + dot below     --> e, acute, dot below
                               --> e, dot below, acute --> e-dot-below, acute

   A segment begins at each code point that cannot change with those before it. */

enum { TOK_HANGUL = 0xAC00, TOK_HANGULS = 11172, TOK_L = 0x1100, TOK_V = 0x1161, TOK_T = 0x11A7 };

static inline void tok_nfc_make(tok *t) {
    size_t at = 0, count = 0;
    const uint32_t *d = unicode_decompositions, *end = d + TOK_COUNT(unicode_decompositions);
    t->nfc = 1;
    t->combining = (unsigned char *)tok_alloc(t, TOK_CODES, 1, "combining classes");
    tok_map_make(t, &t->decompose, TOK_COUNT(unicode_decompositions), "decompositions");
    tok_map_make(t, &t->compose, TOK_COUNT(unicode_decompositions), "compositions");
    if (dt_error(t->ctx) != DT_OK) return;
    for (size_t i = 0; i + 2 < TOK_COUNT(unicode_classes); i += 3) {
        at += unicode_classes[i];
        for (int k = 0; k < unicode_classes[i + 1]; k++, at++) {
            t->combining[at] = (unsigned char)unicode_classes[i + 2];
            t->kind[at] |= TOK_JOINS;
        }
    }
    for (; d < end; d += 2 + count) {
        count = d[1];
        for (size_t i = 0; i < count; i++) {
            uint32_t c = d[0] + (uint32_t)i, word = d[2 + i], first = word & 0x3FFFF;
            uint32_t second = unicode_seconds[word >> 18 & 0x1FFF];
            tok_slot *slot = tok_map_at(&t->decompose, c);
            *slot = (tok_slot){ c, (int32_t)second, (int32_t)first };
            if (!(word >> 31)) t->kind[c] |= TOK_CHANGES;
            if (word >> 31) {
                slot = tok_map_at(&t->compose, tok_pair(first, second));
                *slot = (tok_slot){ tok_pair(first, second), 0, (int32_t)c };
                t->kind[second] |= TOK_JOINS;
            }
        }
    }
    for (int c = TOK_V; c < TOK_V + 21; c++) t->kind[c] |= TOK_JOINS;
    for (int c = TOK_T + 1; c < TOK_T + 28; c++) t->kind[c] |= TOK_JOINS;
    /* a code point joins those before it if the first of its decomposition does */
    for (uint64_t i = 0; i <= t->decompose.mask; i++) {
        const tok_slot *slot = &t->decompose.slot[i], *first = slot;
        if (slot->value < 0) continue;
        while (tok_map_at(&t->decompose, (uint64_t)first->value)->value >= 0)
            first = tok_map_at(&t->decompose, (uint64_t)first->value);
        t->kind[slot->key] |= t->kind[first->value] & TOK_JOINS;
    }
}

/* Writes the full decomposition of a code point, of at most 4 code points, and returns its length.
   The first of a pair decomposes further, the second does not. */
static inline size_t tok_decompose(const tok *t, uint32_t c, uint64_t *out) {
    uint32_t s = c - TOK_HANGUL;
    if (c >= TOK_HANGUL && s < TOK_HANGULS) {
        out[0] = TOK_L + s / 588;
        out[1] = TOK_V + s % 588 / 28;
        out[2] = TOK_T + s % 28;
        return s % 28 ? 3 : 2;
    }
    const tok_slot *slot = tok_map_at(&t->decompose, c);
    if (slot->value < 0) return out[0] = c, 1;
    size_t n = tok_decompose(t, (uint32_t)slot->value, out);
    if (slot->rank) out[n++] = (uint32_t)slot->rank;
    return n;
}

/* Returns the composition of two code points, or 0. */
static inline uint32_t tok_compose(const tok *t, uint32_t a, uint32_t b) {
    if (a - TOK_L < 19 && b - TOK_V < 21) return TOK_HANGUL + ((a - TOK_L) * 21 + (b - TOK_V)) * 28;
    if (a - TOK_HANGUL < TOK_HANGULS && (a - TOK_HANGUL) % 28 == 0 && b - TOK_T - 1 < 27)
        return a + b - TOK_T;
    const tok_slot *slot = tok_map_at(&t->compose, tok_pair(a, b));
    return slot->value < 0 ? 0 : (uint32_t)slot->value;
}

static inline int tok_by_key(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts each run of marks by combining class; marks of the same class keep their order. */
static inline void tok_sort_marks(const tok *t, uint64_t *c, size_t n) {
    for (size_t i = 0, end; i < n; i = end) {
        int sorted = 1;
        for (end = i + 1; end < n && t->combining[c[i]] && t->combining[c[end]]; end++)
            sorted &= t->combining[c[end - 1]] <= t->combining[c[end]];
        if (sorted) continue;
        for (size_t k = i; k < end; k++)
            c[k] |= (uint64_t)t->combining[c[k]] << 56 | (uint64_t)(k - i) << 21;
        qsort(c + i, end - i, sizeof *c, tok_by_key);
        for (size_t k = i; k < end; k++) c[k] &= 0x1FFFFF;
    }
}

/* Composes n code points in place and returns the new number. */
static inline size_t tok_compose_all(const tok *t, uint64_t *c, size_t n) {
    size_t out = 0, starter = SIZE_MAX;
    int last = -1; /* class of the last code point after the starter; -1: no such code point */
    for (size_t i = 0; i < n; i++) {
        int class_of = t->combining[c[i]];
        uint32_t both = 0;
        if (starter != SIZE_MAX && last < class_of)
            both = tok_compose(t, (uint32_t)c[starter], (uint32_t)c[i]);
        if (both) {
            c[starter] = both;
            continue;
        }
        last = class_of ? class_of : -1;
        if (!class_of) starter = out;
        c[out++] = c[i];
    }
    return out;
}

/* Returns the end of the segment that begins at `at`, and its number of code points. *plain becomes
   1 if NFC does not change it. An invalid byte is a segment. */
static inline size_t tok_segment(
    const tok *t, const unsigned char *s, size_t n, size_t at, size_t *count, int *plain) {
    size_t bytes;
    int32_t c = tok_utf8(s + at, n - at, &bytes);
    *count = 1;
    *plain = 1;
    at += bytes;
    if (c < 0) return at;
    *plain = !(t->kind[c] & TOK_CHANGES);
    while (at < n && s[at] >= 0x80) {
        c = tok_utf8(s + at, n - at, &bytes);
        if (c < 0 || !(t->kind[c] & TOK_JOINS)) break;
        at += bytes;
        *plain = 0;
        ++*count;
    }
    return at;
}

/* Normalizes *s of *n bytes; *s then points to scratch memory, or stays if nothing changes. Returns
   0 after a failure. */
static inline int tok_nfc(tok *t, const unsigned char **s, size_t *n) {
    const unsigned char *in = *s;
    size_t at = 0, copied = 0, used = 0, count = 0, end;
    for (int plain = 1; at < *n; at = end) {
        end = at + 1;
        if (in[at] < 0x80 && (end == *n || in[end] < 0x80)) continue;
        end = tok_segment(t, in, *n, at, &count, &plain);
        if (plain) continue;
        uint64_t *c = (uint64_t *)tok_reserve(t->ctx, &t->segment, 4 * count * sizeof *c, 0);
        unsigned char *out = (unsigned char *)tok_reserve(
            t->ctx, &t->normal, used + (at - copied) + 16 * count + (*n - end), used);
        if (!c || !out) return 0;
        memcpy(out + used, in + copied, at - copied);
        used += at - copied;
        size_t length = 0, bytes = 0;
        for (size_t i = at; i < end; i += bytes)
            length += tok_decompose(t, (uint32_t)tok_utf8(in + i, end - i, &bytes), c + length);
        tok_sort_marks(t, c, length);
        length = tok_compose_all(t, c, length);
        for (size_t i = 0; i < length; i++) used += tok_utf8_put(out + used, (uint32_t)c[i]);
        copied = end;
    }
    if (copied == 0) return 1;
    memcpy((unsigned char *)t->normal.data + used, in + copied, *n - copied);
    *s = (const unsigned char *)t->normal.data;
    *n = used + *n - copied;
    return 1;
}

// ==== Words ======================================================================================

/* The regexes of tok_regex by hand. At each position the first alternative that matches wins, and
   each position has one that does, so the words are the whole text. */

/* Returns the length of 's 't 're 've 'm 'll 'd at s, else 0. Without regard to case the long s
   (U+017F, C5 BF) is an s too. */
static inline size_t tok_contraction(const unsigned char *s, size_t n, int any_case) {
    if (n < 2 || s[0] != '\'') return 0;
    if (any_case && n > 2 && s[1] == 0xC5 && s[2] == 0xBF) return 3;
    unsigned a = s[1], b = n > 2 ? s[2] : 0;
    if (any_case && a >= 'A' && a <= 'Z') a += 'a' - 'A';
    if (any_case && b >= 'A' && b <= 'Z') b += 'a' - 'A';
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

/* Returns the end of the word that begins at `at`, by GPT-2's regex. */
static inline size_t tok_word_gpt2(const tok *t, const unsigned char *s, size_t n, size_t at) {
    size_t end = tok_contraction(s + at, n - at, 0), last = at, bytes;
    size_t from = at + (s[at] == ' ');
    int kind = from < n ? tok_kind(t, s, n, from, &bytes) : TOK_SPACE;
    if (end) return at + end;
    if (kind != TOK_SPACE) return tok_run(t, s, n, from, kind);
    /* white space; its last code point belongs to the next word */
    for (end = at; end < n && tok_kind(t, s, n, end, &bytes) == TOK_SPACE; end += bytes) last = end;
    return end < n && last > at ? last : end;
}

static inline int tok_is_newline(unsigned char c) { return c == '\r' || c == '\n'; }

/* The same by the regex of Llama 3 (digits 3) and of Qwen (digits 1). */
static inline size_t tok_word_llama(
    const tok *t, const unsigned char *s, size_t n, size_t at, int digits) {
    size_t end = tok_contraction(s + at, n - at, 1), last = at, newline = 0, bytes, more;
    if (end) return at + end;
    int kind = tok_kind(t, s, n, at, &bytes);
    end = at + bytes;
    if (kind == TOK_LETTER) return tok_run(t, s, n, at, TOK_LETTER);
    if (kind == TOK_NUMBER) {
        for (int i = 1; i < digits && end < n; i++, end += more)
            if (tok_kind(t, s, n, end, &more) != TOK_NUMBER) break;
        return end;
    }
    if (!tok_is_newline(s[at]) && end < n && tok_kind(t, s, n, end, &more) == TOK_LETTER)
        return tok_run(t, s, n, end, TOK_LETTER);
    size_t from = at + (s[at] == ' ');
    if (from < n && tok_kind(t, s, n, from, &more) == TOK_OTHER) {
        end = tok_run(t, s, n, from, TOK_OTHER);
        while (end < n && tok_is_newline(s[end])) end++;
        return end;
    }
    for (end = at; end < n && tok_kind(t, s, n, end, &bytes) == TOK_SPACE; end += bytes) {
        last = end;
        if (tok_is_newline(s[end])) newline = end + 1;
    }
    if (newline) return newline;
    return end < n && last > at ? last : end;
}

static inline size_t tok_word(const tok *t, const unsigned char *s, size_t n, size_t at) {
    if (t->regex == TOK_GPT2) return tok_word_gpt2(t, s, n, at);
    return tok_word_llama(t, s, n, at, t->regex == TOK_LLAMA3 ? 3 : 1);
}

// ==== Merges =====================================================================================

/* The merges of a word are taken from a binary heap of (rank, position), smallest first, and the
   word is a doubly linked list, so a word of n bytes takes O(n log n). An entry of the heap whose
   pair has changed since is out of date: its rank is not that of the pair that is there now. */

static inline void tok_push_id(tok *t, int32_t id) {
    int32_t *ids = (int32_t *)tok_reserve(
        t->ctx, &t->ids, (size_t)(t->n_ids + 1) * sizeof *ids, (size_t)t->n_ids * sizeof *ids);
    if (ids) ids[t->n_ids++] = id;
}

static inline void tok_heap_push(uint64_t *heap, size_t *count, uint64_t x) {
    size_t i = (*count)++;
    for (; i > 0 && heap[(i - 1) / 2] > x; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = x;
}

static inline uint64_t tok_heap_pop(uint64_t *heap, size_t *count) {
    uint64_t top = heap[0], x = heap[--*count];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < *count) {
        child += child + 1 < *count && heap[child + 1] < heap[child];
        if (heap[child] >= x) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = x;
    return top;
}

/* Pushes the merge of the token at `at` and the one after it, if there is one. */
static inline void tok_push_merge(
    const tok *t, const tok_symbol *y, int32_t at, uint64_t *heap, size_t *count) {
    if (at < 0 || y[at].after < 0) return;
    const tok_slot *m = tok_map_at(&t->merge, tok_pair(y[at].id, y[y[at].after].id));
    if (m->value >= 0) tok_heap_push(heap, count, tok_pair(m->rank, at));
}

/* Appends the ids of a word of n >= 2 bytes. */
static inline void tok_merge_word(tok *t, const unsigned char *s, size_t n) {
    tok_symbol *y = (tok_symbol *)tok_reserve(t->ctx, &t->symbols, n * sizeof *y, 0);
    uint64_t *heap = (uint64_t *)tok_reserve(t->ctx, &t->heap, 3 * n * sizeof *heap, 0);
    size_t count = 0;
    if (!y || !heap) return;
    for (int32_t i = 0; i < (int32_t)n; i++)
        y[i] = (tok_symbol){ t->byte_id[s[i]], i - 1, i + 1 < (int32_t)n ? i + 1 : -1 };
    for (int32_t i = 0; i + 1 < (int32_t)n; i++) tok_push_merge(t, y, i, heap, &count);
    while (count > 0) {
        uint64_t top = tok_heap_pop(heap, &count);
        int32_t at = (int32_t)(top & 0xFFFFFFFF), next = y[at].after;
        if (y[at].id < 0 || next < 0) continue;
        const tok_slot *m = tok_map_at(&t->merge, tok_pair(y[at].id, y[next].id));
        if (m->value < 0 || (uint64_t)m->rank != top >> 32) continue;
        y[at].id = m->value;
        y[at].after = y[next].after;
        y[next].id = -1;
        if (y[at].after >= 0) y[y[at].after].before = at;
        tok_push_merge(t, y, y[at].before, heap, &count);
        tok_push_merge(t, y, at, heap, &count);
    }
    for (int32_t i = 0; i >= 0; i = y[i].after) tok_push_id(t, y[i].id);
}

/* Appends the ids of a word. The cache is direct-mapped: a word replaces the one in its entry. */
static inline void tok_encode_word(tok *t, const unsigned char *s, size_t n) {
    if (n == 1) {
        tok_push_id(t, t->byte_id[s[0]]);
        return;
    }
    uint32_t hash = (uint32_t)tok_hash(s, n);
    tok_cached *c = &t->cache[hash % TOK_CACHE];
    if (c->bytes == n && c->hash == hash && memcmp(c->word, s, n) == 0) {
        for (int i = 0; i < c->count; i++) tok_push_id(t, c->id[i]);
        return;
    }
    int64_t first = t->n_ids;
    const tok_slot *whole = t->ignore_merges ? tok_text_slot(t, s, n) : NULL;
    if (whole && whole->value >= 0)
        tok_push_id(t, whole->value);
    else
        tok_merge_word(t, s, n);
    int64_t count = t->n_ids - first;
    if (n > sizeof c->word || count > 8 || dt_error(t->ctx) != DT_OK) return;
    c->hash = hash;
    c->bytes = (unsigned char)n;
    c->count = (unsigned char)count;
    memcpy(c->word, s, n);
    memcpy(c->id, (int32_t *)t->ids.data + first, (size_t)count * sizeof(int32_t));
}

// ==== Reading tokenizer.json =====================================================================

static inline int tok_is_absent(const dt_json *j, int node) {
    return node < 0 || dt_json_kind_of(j, node) == DT_JSON_NULL;
}

static inline const char *tok_type(const dt_json *j, int node) {
    const char *type = dt_json_string(j, dt_json_find(j, node, "type"), NULL);
    return type ? type : "(no type)";
}

/* Returns 1 if the node is an object of this type. */
static inline int tok_is(const dt_json *j, int node, const char *type) {
    return strcmp(tok_type(j, node), type) == 0;
}

static inline int tok_flag(const dt_json *j, int object, const char *key, int fallback) {
    int value = fallback, node = dt_json_find(j, object, key);
    if (!tok_is_absent(j, node) && !dt_json_bool(j, node, &value))
        dt_json_fail(j, node, "%s: true or false is needed", key);
    return value;
}

/* Reports an error if a flag has another value than the supported one. */
static inline void tok_flag_must_be(
    const dt_json *j, int object, const char *key, int fallback, int supported) {
    if (tok_flag(j, object, key, fallback) != supported)
        dt_json_fail(j, object, "%s %s is not supported", key, supported ? "false" : "true");
}

/* Returns a token id, or -1 after an error. */
static inline int32_t tok_read_id(const dt_json *j, int node) {
    int64_t id = 0;
    if (dt_json_int(j, node, &id) && id >= 0 && id < TOK_MAX_IDS) return (int32_t)id;
    dt_json_fail(j, node, "a token id is a whole number from 0 to %d", TOK_MAX_IDS - 1);
    return -1;
}

/* The byte-level alphabet: a printable byte of Latin-1 stands for itself, and the others, in order,
   are the code points from U+0100 on. */
static inline int tok_is_printable(int byte) {
    return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
}

/* Writes the code points of the 256 bytes. */
static inline void tok_alphabet(uint32_t code[256]) {
    for (uint32_t b = 0, other = 0x100; b < 256; b++)
        code[b] = tok_is_printable((int)b) ? b : other++;
}

/* Writes the bytes that a text of the byte-level alphabet stands for. Returns their number, or -1
   if a code point is not in the alphabet. `out` may hold n bytes. */
static inline int64_t tok_unmap(const char *text, size_t n, unsigned char *out) {
    const unsigned char *s = (const unsigned char *)text;
    int64_t used = 0;
    for (size_t at = 0, bytes; at < n; at += bytes) {
        int32_t c = tok_utf8(s + at, n - at, &bytes);
        int byte = c < 0x100 ? c : c < 0x121 ? c - 0x100 : c < 0x143 ? c - 0x121 + 0x7F : 0xAD;
        if (c < 0 || c > 0x143 || (c < 0x100 && !tok_is_printable(c))) return -1;
        out[used++] = (unsigned char)byte;
    }
    return used;
}

/* Stores a token: its text is already at the end of tok.text. */
static inline void tok_put(tok *t, const dt_json *j, int node, int32_t id, size_t bytes) {
    if (dt_error(t->ctx) != DT_OK) return;
    if (t->token[id].exists) dt_json_fail(j, node, "another token has id %d too", id);
    if (bytes == 0) dt_json_fail(j, node, "the token of id %d is empty", id);
    t->token[id] = (tok_token){ (uint32_t)t->text_bytes, (uint32_t)bytes, 1, 0, 0 };
    t->text_bytes += bytes;
}

/* Reads model.vocab and allocates everything whose size depends on it. Tokens with a code point
   outside the byte-level alphabet, for example special tokens, are no result of merges. */
static inline void tok_read_vocab(tok *t, const dt_json *j, int vocab, int added) {
    size_t room = 0, bytes = 0;
    int n = dt_json_count(j, vocab), n_added = dt_json_count(j, added);
    for (int i = 0; i < n + n_added && dt_error(t->ctx) == DT_OK; i++) {
        int node = i < n ? dt_json_at(j, vocab, i) : dt_json_at(j, added, i - n);
        int32_t id = tok_read_id(j, i < n ? node : dt_json_find(j, node, "id"));
        if (i < n)
            dt_json_key(j, node, &bytes);
        else if (!dt_json_string(j, dt_json_find(j, node, "content"), &bytes))
            dt_json_fail(j, node, "an added token needs a content, a string");
        if (id >= t->vocab) t->vocab = id + 1;
        room += i < n ? bytes : 8 * bytes; /* a token and its NFC, with the slack of tok_nfc */
    }
    if (dt_error(t->ctx) != DT_OK) return;
    t->token = (tok_token *)tok_alloc(t, (size_t)t->vocab, sizeof *t->token, "tokens");
    t->text = (unsigned char *)tok_alloc(t, room, 1, "texts of tokens");
    t->added = (tok_added *)tok_alloc(t, (size_t)n_added, sizeof *t->added, "added tokens");
    tok_map_make(t, &t->by_text, (size_t)n, "tokens by text");
    for (int i = 0; i < n && dt_error(t->ctx) == DT_OK; i++) {
        int node = dt_json_at(j, vocab, i);
        const char *key = dt_json_key(j, node, &bytes);
        int32_t id = tok_read_id(j, node);
        unsigned char *text = t->text + t->text_bytes;
        int64_t length = tok_unmap(key, bytes, text);
        if (length < 0) memcpy(text, key, bytes);
        tok_put(t, j, node, id, length < 0 ? bytes : (size_t)length);
        if (length > 0) tok_text_slot(t, text, (size_t)length)->value = id;
    }
    for (int b = 0; b < 256 && dt_error(t->ctx) == DT_OK; b++) {
        unsigned char byte = (unsigned char)b;
        t->byte_id[b] = tok_text_slot(t, &byte, 1)->value;
        if (t->byte_id[b] < 0) dt_json_fail(j, vocab, "there is no token for byte %d", b);
    }
}

/* Finds a part of a merge. Returns its token's id, or -1 after an error. */
static inline int32_t tok_read_part(
    const tok *t, const dt_json *j, int node, const char *s, size_t n, unsigned char *out) {
    int64_t bytes = tok_unmap(s, n, out);
    int32_t id = bytes > 0 ? tok_text_slot(t, out, (size_t)bytes)->value : -1;
    if (id < 0) dt_json_fail(j, node, "a merge of '%.*s', which is no token", (int)n, s);
    return id;
}

/* Reads one merge, "a b" or ["a","b"], and stores it with a rank. */
static inline void tok_read_merge(tok *t, const dt_json *j, int node, int32_t rank) {
    size_t n[2] = { 0, 0 };
    const char *part[2] = { dt_json_string(j, node, &n[0]), NULL };
    const char *space = part[0] ? (const char *)memchr(part[0], ' ', n[0]) : NULL;
    int is_pair = dt_json_kind_of(j, node) == DT_JSON_ARRAY && dt_json_count(j, node) == 2;
    if (space) {
        part[1] = space + 1;
        n[1] = n[0] - (size_t)(space - part[0]) - 1;
        n[0] = (size_t)(space - part[0]);
    }
    for (int i = 0; is_pair && i < 2; i++)
        part[i] = dt_json_string(j, dt_json_at(j, node, i), &n[i]);
    if (!part[0] || !part[1] || (space && memchr(part[1], ' ', n[1]))) {
        dt_json_fail(j, node, "a merge is a string 'a b' or a pair [\"a\", \"b\"]");
        return;
    }
    unsigned char *out = (unsigned char *)tok_reserve(t->ctx, &t->prefixed, n[0] + n[1], 0);
    int32_t a = out ? tok_read_part(t, j, node, part[0], n[0], out) : -1;
    int32_t b = a < 0 ? -1 : tok_read_part(t, j, node, part[1], n[1], out + t->token[a].bytes);
    if (b < 0) return;
    memcpy(out, t->text + t->token[a].offset, t->token[a].bytes);
    int32_t id = tok_text_slot(t, out, t->token[a].bytes + t->token[b].bytes)->value;
    tok_slot *slot = tok_map_at(&t->merge, tok_pair(a, b));
    if (id < 0)
        dt_json_fail(j, node, "merge %d makes '%.*s%.*s', which is no token", rank, (int)n[0],
            part[0], (int)n[1], part[1]);
    else if (slot->value >= 0)
        dt_json_fail(j, node, "merge %d is also merge %d", rank, slot->rank);
    else
        *slot = (tok_slot){ tok_pair(a, b), rank, id };
}

static inline void tok_read_model(tok *t, const dt_json *j) {
    static const char *const fixes[] = { "continuing_subword_prefix", "end_of_word_suffix" };
    int model = dt_json_find(j, 0, "model"), vocab = dt_json_find(j, model, "vocab");
    int merges = dt_json_find(j, model, "merges"), added = dt_json_find(j, 0, "added_tokens");
    int dropout = dt_json_find(j, model, "dropout");
    double rate = 0;
    /* files of GPT-2's age have no type */
    if (dt_json_find(j, model, "type") >= 0 && !tok_is(j, model, "BPE"))
        dt_json_fail(j, model, "model %s is not supported; BPE is", tok_type(j, model));
    if (dt_json_kind_of(j, vocab) != DT_JSON_OBJECT || dt_json_kind_of(j, merges) != DT_JSON_ARRAY)
        dt_json_fail(j, model, "model.vocab, an object, and model.merges, an array, are needed");
    if (!tok_is_absent(j, added) && dt_json_kind_of(j, added) != DT_JSON_ARRAY)
        dt_json_fail(j, added, "added_tokens is not an array");
    if (!tok_is_absent(j, dropout) && (!dt_json_number(j, dropout, &rate) || rate != 0))
        dt_json_fail(j, dropout, "dropout is not supported");
    for (int i = 0; i < 2; i++) {
        int node = dt_json_find(j, model, fixes[i]);
        const char *text = dt_json_string(j, node, NULL);
        if (!tok_is_absent(j, node) && !(text && !*text))
            dt_json_fail(j, node, "%s is not supported", fixes[i]);
    }
    t->ignore_merges = tok_flag(j, model, "ignore_merges", 0);
    if (dt_error(t->ctx) == DT_OK) tok_read_vocab(t, j, vocab, added);
    if (dt_error(t->ctx) == DT_OK)
        tok_map_make(t, &t->merge, (size_t)dt_json_count(j, merges), "merges");
    for (int i = 0; i < dt_json_count(j, merges) && dt_error(t->ctx) == DT_OK; i++) {
        int node = dt_json_at(j, merges, i);
        const char *line = dt_json_string(j, node, NULL);
        if (!line || strncmp(line, "#version", 8) != 0) tok_read_merge(t, j, node, i);
    }
}

/* Sorts added tokens: those of the text before those of the normalized text, then by first byte,
   then the longest first. */
static inline int tok_by_length(const void *a, const void *b) {
    const tok_added *x = (const tok_added *)a, *y = (const tok_added *)b;
    if (x->normalized != y->normalized) return x->normalized - y->normalized;
    if (x->find[0] != y->find[0]) return x->find[0] - y->find[0];
    if (x->bytes != y->bytes) return x->bytes > y->bytes ? -1 : 1;
    return memcmp(x->find, y->find, x->bytes);
}

/* Reads one added token: a token of the vocabulary, or one with an id of its own. */
static inline void tok_read_added(tok *t, const dt_json *j, int node, int vocab) {
    size_t bytes = 0;
    const char *content = dt_json_string(j, dt_json_find(j, node, "content"), &bytes);
    int32_t id = tok_read_id(j, dt_json_find(j, node, "id"));
    tok_added *a = &t->added[t->n_added++];
    if (strlen(content) != bytes) dt_json_fail(j, node, "an added token holds a NUL");
    int known = dt_json_find(j, vocab, content);
    if (known >= 0 && tok_read_id(j, known) != id)
        dt_json_fail(j, node, "'%s' has id %d here and another one in the vocabulary", content, id);
    tok_flag_must_be(j, node, "single_word", 0, 0);
    memset(a, 0, sizeof *a);
    a->bytes = (uint32_t)bytes;
    a->id = id;
    a->lstrip = tok_flag(j, node, "lstrip", 0);
    a->rstrip = tok_flag(j, node, "rstrip", 0);
    int special = tok_flag(j, node, "special", 0);
    a->normalized = tok_flag(j, node, "normalized", !special);
    a->find = t->text + t->text_bytes;
    memcpy(t->text + t->text_bytes, content, bytes);
    if (known < 0) tok_put(t, j, node, id, bytes);
    if (dt_error(t->ctx) != DT_OK) return;
    if (t->token[id].added) dt_json_fail(j, node, "token %d is added twice", id);
    if (bytes == 0) dt_json_fail(j, node, "an added token is empty");
    t->token[id].added = 1;
    t->token[id].special = (unsigned char)special;
    size_t length = bytes;
    const unsigned char *normal = a->find;
    if (known >= 0) t->text_bytes += bytes;
    if (a->normalized && t->nfc && tok_nfc(t, &normal, &length) && normal != a->find) {
        a->find = t->text + t->text_bytes;
        memcpy(t->text + t->text_bytes, normal, length);
        a->bytes = (uint32_t)length;
        t->text_bytes += length;
    }
    int kind = a->find[0] < 0x80 ? t->kind[a->find[0]] & TOK_KIND : TOK_OTHER;
    int letter = kind == TOK_LETTER || kind == TOK_NUMBER;
    if (memchr(a->find, '\n', a->bytes) || (a->lstrip && letter)) t->can_cut = 0;
}

static inline void tok_read_added_tokens(tok *t, const dt_json *j) {
    int added = dt_json_find(j, 0, "added_tokens");
    int vocab = dt_json_find(j, dt_json_find(j, 0, "model"), "vocab");
    t->can_cut = 1;
    for (int i = 0; i < dt_json_count(j, added) && dt_error(t->ctx) == DT_OK; i++)
        tok_read_added(t, j, dt_json_at(j, added, i), vocab);
    if (dt_error(t->ctx) != DT_OK) return;
    if (t->n_added) qsort(t->added, (size_t)t->n_added, sizeof *t->added, tok_by_length);
    for (int i = 1; i < t->n_added; i++)
        if (tok_by_length(&t->added[i - 1], &t->added[i]) == 0)
            dt_json_fail(j, added, "added tokens %d and %d have the same text", t->added[i - 1].id,
                t->added[i].id);
    for (int set = 0, i = 0; set < 2; set++)
        for (int b = 0; b <= 256; b++) {
            while (
                i < t->n_added && (t->added[i].normalized < set ||
                                      (t->added[i].normalized == set && t->added[i].find[0] < b)))
                i++;
            t->added_from[set][b] = i;
        }
}

static inline void tok_read_normalizer(tok *t, const dt_json *j, int node) {
    int list = dt_json_find(j, node, "normalizers");
    if (tok_is_absent(j, node)) return;
    if (tok_is(j, node, "Sequence") && dt_json_kind_of(j, list) == DT_JSON_ARRAY) {
        for (int i = 0; i < dt_json_count(j, list); i++)
            tok_read_normalizer(t, j, dt_json_at(j, list, i));
    } else if (!tok_is(j, node, "NFC"))
        dt_json_fail(
            j, node, "normalizer %s is not supported; null and NFC are", tok_type(j, node));
    else if (!t->nfc)
        tok_nfc_make(t);
}

static inline void tok_read_words(tok *t, const dt_json *j) {
    int node = dt_json_find(j, 0, "pre_tokenizer"), list = dt_json_find(j, node, "pretokenizers");
    int split = dt_json_at(j, list, 0), level = dt_json_at(j, list, 1);
    if (tok_is(j, node, "ByteLevel")) {
        t->prefix_space = tok_flag(j, node, "add_prefix_space", 1);
        tok_flag_must_be(j, node, "use_regex", 1, 1);
        return;
    }
    if (!tok_is(j, node, "Sequence") || dt_json_count(j, list) != 2 || !tok_is(j, split, "Split") ||
        !tok_is(j, level, "ByteLevel")) {
        dt_json_fail(j, node < 0 ? 0 : node,
            "pre_tokenizer %s is not supported; ByteLevel and a Sequence of Split and ByteLevel "
            "are",
            tok_type(j, node));
        return;
    }
    const char *behavior = dt_json_string(j, dt_json_find(j, split, "behavior"), NULL);
    int pattern = dt_json_find(j, dt_json_find(j, split, "pattern"), "Regex");
    const char *regex = dt_json_string(j, pattern, NULL);
    if (!behavior || strcmp(behavior, "Isolated") != 0)
        dt_json_fail(
            j, split, "behavior %s is not supported; Isolated is", behavior ? behavior : "");
    tok_flag_must_be(j, split, "invert", 0, 0);
    tok_flag_must_be(j, level, "use_regex", 1, 0);
    tok_flag_must_be(j, level, "add_prefix_space", 1, 0);
    while (regex && t->regex < TOK_REGEXES && strcmp(regex, tok_regex[t->regex]) != 0) t->regex++;
    if (!regex || t->regex == TOK_REGEXES)
        dt_json_fail(j, pattern < 0 ? split : pattern,
            "regex %s is not supported; those of GPT-2, Llama 3 and Qwen 2 are",
            regex ? regex : "(none)");
}

/* Reads the ids of one special token of a template into `out`, or counts them if it is NULL. */
static inline int tok_read_template_ids(
    const tok *t, const dt_json *j, int token, int special, int32_t *out) {
    const char *name = dt_json_string(j, dt_json_find(j, token, "id"), NULL);
    int ids = dt_json_find(j, dt_json_find(j, special, name ? name : ""), "ids");
    if (dt_json_kind_of(j, ids) != DT_JSON_ARRAY)
        dt_json_fail(
            j, token, "the template's special_tokens have no ids for %s", name ? name : "");
    for (int i = 0; i < dt_json_count(j, ids) && out; i++) {
        out[i] = tok_read_id(j, dt_json_at(j, ids, i));
        if (out[i] >= 0 && (out[i] >= t->vocab || !t->token[out[i]].exists))
            dt_json_fail(j, ids, "id %d is no token", out[i]);
    }
    return dt_json_count(j, ids);
}

/* Reads a TemplateProcessing: special tokens before and after the text, which is sequence A. */
static inline void tok_read_template(tok *t, const dt_json *j, int node) {
    int single = dt_json_find(j, node, "single"), special = dt_json_find(j, node, "special_tokens");
    int total = 0, texts = 0;
    if (t->before) dt_json_fail(j, node, "a second template is not supported");
    for (int pass = 0; pass < 2 && dt_error(t->ctx) == DT_OK; pass++) {
        if (pass) t->before = (int32_t *)tok_alloc(t, (size_t)total, sizeof(int32_t), "template");
        if (pass && !t->before) return;
        for (int i = 0, at = 0; i < dt_json_count(j, single); i++) {
            int item = dt_json_at(j, single, i), token = dt_json_find(j, item, "SpecialToken");
            int text = dt_json_find(j, dt_json_find(j, item, "Sequence"), "id");
            const char *name = dt_json_string(j, text, NULL);
            if (token >= 0) {
                int n = tok_read_template_ids(t, j, token, special, pass ? t->before + at : NULL);
                at += n;
                if (pass) *(texts ? &t->n_after : &t->n_before) += n;
            } else if (name && strcmp(name, "A") == 0)
                texts++;
            else
                dt_json_fail(j, item, "a template has special tokens and sequence A");
            total = at;
        }
        if (texts != 1) dt_json_fail(j, node, "a template needs sequence A once");
        if (!pass) texts = 0;
    }
    t->after = t->before + t->n_before;
}

static inline void tok_read_post(tok *t, const dt_json *j, int node) {
    int list = dt_json_find(j, node, "processors");
    if (tok_is_absent(j, node) || tok_is(j, node, "ByteLevel")) return;
    if (tok_is(j, node, "TemplateProcessing"))
        tok_read_template(t, j, node);
    else if (tok_is(j, node, "Sequence") && dt_json_kind_of(j, list) == DT_JSON_ARRAY)
        for (int i = 0; i < dt_json_count(j, list); i++)
            tok_read_post(t, j, dt_json_at(j, list, i));
    else
        dt_json_fail(j, node,
            "post_processor %s is not supported; ByteLevel and TemplateProcessing are",
            tok_type(j, node));
}

static inline void tok_read(tok *t, const dt_json *j) {
    int decoder = dt_json_find(j, 0, "decoder"), model = dt_json_find(j, 0, "model");
    if (dt_json_kind_of(j, 0) != DT_JSON_OBJECT) dt_json_fail(j, 0, "an object is needed");
    int words = dt_json_find(j, 0, "pre_tokenizer");
    int is_level = tok_is(j, words, "ByteLevel") || tok_is(j, words, "Sequence");
    if (tok_flag(j, model, "byte_fallback", 0) && !is_level)
        dt_json_fail(j, words < 0 ? model : words,
            "a tokenizer in the style of sentencepiece (byte_fallback), as Llama 2's, Mistral's "
            "and "
            "Gemma's, is not supported; byte-level BPE is, as GPT-2's, Llama 3's and Qwen's");
    if (!tok_is_absent(j, decoder) && !tok_is(j, decoder, "ByteLevel"))
        dt_json_fail(j, decoder, "decoder %s is not supported; ByteLevel is", tok_type(j, decoder));
    tok_unicode_make(t);
    t->cache = (tok_cached *)tok_alloc(t, TOK_CACHE, sizeof *t->cache, "cache of words");
    if (dt_error(t->ctx) == DT_OK) tok_read_words(t, j);
    if (dt_error(t->ctx) == DT_OK) tok_read_normalizer(t, j, dt_json_find(j, 0, "normalizer"));
    if (dt_error(t->ctx) == DT_OK) tok_read_model(t, j);
    if (dt_error(t->ctx) == DT_OK) tok_read_added_tokens(t, j);
    if (dt_error(t->ctx) == DT_OK) tok_read_post(t, j, dt_json_find(j, 0, "post_processor"));
}

// ==== Opening and closing ========================================================================

/* Frees a tokenizer; NULL is allowed. */
static inline void tok_close(tok *t) {
    if (!t) return;
    tok_block *scratch[] = { &t->ids, &t->symbols, &t->heap, &t->normal, &t->segment, &t->prefixed,
        &t->decoded, &t->piece };
    for (size_t i = 0; i < TOK_COUNT(scratch); i++) tok_release(t->ctx, scratch[i]);
    for (int i = 0; i < t->n_fixed; i++) tok_release(t->ctx, &t->fixed[i]);
    dt_free(t->ctx, DT_MEM_HOST, t, sizeof *t);
}

static inline tok *tok_new(dt_ctx *ctx) {
    tok *t = dt_error(ctx) == DT_OK ? (tok *)dt_alloc(ctx, DT_MEM_HOST, sizeof *t, "tok") : NULL;
    if (!t) return NULL;
    memset(t, 0, sizeof *t);
    t->ctx = ctx;
    t->piece_bytes = 1 << 20;
    return t;
}

/* Returns 1 if the file is tokenizer.model, a protobuf: it begins with field 1, the first piece,
   and its length, and the piece begins with field 1, its text. JSON begins with white space or
   '{'. */
static inline int tok_is_sentencepiece(const char *text, size_t bytes) {
    return bytes > 3 && text[0] == '\n' && text[2] == '\n' && !strchr(" \t\r\n{", text[1]);
}

/* Reads a tokenizer.json. Returns NULL after a failure: DT_ERR_IO and what is wrong where. */
static inline tok *tok_open(dt_ctx *ctx, const char *path) {
    size_t bytes = 0;
    char *text = dt_file_read(ctx, path, TOK_MAX_FILE, &bytes);
    if (text && tok_is_sentencepiece(text, bytes))
        dt_fail(ctx, DT_ERR_IO, "%s: a model of sentencepiece; tokenizer.json is needed", path);
    dt_json *j = text && dt_error(ctx) == DT_OK ? dt_json_parse(ctx, path, text, bytes) : NULL;
    tok *t = j ? tok_new(ctx) : NULL;
    if (t) tok_read(t, j);
    dt_json_free(j);
    if (text) dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
    if (t && dt_error(ctx) == DT_OK) return t;
    tok_close(t);
    return NULL;
}

/* Returns the size of the vocabulary: the largest id + 1. */
static inline int32_t tok_vocab(const tok *t) { return t->vocab; }

/* Returns 1 if the id is a token's; a vocabulary may have gaps. */
static inline int tok_is_token(const tok *t, int32_t id) {
    return id >= 0 && id < t->vocab && t->token[id].exists;
}

/* Returns the id of the token with this text, for example "<|endoftext|>", or -1. */
static inline int32_t tok_id(const tok *t, const char *text) {
    size_t n = strlen(text);
    for (int i = 0; i < t->n_added; i++) {
        const tok_token *k = &t->token[t->added[i].id];
        if (k->bytes == n && memcmp(t->text + k->offset, text, n) == 0) return t->added[i].id;
    }
    return n ? tok_text_slot(t, (const unsigned char *)text, n)->value : -1;
}

/* Returns an id that a generated text may begin after: the last one that the template adds before a
   text, else that of <|endoftext|>, else that of a newline. */
static inline int32_t tok_first_id(const tok *t) {
    int32_t end = tok_id(t, "<|endoftext|>");
    return t->n_before ? t->before[t->n_before - 1] : end >= 0 ? end : t->byte_id[10];
}

// ==== Encoding ===================================================================================

/* Encodes a normalized text without added tokens. */
static inline void tok_encode_plain(tok *t, const unsigned char *s, size_t n) {
    if (t->prefix_space && !t->continues && s[0] != ' ') {
        unsigned char *copy = (unsigned char *)tok_reserve(t->ctx, &t->prefixed, n + 1, 0);
        if (!copy) return;
        copy[0] = ' ';
        memcpy(copy + 1, s, n++);
        s = copy;
    }
    t->continues = 0;
    for (size_t at = 0, end; at < n && dt_error(t->ctx) == DT_OK; at = end) {
        end = tok_word(t, s, n, at);
        tok_encode_word(t, s + at, end - at);
    }
}

/* Returns the longest added token of a set at s, or NULL. */
static inline const tok_added *tok_added_at(
    const tok *t, int set, const unsigned char *s, size_t n) {
    for (int i = t->added_from[set][s[0]]; i < t->added_from[set][s[0] + 1]; i++)
        if (t->added[i].bytes <= n && memcmp(t->added[i].find, s, t->added[i].bytes) == 0)
            return &t->added[i];
    return NULL;
}

/* Returns the start of the white space that ends at `at`. */
static inline size_t tok_space_before(const tok *t, const unsigned char *s, size_t at) {
    for (;;) {
        size_t from = at, bytes;
        while (from > 0 && at - from < 4 && (from == at || (s[from] & 0xC0) == 0x80)) from--;
        if (from == at || tok_kind(t, s, at, from, &bytes) != TOK_SPACE || from + bytes != at)
            return at;
        at = from;
    }
}

/* Encodes a text, in which set 0 of added tokens is found before it is normalized, and set 1
   afterwards. */
static inline void tok_encode_set(tok *t, int set, const unsigned char *s, size_t n) {
    size_t begin = 0, stop = 0, start = 0;
    const tok_added *a = NULL;
    for (size_t at = 0; begin < n && dt_error(t->ctx) == DT_OK; begin = stop) {
        for (a = NULL; at < n && !a; at += a ? a->bytes : 1) {
            if (t->added_from[set][s[at]] == t->added_from[set][s[at] + 1]) continue;
            a = tok_added_at(t, set, s + at, n - at);
        }
        start = a ? at - a->bytes : n;
        stop = at;
        if (a && a->lstrip) start = tok_space_before(t, s, start);
        if (a && a->rstrip) stop = tok_run(t, s, n, stop, TOK_SPACE);
        if (start > begin) {
            const unsigned char *piece = s + begin;
            size_t bytes = start - begin;
            if (set == 1)
                tok_encode_plain(t, piece, bytes);
            else if (!t->nfc || tok_nfc(t, &piece, &bytes))
                tok_encode_set(t, 1, piece, bytes);
        }
        if (a) tok_push_id(t, a->id), t->continues = 0;
    }
}

/* Encodes `bytes` bytes of text, at most 2^31 - 2. Returns the ids and sets *count to their number;
   they are valid until the next call. Returns NULL after a failure. */
static inline const int32_t *tok_encode(
    tok *t, const char *text, size_t bytes, tok_encode_desc desc, int64_t *count) {
    *count = 0;
    if (dt_error(t->ctx) != DT_OK) return NULL;
    if (bytes > INT32_MAX - 1) {
        dt_fail(t->ctx, DT_ERR_ARG, "tok_encode: %zu bytes; at most 2^31 - 2", bytes);
        return NULL;
    }
    t->n_ids = 0;
    t->continues = desc.continues;
    tok_reserve(t->ctx, &t->ids, sizeof(int32_t), 0);
    for (int i = 0; desc.add_special && !desc.continues && i < t->n_before; i++)
        tok_push_id(t, t->before[i]);
    tok_encode_set(t, 0, (const unsigned char *)text, bytes);
    for (int i = 0; desc.add_special && !desc.has_more && i < t->n_after; i++)
        tok_push_id(t, t->after[i]);
    if (dt_error(t->ctx) != DT_OK) return NULL;
    *count = t->n_ids;
    return (const int32_t *)t->ids.data;
}

/* Returns the largest length below `bytes` at which the text can be cut into two parts without
   changing its ids (encode the second part with tok_encode_desc.continues). Returns 0 if the text
   has no such place. The cut is after a newline that stands between a printable ASCII character and
   a letter or digit: a word ends there whatever follows. */
static inline size_t tok_safe_end(const tok *t, const char *text, size_t bytes) {
    const unsigned char *s = (const unsigned char *)text;
    for (size_t i = bytes; i >= 3 && t->can_cut; i--) {
        unsigned c = s[i - 1], before = s[i - 3], kind = t->kind[c & 0x7F] & TOK_KIND;
        if (s[i - 2] == '\n' && before > ' ' && before < 0x7F && c < 0x80 &&
            (kind == TOK_LETTER || kind == TOK_NUMBER))
            return i - 1;
    }
    return 0;
}

/* Reads up to `bytes` bytes of an open file, fewer only at its end. Returns their number, or -1
   after a failure. */
static inline int64_t tok_read_file(
    tok *t, const char *path, int fd, void *data, size_t bytes, int64_t at) {
    const dt_io *io = dt_ctx_io(t->ctx);
    size_t done = 0;
    while (done < bytes) {
        errno = 0;
        int64_t got =
            io->pread(io->user, fd, (char *)data + done, bytes - done, at + (int64_t)done);
        if (got == 0) break;
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            dt_fail(t->ctx, DT_ERR_IO, "%s: %s", path, strerror(errno));
            return -1;
        }
        done += (size_t)got;
    }
    return (int64_t)done;
}

/* Encodes a file in pieces of about 1 MB, which end at tok_safe_end, and calls `put` with the ids
   of each piece in turn. The ids are those of tok_encode with the whole file. */
static inline dt_status tok_encode_file(
    tok *t, const char *path, int add_special, tok_put_fn put, void *user) {
    const dt_io *io = dt_ctx_io(t->ctx);
    if (dt_error(t->ctx) != DT_OK) return dt_error(t->ctx);
    errno = 0;
    int fd = io->open(io->user, path, DT_IO_READ);
    if (fd < 0) return dt_fail(t->ctx, DT_ERR_IO, "%s: %s", path, strerror(errno));
    size_t used = 0;
    int64_t at = 0, count = 0;
    for (int is_end = 0, continues = 0; !is_end && dt_error(t->ctx) == DT_OK;) {
        /* a piece without a safe end doubles, so that it is not searched too often */
        size_t more = used > t->piece_bytes ? used : t->piece_bytes;
        char *text = (char *)tok_reserve(t->ctx, &t->piece, used + more, used);
        int64_t got = text ? tok_read_file(t, path, fd, text + used, more, at) : -1;
        if (got < 0) break;
        at += got;
        used += (size_t)got;
        is_end = (size_t)got < more;
        size_t n = is_end ? used : tok_safe_end(t, text, used);
        if (n == 0 && !is_end) continue;
        tok_encode_desc desc = { add_special, continues, !is_end };
        const int32_t *ids = tok_encode(t, text, n, desc, &count);
        if (ids) put(user, ids, count);
        used -= n;
        memmove(text, text + n, used);
        continues = 1;
    }
    io->close(io->user, fd);
    return dt_error(t->ctx);
}

// ==== Decoding ===================================================================================

/* Returns the number of bytes at the end of a text that begin a UTF-8 sequence and can become
   complete: 0 to 3. */
static inline size_t tok_incomplete(const unsigned char *s, size_t n) {
    for (size_t k = 1; k <= 3 && k <= n; k++) {
        unsigned char first = s[n - k], fill[2][4];
        if ((first & 0xC0) == 0x80) continue;
        size_t length = first < 0xC2 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4, bytes;
        if (length <= k) return 0;
        memset(fill[0], 0x80, 4); /* if any bytes complete it, the smallest or the largest do */
        memset(fill[1], 0xBF, 4);
        for (int i = 0; i < 2; i++) {
            memcpy(fill[i], s + n - k, k);
            if (tok_utf8(fill[i], length, &bytes) >= 0) return k;
        }
        return 0;
    }
    return 0;
}

/* Decodes n ids. Returns the text with an appended NUL, which *bytes does not count; it is valid
   until the next call. Returns NULL after a failure: DT_ERR_ARG for an id that is no token. */
static inline const char *tok_decode(
    tok *t, const int32_t *ids, int64_t n, tok_decode_desc desc, size_t *bytes) {
    size_t used = desc.held ? (size_t)desc.held->bytes : 0;
    *bytes = 0;
    if (dt_error(t->ctx) != DT_OK) return NULL;
    unsigned char *out = (unsigned char *)tok_reserve(t->ctx, &t->decoded, used + 1, 0);
    if (out && used) memcpy(out, desc.held->byte, used);
    for (int64_t i = 0; i < n && out; i++) {
        const tok_token *k = tok_is_token(t, ids[i]) ? &t->token[ids[i]] : NULL;
        if (!k) {
            dt_fail(t->ctx, DT_ERR_ARG, "tok_decode: id %d is no token; the vocabulary has %d ids",
                ids[i], t->vocab);
            return NULL;
        }
        if (desc.skip_special && k->special) continue;
        out = (unsigned char *)tok_reserve(t->ctx, &t->decoded, used + k->bytes + 1, used);
        if (out) memcpy(out + used, t->text + k->offset, k->bytes);
        used += k->bytes;
    }
    if (!out) return NULL;
    size_t held = desc.held ? tok_incomplete(out, used) : 0;
    used -= held;
    if (desc.held) {
        desc.held->bytes = (int)held;
        memcpy(desc.held->byte, out + used, held);
    }
    out[used] = 0;
    *bytes = used;
    return (const char *)out;
}

// ==== Training ===================================================================================

/* Trains byte-level BPE with GPT-2's regex as the package's BpeTrainer does: the pair of tokens
   that occurs most often in the words becomes a token, until the vocabulary is full. Of pairs with
   the same count the one with the smallest ids is first. Texts are those of the byte-level
   alphabet.

   A heap has the pairs with their counts and with the words that they occur in. The counts fall
   while merges change the words, so the pair at the top may have to go back with its new count. */

typedef struct tok_train_word {
    size_t text;   /* offset in the text that is trained on */
    size_t first;  /* index of its first symbol */
    int64_t count; /* how often it occurs */
    int32_t bytes, symbols;
} tok_train_word;

/* A pair in the heap, with `n` words from `words` on in tok_trainer.places. */
typedef struct tok_train_pair {
    int64_t count;
    uint64_t pair;
    size_t words, n;
} tok_train_pair;

/* A pair that has occurred in a word. */
typedef struct tok_train_place {
    uint64_t pair;
    uint32_t word;
} tok_train_place;

typedef struct tok_train_count {
    uint64_t pair;
    int64_t count;
    int used;
} tok_train_count;

typedef struct tok_trainer {
    tok *t; /* for its context and its kinds of code points */
    const unsigned char *text;
    tok_block words, word_table, symbols, counts, heap, found, places, texts, tokens, token_table,
        merges;
    size_t n_words, word_slots, n_symbols, n_counts, count_slots, n_heap, n_found, n_places,
        text_bytes, n_tokens, token_slots, n_merges;
} tok_trainer;

/* Returns element `count` of an array, which grows by it, or NULL after a failure. */
static inline void *tok_train_append(tok_trainer *r, tok_block *b, size_t *count, size_t size) {
    char *data = (char *)tok_reserve(r->t->ctx, b, (*count + 1) * size, *count * size);
    return data ? data + (*count)++ * size : NULL;
}

/* Makes a table of indices, -1 where it is empty. Returns 0 after a failure. */
static inline int tok_train_table(tok_trainer *r, tok_block *b, size_t slots) {
    int32_t *table = (int32_t *)tok_reserve(r->t->ctx, b, slots * sizeof *table, 0);
    if (table) memset(table, 0xFF, slots * sizeof *table);
    return table != NULL;
}

/* Counts a word of the text. The table of words doubles before it is half full. */
static inline void tok_train_count_word(tok_trainer *r, size_t at, size_t bytes) {
    tok_train_word *word = (tok_train_word *)r->words.data;
    if (2 * r->n_words >= r->word_slots) {
        size_t slots = r->word_slots ? 2 * r->word_slots : 1024;
        if (!tok_train_table(r, &r->word_table, slots)) return;
        r->word_slots = slots;
        int32_t *table = (int32_t *)r->word_table.data;
        for (size_t w = 0; w < r->n_words; w++) {
            size_t i = tok_hash(r->text + word[w].text, (size_t)word[w].bytes) & (slots - 1);
            while (table[i] >= 0) i = (i + 1) & (slots - 1);
            table[i] = (int32_t)w;
        }
    }
    int32_t *table = (int32_t *)r->word_table.data;
    size_t i = tok_hash(r->text + at, bytes) & (r->word_slots - 1);
    for (; table[i] >= 0; i = (i + 1) & (r->word_slots - 1)) {
        tok_train_word *w = &word[table[i]];
        if ((size_t)w->bytes != bytes || memcmp(r->text + w->text, r->text + at, bytes) != 0)
            continue;
        w->count++;
        return;
    }
    table[i] = (int32_t)r->n_words;
    tok_train_word *w = (tok_train_word *)tok_train_append(r, &r->words, &r->n_words, sizeof *word);
    if (w) *w = (tok_train_word){ at, r->n_symbols, 1, (int32_t)bytes, (int32_t)bytes };
    r->n_symbols += bytes;
}

static inline const char *tok_train_text(const tok_trainer *r, int64_t id) {
    return (const char *)r->texts.data + ((const size_t *)r->tokens.data)[id];
}

/* Returns the id of the token whose text is `a` followed by `b`. Adds the token if it does not
   exist. Returns -1 after a failure. The table has room for all tokens. */
static inline int32_t tok_train_token(tok_trainer *r, const char *a, const char *b) {
    size_t n[2] = { strlen(a), strlen(b) }, bytes = n[0] + n[1];
    char *text =
        (char *)tok_reserve(r->t->ctx, &r->texts, r->text_bytes + bytes + 1, r->text_bytes);
    if (!text) return -1;
    text += r->text_bytes;
    memcpy(text, a, n[0]);
    memcpy(text + n[0], b, n[1] + 1);
    int32_t *table = (int32_t *)r->token_table.data;
    size_t i = tok_hash((unsigned char *)text, bytes) & (r->token_slots - 1);
    for (; table[i] >= 0; i = (i + 1) & (r->token_slots - 1))
        if (strcmp(tok_train_text(r, table[i]), text) == 0) return table[i];
    table[i] = (int32_t)r->n_tokens;
    size_t *offset = (size_t *)tok_train_append(r, &r->tokens, &r->n_tokens, sizeof *offset);
    if (!offset) return -1;
    *offset = r->text_bytes;
    r->text_bytes += bytes + 1;
    return table[i];
}

/* Returns the count of a pair, which is 0 at first, or NULL after a failure. */
static inline int64_t *tok_train_pair_count(tok_trainer *r, uint64_t pair) {
    tok_train_count *old = (tok_train_count *)r->counts.data;
    if (2 * r->n_counts >= r->count_slots) {
        size_t slots = r->count_slots ? 2 * r->count_slots : 4096;
        tok_block grown = { NULL, 0 };
        tok_train_count *more =
            (tok_train_count *)tok_reserve(r->t->ctx, &grown, slots * sizeof *more, 0);
        if (!more) return NULL;
        memset(more, 0, slots * sizeof *more);
        for (size_t k = 0; k < r->count_slots; k++) {
            size_t i = tok_mix(old[k].pair) & (slots - 1);
            while (more[i].used) i = (i + 1) & (slots - 1);
            if (old[k].used) more[i] = old[k];
        }
        tok_release(r->t->ctx, &r->counts);
        r->counts = grown;
        r->count_slots = slots;
        old = more;
    }
    size_t i = tok_mix(pair) & (r->count_slots - 1);
    while (old[i].used && old[i].pair != pair) i = (i + 1) & (r->count_slots - 1);
    if (!old[i].used) {
        old[i] = (tok_train_count){ pair, 0, 1 };
        r->n_counts++;
    }
    return &old[i].count;
}

/* Changes the count of a pair in a word, and notes the word if the pair is new there. */
static inline void tok_train_change(tok_trainer *r, int32_t a, int32_t b, int64_t by, size_t word) {
    int64_t *count = tok_train_pair_count(r, tok_pair(a, b));
    if (count) *count += by;
    if (by < 0) return;
    tok_train_place *p = (tok_train_place *)tok_train_append(r, &r->found, &r->n_found, sizeof *p);
    if (p) *p = (tok_train_place){ tok_pair(a, b), (uint32_t)word };
}

static inline int tok_by_place(const void *a, const void *b) {
    const tok_train_place *x = (const tok_train_place *)a, *y = (const tok_train_place *)b;
    if (x->pair != y->pair) return x->pair < y->pair ? -1 : 1;
    return x->word < y->word ? -1 : x->word > y->word;
}

static inline int tok_train_before(const tok_train_pair *a, const tok_train_pair *b) {
    return a->count != b->count ? a->count > b->count : a->pair < b->pair;
}

static inline void tok_train_push(tok_trainer *r, tok_train_pair p) {
    if (!tok_train_append(r, &r->heap, &r->n_heap, sizeof p)) return;
    tok_train_pair *heap = (tok_train_pair *)r->heap.data;
    size_t i = r->n_heap - 1;
    for (; i > 0 && tok_train_before(&p, &heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = p;
}

static inline tok_train_pair tok_train_pop(tok_trainer *r) {
    tok_train_pair *heap = (tok_train_pair *)r->heap.data, top = heap[0], p = heap[--r->n_heap];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < r->n_heap) {
        child += child + 1 < r->n_heap && tok_train_before(&heap[child + 1], &heap[child]);
        if (!tok_train_before(&heap[child], &p)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = p;
    return top;
}

/* Puts the pairs that tok_train_change has noted into the heap, each once with its words. */
static inline void tok_train_push_found(tok_trainer *r) {
    tok_train_place *found = (tok_train_place *)r->found.data;
    if (r->n_found) qsort(found, r->n_found, sizeof *found, tok_by_place);
    for (size_t i = 0, end; i < r->n_found && dt_error(r->t->ctx) == DT_OK; i = end) {
        const int64_t *count = tok_train_pair_count(r, found[i].pair);
        tok_train_pair p = { count ? *count : 0, found[i].pair, r->n_places, 0 };
        for (end = i; end < r->n_found && found[end].pair == p.pair; end++) {
            if (end > i && found[end].word == found[end - 1].word) continue;
            uint32_t *word =
                (uint32_t *)tok_train_append(r, &r->places, &r->n_places, sizeof *word);
            if (word) *word = found[end].word;
        }
        p.n = r->n_places - p.words;
        if (p.count > 0) tok_train_push(r, p);
    }
    r->n_found = 0;
}

/* Replaces a pair by its token in one word. */
static inline void tok_train_merge(tok_trainer *r, size_t word, uint64_t pair, int32_t id) {
    tok_train_word *w = (tok_train_word *)r->words.data + word;
    int32_t *y = (int32_t *)r->symbols.data + w->first, n = w->symbols, out = 0;
    for (int32_t i = 0; i < n; i++) {
        if (i + 1 == n || tok_pair(y[i], y[i + 1]) != pair) {
            y[out++] = y[i];
            continue;
        }
        int32_t a = y[i], b = y[i + 1];
        if (out > 0) {
            tok_train_change(r, y[out - 1], a, -w->count, word);
            tok_train_change(r, y[out - 1], id, w->count, word);
        }
        if (i + 2 < n) {
            tok_train_change(r, b, y[i + 2], -w->count, word);
            tok_train_change(r, id, y[i + 2], w->count, word);
        }
        y[out++] = id;
        i++;
    }
    w->symbols = out;
}

/* Counts the words of the text and makes the tokens of the special tokens and of the bytes, whose
   ids are in the order of their code points. */
static inline void tok_train_begin(tok_trainer *r, size_t bytes, tok_train_desc d) {
    uint32_t code[256];
    int32_t id_of[256];
    char text[8];
    for (size_t at = 0, end; at < bytes && dt_error(r->t->ctx) == DT_OK; at = end) {
        end = tok_word(r->t, r->text, bytes, at);
        tok_train_count_word(r, at, end - at);
    }
    for (r->token_slots = 1024; r->token_slots < 2 * (size_t)d.vocab; r->token_slots *= 2) continue;
    int32_t *y = (int32_t *)tok_reserve(r->t->ctx, &r->symbols, (r->n_symbols + 1) * sizeof *y, 0);
    if (!y || !tok_train_table(r, &r->token_table, r->token_slots)) return;
    for (int i = 0; i < d.n_special; i++) tok_train_token(r, d.special[i], "");
    tok_alphabet(code);
    for (int other = 0; other < 2; other++)
        for (int b = 0; b < 256; b++) {
            if (tok_is_printable(b) == other) continue;
            text[tok_utf8_put((unsigned char *)text, code[b])] = 0;
            id_of[b] = tok_train_token(r, text, "");
        }
    for (size_t w = 0; w < r->n_words && dt_error(r->t->ctx) == DT_OK; w++) {
        const tok_train_word *word = (const tok_train_word *)r->words.data + w;
        for (int32_t i = 0; i < word->bytes; i++) {
            y[word->first + (size_t)i] = id_of[r->text[word->text + (size_t)i]];
            if (i > 0)
                tok_train_change(
                    r, y[word->first + (size_t)i - 1], y[word->first + (size_t)i], word->count, w);
        }
    }
    tok_train_push_found(r);
}

static inline void tok_train_merges(tok_trainer *r, tok_train_desc d) {
    while (r->n_tokens < (size_t)d.vocab && r->n_heap > 0 && dt_error(r->t->ctx) == DT_OK) {
        tok_train_pair top = tok_train_pop(r);
        const int64_t *count = tok_train_pair_count(r, top.pair);
        if (!count) return;
        if (top.count != *count) {
            top.count = *count;
            tok_train_push(r, top);
            continue;
        }
        if (top.count < 1 || top.count < d.min_frequency) return;
        int32_t a = (int32_t)(top.pair >> 32), b = (int32_t)(top.pair & 0xFFFFFFFF);
        /* the text of a token moves when the texts grow */
        if (!tok_reserve(r->t->ctx, &r->texts,
                r->text_bytes + strlen(tok_train_text(r, a)) + strlen(tok_train_text(r, b)) + 1,
                r->text_bytes))
            return;
        int32_t id = tok_train_token(r, tok_train_text(r, a), tok_train_text(r, b));
        uint64_t *merge = (uint64_t *)tok_train_append(r, &r->merges, &r->n_merges, sizeof *merge);
        if (id < 0 || !merge) return;
        *merge = top.pair;
        for (size_t i = 0; i < top.n; i++)
            tok_train_merge(r, ((const uint32_t *)r->places.data)[top.words + i], top.pair, id);
        tok_train_push_found(r);
    }
}

static inline void tok_train_put_level(dt_json_out *o, const char *key) {
    dt_json_open(o, key, '{');
    dt_json_put_string(o, "type", "ByteLevel");
    dt_json_put_bool(o, "add_prefix_space", 0);
    dt_json_put_bool(o, "trim_offsets", 1);
    dt_json_put_bool(o, "use_regex", 1);
    dt_json_close(o, '}');
}

/* Writes model.merges: a merge that was made twice counts at its last place. */
static inline void tok_train_put_merges(tok_trainer *r, dt_json_out *o) {
    const uint64_t *merge = (const uint64_t *)r->merges.data;
    tok_map_make(r->t, &r->t->merge, r->n_merges, "merges");
    if (dt_error(r->t->ctx) != DT_OK) return;
    for (size_t i = 0; i < r->n_merges; i++)
        *tok_map_at(&r->t->merge, merge[i]) = (tok_slot){ merge[i], (int32_t)i, 0 };
    dt_json_open(o, "merges", '[');
    for (size_t i = 0; i < r->n_merges; i++) {
        if ((size_t)tok_map_at(&r->t->merge, merge[i])->rank != i) continue;
        dt_json_open(o, NULL, '[');
        dt_json_put_string(o, NULL, tok_train_text(r, (int64_t)(merge[i] >> 32)));
        dt_json_put_string(o, NULL, tok_train_text(r, (int64_t)(merge[i] & 0xFFFFFFFF)));
        dt_json_close(o, ']');
    }
    dt_json_close(o, ']');
}

static inline void tok_train_write(tok_trainer *r, tok_train_desc d, const char *path) {
    static const char *const flags[] = { "single_word", "lstrip", "rstrip", "normalized" };
    dt_json_out o = { r->t->ctx, NULL, 0, 0 };
    dt_json_open(&o, NULL, '{');
    dt_json_put_string(&o, "version", "1.0");
    dt_json_put_string(&o, "truncation", NULL);
    dt_json_put_string(&o, "padding", NULL);
    dt_json_open(&o, "added_tokens", '[');
    for (int i = 0; i < d.n_special; i++) {
        dt_json_open(&o, NULL, '{');
        dt_json_put_int(&o, "id", i);
        dt_json_put_string(&o, "content", d.special[i]);
        for (int k = 0; k < 4; k++) dt_json_put_bool(&o, flags[k], 0);
        dt_json_put_bool(&o, "special", 1);
        dt_json_close(&o, '}');
    }
    dt_json_close(&o, ']');
    dt_json_put_string(&o, "normalizer", NULL);
    tok_train_put_level(&o, "pre_tokenizer");
    tok_train_put_level(&o, "post_processor");
    tok_train_put_level(&o, "decoder");
    dt_json_open(&o, "model", '{');
    dt_json_put_string(&o, "type", "BPE");
    dt_json_open(&o, "vocab", '{');
    for (size_t i = 0; i < r->n_tokens; i++)
        dt_json_put_int(&o, tok_train_text(r, (int64_t)i), (int64_t)i);
    dt_json_close(&o, '}');
    tok_train_put_merges(r, &o);
    dt_json_close(&o, '}');
    dt_json_close(&o, '}');
    if (dt_error(r->t->ctx) == DT_OK) dt_file_write(r->t->ctx, path, o.text, o.used);
    dt_json_out_free(&o);
}

/* Trains a tokenizer on a text of at most 2^31 - 2 bytes and writes its tokenizer.json. The
   vocabulary has desc.vocab tokens, or fewer if the text has no more pairs. */
static inline dt_status tok_train(
    dt_ctx *ctx, const char *text, size_t bytes, tok_train_desc desc, const char *path) {
    tok_trainer r;
    memset(&r, 0, sizeof r);
    for (int i = 0; i < desc.n_special; i++) {
        for (int k = 0; k < i; k++)
            if (strcmp(desc.special[i], desc.special[k]) == 0)
                return dt_fail(
                    ctx, DT_ERR_ARG, "tok_train: '%s' is special twice", desc.special[i]);
        if (strlen(desc.special[i]) < 2)
            return dt_fail(
                ctx, DT_ERR_ARG, "tok_train: special token '%s' has no two bytes", desc.special[i]);
    }
    if (bytes > INT32_MAX - 1 || desc.vocab < 256 + desc.n_special || desc.vocab > TOK_MAX_IDS)
        return dt_fail(ctx, DT_ERR_ARG,
            "tok_train: %zu bytes, at most 2^31 - 2; a vocabulary of %d, from 256 + %d special "
            "tokens to %d",
            bytes, desc.vocab, desc.n_special, TOK_MAX_IDS);
    r.t = tok_new(ctx);
    if (!r.t) return dt_error(ctx);
    r.text = (const unsigned char *)text;
    tok_unicode_make(r.t);
    if (dt_error(ctx) == DT_OK) tok_train_begin(&r, bytes, desc);
    if (dt_error(ctx) == DT_OK) tok_train_merges(&r, desc);
    if (dt_error(ctx) == DT_OK) tok_train_write(&r, desc, path);
    tok_block *all[] = { &r.words, &r.word_table, &r.symbols, &r.counts, &r.heap, &r.found,
        &r.places, &r.texts, &r.tokens, &r.token_table, &r.merges };
    for (size_t i = 0; i < TOK_COUNT(all); i++) tok_release(ctx, all[i]);
    tok_close(r.t);
    return dt_error(ctx);
}

#endif /* TOKENIZER_H */
