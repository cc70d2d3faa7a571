/* encode.h - turns text files and instruction data into token shards - public domain or MIT, at
   your choice

   Include encode.h after data.h and tokenizer.h. All functions are static.

       encoding e = { .ctx = ctx, .tok = tok, .tokenizer = "tokenizer.json", .seq = 128 };
       encode_files(&e, &files);       // files.encoded is the path of a shard with all tokens

   Text: each file is a document, which begins with the special tokens that the tokenizer puts
   before a text (bos). The tokens of all files are one text.

   Instruction data: a file x.jsonl has one example per line, in one of two forms. Other fields are
   ignored, and so are blank lines.

       {"prompt": "2 + 2 = ", "answer": "4"}
       {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

   The tokens of the first form are those of the prompt, of the answer, and the end token (see
   encode_end_id). Those of the second form are ChatML, "<|im_start|>user\n2 + 2?<|im_end|>\n" for
   each message. An example is one sequence of T tokens. Only tokens of the answer with the end
   token, or of the assistant's contents with "<|im_end|>", have labels; the others have label -1.
   A longer example is cut off after T tokens, and left out if no token with a label is left. A
   shorter one is padded with the end token. */
#ifndef ENCODE_H
#define ENCODE_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct encoding {
    dt_ctx *ctx;           /* the tokenizer's, if there is one */
    tok *tok;              /* NULL: each byte is a token */
    const char *tokenizer; /* path of tok's file */
    const char *cache;     /* folder that keeps the shards; NULL: a temporary file */
    int seq;               /* T: tokens per sequence */
    double timeout_s;      /* how long to wait for another process that writes to the cache */
    /* the shard that is written, and what its header has */
    int fd;
    char path[4352];
    int64_t tokens, truncated;
    int32_t skipped, skipped_file, skipped_line; /* as in train_files */
    uint64_t key, digest;
    /* the example that is encoded: its file and line, the first T + 1 of its n tokens and whether
       each has a label, and the number of all its labels */
    int32_t file, line;
    int64_t n, labels;
    int32_t *token, *has_label;
} encoding;

/* Words of a shard's header, which has 256. llm.c defines the first three. A cached shard also has
   the number of examples that were cut off, the key of what was encoded, a digest of the tokens, so
   that a damaged shard is found, and three words of the examples that were left out. */
enum {
    ENCODE_TOKENS = 2,
    ENCODE_TRUNCATED,
    ENCODE_KEY,
    ENCODE_DIGEST = 6,
    ENCODE_SKIPPED = 8,
    ENCODE_HEADER = 256
};
enum { ENCODE_BUFFER = 1 << 16 };

/* Returns the token that ends a document and an example: <|endoftext|> or <|end_of_text|> if the
   tokenizer has it, else a newline. */
static inline int32_t encode_end_id(const tok *t) {
    if (!t) return '\n';
    int32_t id = tok_id(t, "<|endoftext|>");
    if (id < 0) id = tok_id(t, "<|end_of_text|>");
    return id >= 0 ? id : tok_id(t, "\n");
}

/* Returns the bytes of text that a token stands for: 0 if it is special or no token. */
static inline int32_t encode_token_bytes(const tok *t, int32_t id) {
    return tok_is_token(t, id) && !t->token[id].special ? (int32_t)t->token[id].bytes : 0;
}

static inline uint64_t encode_hash(uint64_t h, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) h = (h ^ p[i]) * 1099511628211u;
    return h;
}

/* Continues a digest with n tokens, as FNV-1a does with bytes. */
static inline uint64_t encode_digest(uint64_t h, const int32_t *ids, int64_t n) {
    for (int64_t i = 0; i < n; i++) h = (h ^ (uint32_t)ids[i]) * 1099511628211u;
    return h;
}

// ==== Digests for a resumed run ==================================================================

/* A checkpoint has a digest of the beginning of each source and one of the tokenizer, so that a
   resumed run does not continue in other data without a word. */
enum { ENCODE_DIGEST_BYTES = 1 << 16 };

/* Returns a digest of a tokenizer: of its tokens, its merges and how it splits a text. */
static inline uint64_t encode_tokenizer_digest(const tok *t) {
    const int32_t about[4] = { t->vocab, t->regex, t->nfc, t->prefix_space };
    uint64_t h = encode_hash(14695981039346656037u, about, sizeof about), merges = 0;
    for (int32_t i = 0; i < t->vocab; i++) {
        const tok_token *k = &t->token[i];
        const int32_t token[3] = { i, k->special, tok_is_token(t, i) ? (int32_t)k->bytes : -1 };
        h = encode_hash(h, token, sizeof token);
        if (token[2] > 0) h = encode_hash(h, t->text + k->offset, k->bytes);
    }
    /* a sum, because the order in the table says nothing */
    for (uint64_t i = 0; t->merge.slot && i <= t->merge.mask; i++) {
        const tok_slot *m = &t->merge.slot[i];
        const uint64_t pair[3] = { m->key, (uint64_t)m->rank, (uint64_t)m->value };
        if (m->value >= 0) merges += encode_hash(h, pair, sizeof pair);
    }
    return encode_hash(h, &merges, sizeof merges);
}

/* Returns a digest of the first *bytes bytes of a source's files, in their order and without the
   headers of token shards. Sets *bytes to the number of bytes if there are fewer. */
static inline uint64_t encode_source_digest(const train_files *files, int64_t *bytes) {
    int64_t left = *bytes;
    int is_shards = files->shards && !*files->encoded;
    uint64_t h = 14695981039346656037u;
    char buffer[4096];
    for (int i = 0; i < files->count && left > 0; i++) {
        int fd = open(files->path[i], O_RDONLY | O_CLOEXEC);
        off_t at = is_shards ? ENCODE_HEADER * (off_t)sizeof(int32_t) : 0;
        ssize_t got = 0;
        while (fd >= 0 && left > 0) {
            size_t most = left < (int64_t)sizeof buffer ? (size_t)left : sizeof buffer;
            if ((got = pread(fd, buffer, most, at)) <= 0) break;
            h = encode_hash(h, buffer, (size_t)got);
            at += got;
            left -= got;
        }
        if (fd >= 0) close(fd);
    }
    *bytes -= left;
    return h;
}

// ==== Writing a shard ============================================================================

static inline dt_status encode_write(encoding *e, const void *data, size_t bytes) {
    const char *at = (const char *)data;
    while (bytes > 0) {
        ssize_t done = write(e->fd, at, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0)
            return dt_fail(e->ctx, DT_ERR_IO, "writing tokens to %s: %s", e->path, strerror(errno));
        at += done;
        bytes -= (size_t)done;
    }
    return DT_OK;
}

/* A tok_put_fn: appends tokens to the shard. */
static inline void encode_put(void *user, const int32_t *ids, int64_t n) {
    encoding *e = (encoding *)user;
    if (dt_error(e->ctx) != DT_OK) return;
    e->tokens += n;
    if (e->tokens > INT32_MAX)
        dt_fail(e->ctx, DT_ERR_ARG, "more than %d tokens; use llm.c shards", INT32_MAX);
    e->digest = encode_digest(e->digest, ids, n);
    encode_write(e, ids, (size_t)n * sizeof *ids);
}

// ==== Instruction data ===========================================================================

static inline int encode_is_jsonl(const char *path) {
    size_t n = strlen(path);
    return n > 6 && strcmp(path + n - 6, ".jsonl") == 0;
}

static inline void encode_add(encoding *e, int32_t id, int has_label) {
    if (e->n <= e->seq) {
        e->token[e->n] = id;
        e->has_label[e->n] = has_label;
    }
    e->n++;
    e->labels += has_label;
}

/* Appends the tokens of a part of the example; before the first part also the special tokens that
   the tokenizer puts before a text, such as <|begin_of_text|>. */
static inline void encode_part(encoding *e, const char *text, size_t bytes, int has_label) {
    int64_t n = (int64_t)bytes;
    int first = e->n == 0;
    const int32_t *ids = NULL;
    if (e->tok)
        ids = tok_encode(e->tok, text, bytes,
            (tok_encode_desc){ .add_special = first, .continues = !first, .has_more = 1 }, &n);
    if (e->tok && !ids) return;
    for (int64_t i = 0; i < n; i++) encode_add(e, ids ? ids[i] : (unsigned char)text[i], has_label);
}

/* Appends the messages of an example. Returns 0 if they do not have the form of messages. */
static inline int encode_messages(encoding *e, const dt_json *j, int list) {
    if (dt_json_kind_of(j, list) != DT_JSON_ARRAY) return 0;
    for (int i = 0; i < dt_json_count(j, list); i++) {
        int node = dt_json_at(j, list, i);
        size_t role_bytes = 0, bytes = 0;
        const char *role = dt_json_string(j, dt_json_find(j, node, "role"), &role_bytes);
        const char *content = dt_json_string(j, dt_json_find(j, node, "content"), &bytes);
        if (!role || !content) return 0;
        int answers = strcmp(role, "assistant") == 0;
        encode_part(e, "<|im_start|>", 12, 0);
        encode_part(e, role, role_bytes, 0);
        encode_part(e, "\n", 1, 0);
        encode_part(e, content, bytes, answers);
        encode_part(e, "<|im_end|>", 10, answers);
        encode_part(e, "\n", 1, 0);
    }
    return 1;
}

/* Appends an example as T ids and T labels + 1 to the shard. */
static inline dt_status encode_put_example(encoding *e, const char *place) {
    int32_t end = encode_end_id(e->tok), labels = 0;
    int64_t T = e->seq, n = e->n < T + 1 ? e->n : T + 1;
    int32_t *row =
        (int32_t *)dt_alloc(e->ctx, DT_MEM_HOST, 2 * (size_t)T * sizeof *row, "an example");
    if (!row) return dt_error(e->ctx);
    for (int64_t t = 0; t < T; t++) {
        int counts = t + 1 < n && e->has_label[t + 1];
        row[t] = t < n ? e->token[t] : end;
        row[T + t] = counts ? e->token[t + 1] + 1 : 0;
        labels += counts;
    }
    if (labels) {
        e->truncated += e->n > T + 1;
        encode_put(e, row, 2 * T);
    } else if (e->labels > 0) {
        if (e->skipped++ == 0) e->skipped_file = e->file, e->skipped_line = e->line;
    } else
        dt_fail(e->ctx, DT_ERR_ARG, "%s: %s", place,
            e->n == 0 ? "\"messages\" is empty"
                      : "no message has the role \"assistant\", so that nothing has a label");
    dt_free(e->ctx, DT_MEM_HOST, row, 2 * (size_t)T * sizeof *row);
    return dt_error(e->ctx);
}

/* Encodes the example in a line of a file. `place` is the file and the line, for errors. */
static inline dt_status encode_example(
    encoding *e, const char *place, const char *line, size_t bytes) {
    dt_json *j = dt_json_parse(e->ctx, place, line, bytes);
    if (!j) return dt_error(e->ctx);
    size_t prompt_bytes = 0, answer_bytes = 0;
    const char *prompt = dt_json_string(j, dt_json_find(j, 0, "prompt"), &prompt_bytes);
    const char *answer = dt_json_string(j, dt_json_find(j, 0, "answer"), &answer_bytes);
    int messages = dt_json_find(j, 0, "messages"), good = prompt && answer;
    e->n = e->labels = 0;
    if (good) {
        encode_part(e, prompt, prompt_bytes, 0);
        encode_part(e, answer, answer_bytes, 1);
        encode_add(e, encode_end_id(e->tok), 1);
    } else
        good = messages >= 0 && encode_messages(e, j, messages);
    if (!good)
        dt_json_fail(j, 0,
            "an example is {\"prompt\": text, \"answer\": text} or {\"messages\": "
            "[{\"role\": text, \"content\": text}, ..]}");
    dt_json_free(j);
    return dt_error(e->ctx) == DT_OK ? encode_put_example(e, place) : dt_error(e->ctx);
}

static inline dt_status encode_examples(encoding *e, const char *path) {
    char place[4352];
    size_t bytes = 0, half = ((size_t)e->seq + 1) * sizeof(int32_t);
    char *text = dt_file_read(e->ctx, path, (size_t)1 << 32, &bytes);
    e->token = (int32_t *)dt_alloc(e->ctx, DT_MEM_HOST, 2 * half, "an example");
    e->has_label = e->token ? e->token + e->seq + 1 : NULL;
    int64_t number = 1;
    for (size_t at = 0, end; dt_error(e->ctx) == DT_OK && at < bytes; at = end + 1, number++) {
        const char *newline = (const char *)memchr(text + at, '\n', bytes - at);
        end = newline ? (size_t)(newline - text) : bytes;
        if (at + strspn(text + at, " \t\r") >= end) continue;
        snprintf(place, sizeof place, "%.4200s line %lld", path, (long long)number);
        e->line = (int32_t)number;
        encode_example(e, place, text + at, end - at);
    }
    dt_free(e->ctx, DT_MEM_HOST, e->token, 2 * half);
    if (text) dt_free(e->ctx, DT_MEM_HOST, text, bytes + 1);
    return dt_error(e->ctx);
}

// ==== The cache ==================================================================================

/* Continues the key with a file's path, inode, size and time of its last change. */
static inline void encode_key_file(encoding *e, const char *path) {
    struct stat st;
    e->key = encode_hash(e->key, path, strlen(path) + 1);
    if (stat(path, &st) != 0) return;
    int64_t about[5] = { (int64_t)st.st_dev, (int64_t)st.st_ino, (int64_t)st.st_size,
        (int64_t)st.st_mtim.tv_sec, (int64_t)st.st_mtim.tv_nsec };
    e->key = encode_hash(e->key, about, sizeof about);
}

/* Sets the key of the shard with the tokens of these files: it changes with each file and with the
   tokenizer, and for instruction data with T. */
static inline void encode_key(encoding *e, const train_files *files) {
    int64_t about[3] = { 1, files->examples ? e->seq : 0, files->count };
    e->key = encode_hash(14695981039346656037u, about, sizeof about);
    if (e->tokenizer) encode_key_file(e, e->tokenizer);
    for (int i = 0; i < files->count; i++) encode_key_file(e, files->path[i]);
}

/* Returns the descriptor of the cached shard at `path`, or -1 if the shard is missing or damaged,
   or was made from other input. */
static inline int encode_reuse(encoding *e, const char *path, train_files *files) {
    int32_t header[ENCODE_HEADER];
    int32_t *buffer = (int32_t *)malloc(ENCODE_BUFFER * sizeof *buffer);
    struct stat st;
    uint64_t digest[2] = { 0, 0 };
    int fd = buffer ? open(path, O_RDONLY | O_CLOEXEC) : -1, good = fd >= 0;
    good = good && fstat(fd, &st) == 0 && read(fd, header, sizeof header) == sizeof header;
    if (good) memcpy(digest, header + ENCODE_KEY, sizeof digest);
    int64_t left = good ? header[ENCODE_TOKENS] : 0;
    good = good && digest[0] == e->key &&
           (int64_t)st.st_size == (int64_t)sizeof header + left * (int64_t)sizeof *buffer;
    while (good && left > 0) {
        ssize_t got = read(fd, buffer, ENCODE_BUFFER * sizeof *buffer);
        if (got <= 0 || got % (ssize_t)sizeof *buffer != 0) break;
        e->digest = encode_digest(e->digest, buffer, got / (ssize_t)sizeof *buffer);
        left -= got / (ssize_t)sizeof *buffer;
    }
    good = good && left == 0 && digest[1] == e->digest && header[ENCODE_SKIPPED + 1] >= 0 &&
           header[ENCODE_SKIPPED + 1] < files->count;
    if (good) {
        e->truncated = header[ENCODE_TRUNCATED];
        e->skipped = header[ENCODE_SKIPPED];
        e->skipped_file = header[ENCODE_SKIPPED + 1];
        e->skipped_line = header[ENCODE_SKIPPED + 2];
    }
    files->cached = good ? DATA_CACHE_READ : fd >= 0 ? DATA_CACHE_REPLACED : DATA_CACHE_WRITTEN;
    e->digest = 0;
    free(buffer);
    if (fd >= 0 && !good) close(fd);
    return good ? fd : -1;
}

// ==== Encoding files =============================================================================

/* Opens a new file for the shard: in the cache folder, or a temporary file that is removed at
   once. */
static inline dt_status encode_create(encoding *e) {
    const char *folder = e->cache ? e->cache : getenv("TMPDIR");
    snprintf(
        e->path, sizeof e->path, "%.4000s/dt-tokens-XXXXXX", folder && *folder ? folder : "/tmp");
    e->fd = mkostemp(e->path, O_CLOEXEC);
    if (e->fd < 0 || (!e->cache && unlink(e->path) != 0))
        return dt_fail(e->ctx, DT_ERR_IO, "%s: %s", e->path, strerror(errno));
    return DT_OK;
}

/* Completes the shard: its header, and in the cache its name. A shard of the cache gets its name
   when it is on the disk, so that no torn shard has it. */
static inline dt_status encode_finish(encoding *e, const char *cached) {
    int32_t header[ENCODE_HEADER] = { 20240801, 7, (int32_t)e->tokens, (int32_t)e->truncated };
    memcpy(header + ENCODE_KEY, &e->key, sizeof e->key);
    memcpy(header + ENCODE_DIGEST, &e->digest, sizeof e->digest);
    header[ENCODE_SKIPPED] = e->skipped;
    header[ENCODE_SKIPPED + 1] = e->skipped_file;
    header[ENCODE_SKIPPED + 2] = e->skipped_line;
    if (dt_error(e->ctx) == DT_OK &&
        (pwrite(e->fd, header, sizeof header, 0) != (ssize_t)sizeof header ||
            (e->cache && (fsync(e->fd) != 0 || rename(e->path, cached) != 0))))
        dt_fail(e->ctx, DT_ERR_IO, "%s: %s", e->path, strerror(errno));
    if (e->cache && dt_error(e->ctx) != DT_OK) unlink(e->path);
    return dt_error(e->ctx);
}

static inline dt_status encode_to_shard(encoding *e, const train_files *files, const char *cached) {
    static const int32_t header[ENCODE_HEADER], last = 0;
    if (encode_create(e) != DT_OK) return dt_error(e->ctx);
    encode_write(e, header, sizeof header);
    for (int i = 0; i < files->count && dt_error(e->ctx) == DT_OK; i++) {
        e->file = i;
        if (files->examples)
            encode_examples(e, files->path[i]);
        else
            tok_encode_file(e->tok, files->path[i], 1, encode_put, e);
    }
    if (files->examples && e->tokens > 0)
        encode_put(e, &last, 1); /* as the label that dt_text_read needs */
    if (dt_error(e->ctx) == DT_OK && e->skipped > 0 && e->tokens == 0)
        dt_fail(e->ctx, DT_ERR_ARG,
            "%s: the answers of all examples begin after the first %d tokens; use a longer --seq",
            files->path[e->skipped_file], e->seq);
    if (dt_error(e->ctx) == DT_OK && e->tokens < 2)
        dt_fail(e->ctx, DT_ERR_ARG, "%s: %lld %s; at least %d are needed",
            files->path[files->count - 1], (long long)e->tokens,
            files->examples ? "examples" : "tokens", files->examples ? 1 : 2);
    return encode_finish(e, cached);
}

/* Locks the cache folder, so that only one process encodes at a time and the others read its shard.
   Returns the lock's descriptor, or -1 after an error. */
static inline int encode_lock(encoding *e) {
    const struct timespec pause = { .tv_nsec = 50000000 };
    int lock = open(e->cache, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (double waited = 0; lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) != 0; waited += 0.05) {
        int late = waited >= e->timeout_s;
        if (errno == EINTR || (errno == EWOULDBLOCK && !late)) {
            nanosleep(&pause, NULL);
            continue;
        }
        if (late)
            dt_fail(e->ctx, DT_ERR_TIMEOUT,
                "%s: another process has been encoding into this folder for %g s; use a longer "
                "timeout or another folder",
                e->cache, e->timeout_s);
        else
            dt_fail(e->ctx, DT_ERR_IO, "%s: %s", e->cache, strerror(errno));
        close(lock);
        return -1;
    }
    if (lock < 0) dt_fail(e->ctx, DT_ERR_IO, "%s: %s", e->cache, strerror(errno));
    return lock;
}

/* Encodes the files into one shard and sets files->encoded to its path, which is valid as long as
   this process lives: the descriptor stays open. With a cache, uses the shard that is there, unless
   a file or the tokenizer has changed or the shard is damaged. */
static inline dt_status encode_files(encoding *e, train_files *files) {
    char cached[4352] = "";
    int lock = -1;
    e->fd = -1;
    if (e->cache) {
        if ((lock = encode_lock(e)) < 0) return dt_error(e->ctx);
        encode_key(e, files);
        snprintf(
            cached, sizeof cached, "%.4000s/%016llx.tokens", e->cache, (unsigned long long)e->key);
        e->fd = encode_reuse(e, cached, files);
    }
    if (e->fd < 0) encode_to_shard(e, files, cached);
    files->truncated = e->truncated;
    files->skipped = e->skipped;
    files->skipped_file = e->skipped_file;
    files->skipped_line = e->skipped_line;
    if (lock >= 0) close(lock);
    snprintf(files->encoded, sizeof files->encoded, "/proc/self/fd/%d", e->fd);
    files->shards = 1;
    return dt_error(e->ctx);
}

#endif /* ENCODE_H */
