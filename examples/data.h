/* data.h - the data of train.h: files, mixtures of sources, documents - public domain or MIT, at
   your choice

   Include data.h after dt_parallel.h. All functions are static. A source is a list of files that
   are read as one text. A data set is one source, or several that are mixed by weights:

       data_set *d = data_open(ctx, &files, T, shuffle);
       data_read(d, position, ids, labels, &is_example);   // position: from 0, in the run

   The order of the sequences depends on the position alone, and so neither on the layout nor on
   where a run was interrupted. */
#ifndef DATA_H
#define DATA_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Limits. DATA_PERIOD: sum of the weights of a mixture. DATA_END: tokens that end a document. */
enum { DATA_SOURCES = 64, DATA_PERIOD = 1000000, DATA_END = 64 };

enum { DATA_NOT_CACHED = 0, DATA_CACHE_READ, DATA_CACHE_WRITTEN, DATA_CACHE_REPLACED };

/* A source: data files, which are read as one text in this order. */
typedef struct train_files {
    char **path;
    int count, capacity;
    int64_t bytes;
    int64_t tokens; /* number of tokens; each byte of a text file is a token */
    int shards;     /* 1 if the tokens are in llm.c token shards, 0 if the bytes are the tokens */
    /* path of one shard with the tokens of all files; empty: the files are read */
    char encoded[40];
    /* 1: the files are instruction data, and `encoded` has T ids and then T labels + 1 of each
       example, so that a label that does not count is 0 */
    int examples;
    int64_t truncated; /* examples that are longer than T tokens */
    /* examples that are left out, because their first T tokens have no label, and the first one:
       the index of its file and its line */
    int skipped, skipped_file, skipped_line;
    int cached;               /* DATA_CACHE_*: what the token cache did */
    int64_t weight;           /* of this source in a mixture; 0 means 1 */
    struct train_files *next; /* the next source of the mixture, allocated with calloc; or NULL */
} train_files;

/* The tokens that end a document: it ends where the last n tokens are these. */
typedef struct data_end {
    int n; /* 0: a sequence is one document */
    int32_t id[DATA_END];
} data_end;

// ==== Files ======================================================================================

static inline int train_files_add(train_files *f, const char *path, int64_t bytes) {
    if (f->count == f->capacity) {
        int capacity = f->capacity ? 2 * f->capacity : 16;
        char **more = (char **)realloc(f->path, (size_t)capacity * sizeof *more);
        if (!more) return -1;
        f->path = more;
        f->capacity = capacity;
    }
    char *copy = strdup(path);
    if (!copy) return -1;
    f->path[f->count++] = copy;
    f->bytes += bytes;
    return 0;
}

static inline int train_by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Adds the files of a directory, sorted by name, except hidden files. If `endings` is not NULL,
   adds only files whose name has one of these endings. Returns -1 and sets errno on failure. */
static inline int train_files_add_dir(train_files *f, const char *dir, const char *const *endings) {
    DIR *d = opendir(dir);
    struct dirent *e;
    struct stat st;
    char path[4096];
    int first = f->count, failed = 0;
    if (!d) return -1;
    while (!failed && (errno = 0, e = readdir(d))) {
        int fits = endings == NULL;
        for (int i = 0; endings && endings[i]; i++) {
            size_t length = strlen(e->d_name), end = strlen(endings[i]);
            fits |= length > end && strcmp(e->d_name + length - end, endings[i]) == 0;
        }
        if (!fits || e->d_name[0] == '.') continue;
        if (snprintf(path, sizeof path, "%s/%s", dir, e->d_name) >= (int)sizeof path)
            errno = ENAMETOOLONG, failed = -1;
        else if (stat(path, &st) != 0)
            failed = -1;
        else if (S_ISREG(st.st_mode))
            failed = train_files_add(f, path, (int64_t)st.st_size);
    }
    if (!e && errno != 0) failed = -1;
    int reason = errno; /* closedir may change errno */
    closedir(d);
    errno = reason;
    if (f->count > first)
        qsort(f->path + first, (size_t)(f->count - first), sizeof *f->path, train_by_name);
    return failed;
}

/* Adds the project's own sources: those in `root`, then those in root/examples. Returns the number
   of files, or 0 if the sources cannot be read. */
static inline int train_files_add_sources(train_files *f, const char *root) {
    static const char *const endings[] = { ".h", ".c", ".cu", NULL };
    char path[4096 + 16];
    snprintf(path, sizeof path, "%s/dt_tensor.h", root);
    if (access(path, R_OK) != 0) return 0;
    if (train_files_add_dir(f, root, endings) != 0) return 0;
    snprintf(path, sizeof path, "%s/examples", root);
    return train_files_add_dir(f, path, endings) == 0 ? f->count : 0;
}

/* Adds the project's own sources. Looks for them in the current directory, then in the parent of
   the program's directory. */
static inline int train_files_find_sources(train_files *f) {
    char self[4096];
    if (train_files_add_sources(f, ".")) return f->count;
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 8);
    if (length <= 0) return 0;
    self[length] = 0;
    char *slash = strrchr(self, '/');
    strcpy(slash ? slash : self, "/..");
    return train_files_add_sources(f, self);
}

/* Frees the files of a source and those of the sources after it. */
static inline void train_files_free(train_files *f) {
    while (f->next) {
        train_files *next = f->next;
        f->next = next->next;
        next->next = NULL;
        train_files_free(next);
        free(next);
    }
    for (int i = 0; i < f->count; i++) free(f->path[i]);
    free(f->path);
    memset(f, 0, sizeof *f);
}

// ==== Mixtures ===================================================================================

typedef struct data_source {
    const train_files *files;
    dt_text *text;
    dt_sampler *sampler; /* shuffles the sequences in each epoch; NULL: no shuffling */
    int64_t sequences, weight;
    int64_t count; /* sequences of this source before position data_set.at of the period */
    /* for data_will_need: the number of tokens up to the end of each file, the format of the files,
       and the open one; fd is -1 if none is open */
    int64_t *end, token_bytes, header_bytes;
    int fd, open_file;
} data_source;

/* A data set. The sources are interleaved with a period of as many positions as the sum W of their
   weights. */
typedef struct data_set {
    dt_ctx *ctx;
    int64_t T, period, at;
    int sources;
    data_source source[DATA_SOURCES];
    int32_t *example; /* (2,2T): what dt_text_read returns for an example of instruction data */
} data_set;

/* Returns the source of position d->at of the period. d has the number of sequences of each source
   before this position.

   Weighted interleaving: among the first k positions, a source with weight a of W has floor(k a/W)
   or ceil(k a/W), for every k. Of the sources that are far enough behind, the position goes to the
   one whose next sequence is due first (R. Tijdeman, Discrete Mathematics 32 (1980) 323-330):

       weights 3, 2, 1     0 1 0 2 1 0   0 1 0 2 1 0   ..

   Taking the source that is furthest behind would not keep this bound with many sources. */
static inline int data_next_source(const data_set *d) {
    int64_t n = d->sources, W = d->period, best_due = 0;
    int best = -1;
    if (n == 1) return 0;
    for (int i = 0; i < n; i++) {
        const data_source *s = &d->source[i];
        /* W times the number of sequences that s is behind if it does not get this position */
        int64_t behind = s->weight * (d->at + 1) - s->count * W;
        /* With E = 2 n - 2, a source may get the position if it would be 1/E sequences behind. Of
           these, the first to be 1 - 1/E behind gets it: due / (E weight) positions later */
        int64_t due = (2 * n - 3) * W - (2 * n - 2) * behind;
        if ((2 * n - 2) * behind < W) continue;
        if (best < 0 || due * d->source[best].weight < best_due * s->weight)
            best = i, best_due = due;
    }
    return best;
}

/* Moves to position `at` of the period. */
static inline void data_seek(data_set *d, int64_t at) {
    if (at < d->at) {
        for (int i = 0; i < d->sources; i++) d->source[i].count = 0;
        d->at = 0;
    }
    for (; d->at < at; d->at++) d->source[data_next_source(d)].count++;
}

/* Returns the source of a position, and sets *n to the number of sequences of this source before
   the position. */
static inline data_source *data_place(data_set *d, int64_t position, int64_t *n) {
    data_seek(d, position % d->period);
    data_source *s = &d->source[data_next_source(d)];
    *n = position / d->period * s->weight + s->count;
    return s;
}

/* Returns how often source i has been read in the first `positions` sequences of a run. */
static inline double data_epochs(data_set *d, int i, int64_t positions) {
    data_source *s = &d->source[i];
    data_seek(d, positions % d->period);
    return (double)(positions / d->period * s->weight + s->count) / (double)s->sequences;
}

// ==== Reading ====================================================================================

static inline int data_file_count(const train_files *f) { return *f->encoded ? 1 : f->count; }
static inline const char *data_file_path(const train_files *f, int i) {
    return *f->encoded ? f->encoded : f->path[i];
}

static inline dt_text *data_open_text(dt_ctx *ctx, const train_files *f, int64_t T) {
    const char *encoded = f->encoded;
    int seq = (int)(f->examples ? 2 * T : T);
    if (*encoded) return dt_text_open(ctx, &encoded, 1, seq);
    return f->count ? dt_text_open(ctx, (const char *const *)f->path, f->count, seq) : NULL;
}

static inline void data_close(data_set *d) {
    if (!d) return;
    for (int i = 0; i < d->sources; i++) {
        dt_sampler_free(d->source[i].sampler);
        dt_text_close(d->source[i].text);
        if (d->source[i].fd >= 0) close(d->source[i].fd);
        dt_free(d->ctx, DT_MEM_HOST, d->source[i].end,
            (size_t)data_file_count(d->source[i].files) * sizeof(int64_t));
    }
    dt_free(d->ctx, DT_MEM_HOST, d->example, 4 * (size_t)d->T * sizeof(int32_t));
    dt_free(d->ctx, DT_MEM_HOST, d, sizeof *d);
}

/* Opens the data set of a list of sources, as sequences of T tokens. If `shuffle` is 1, shuffles
   the sequences of each source in each epoch, with the context's seed. Returns NULL after a
   failure, and if there is no file. */
static inline data_set *data_open(dt_ctx *ctx, const train_files *f, int64_t T, int shuffle) {
    data_set *d = f->count && dt_error(ctx) == DT_OK
                      ? (data_set *)dt_alloc(ctx, DT_MEM_HOST, sizeof *d, "data")
                      : NULL;
    if (!d) return NULL;
    memset(d, 0, sizeof *d);
    d->ctx = ctx;
    d->T = T;
    int examples = 0;
    for (; f && d->sources < DATA_SOURCES && dt_error(ctx) == DT_OK; f = f->next) {
        data_source *s = &d->source[d->sources++];
        s->files = f;
        s->fd = -1;
        s->text = data_open_text(ctx, f, T);
        s->sequences = dt_text_sequences(s->text);
        s->weight = f->weight > 0 ? f->weight : 1;
        d->period += s->weight;
        examples |= f->examples;
        if (shuffle && s->text)
            s->sampler = dt_sampler_make(ctx, (dt_sampler_desc){ .samples = s->sequences,
                                                  .replicas = 1,
                                                  .seed = dt_ctx_seed(ctx),
                                                  .shuffle = 1 });
    }
    if (examples)
        d->example =
            (int32_t *)dt_alloc(ctx, DT_MEM_HOST, 4 * (size_t)T * sizeof(int32_t), "an example");
    if (f || d->period > DATA_PERIOD)
        dt_fail(ctx, DT_ERR_ARG, "data: more than %d sources, or weights with a sum over %d",
            DATA_SOURCES, DATA_PERIOD);
    if (dt_error(ctx) == DT_OK) return d;
    data_close(d);
    return NULL;
}

/* Returns the number of sequences of all sources, which is one epoch. */
static inline int64_t data_sequences(const data_set *d) {
    int64_t sum = 0;
    for (int i = 0; i < d->sources; i++) sum += d->source[i].sequences;
    return sum;
}

static inline int64_t data_tokens(const data_set *d) {
    int64_t sum = 0;
    for (int i = 0; i < d->sources; i++) sum += dt_text_tokens(d->source[i].text);
    return sum;
}

/* Sets *source to the source of a position of the run, and returns the index of the position's
   sequence in this source. Each source repeats in epochs without end. */
static inline int64_t data_find(data_set *d, int64_t position, data_source **source) {
    int64_t n;
    data_source *s = *source = data_place(d, position, &n);
    if (!s->sampler) return n % s->sequences;
    dt_sampler_seek(s->sampler, (dt_sampler_state){ n / s->sequences, n % s->sequences });
    return dt_sampler_next(s->sampler);
}

/* Reads ids (T) and labels (T) of the sequence at a position of the run. Sets *is_example to 1 if
   it is an example of instruction data. */
static inline dt_status data_read(
    data_set *d, int64_t position, int32_t *ids, int32_t *labels, int *is_example) {
    data_source *s;
    int64_t T = d->T, sequence = data_find(d, position, &s);
    *is_example = s->files->examples;
    if (!s->files->examples) return dt_text_read(s->text, sequence, ids, labels);
    dt_status status = dt_text_read(s->text, sequence, d->example, d->example + 2 * T);
    for (int64_t t = 0; t < T && status == DT_OK; t++) {
        ids[t] = d->example[t];
        labels[t] = d->example[T + t] - 1;
    }
    return status;
}

/* ---- reading ahead ---- */

/* Prepares data_will_need: finds where the tokens of each file end. */
static inline void data_read_ahead(data_set *d) {
    for (int k = 0; k < d->sources && dt_error(d->ctx) == DT_OK; k++) {
        data_source *s = &d->source[k];
        int files = data_file_count(s->files);
        int64_t tokens = 0;
        s->end =
            (int64_t *)dt_alloc(d->ctx, DT_MEM_HOST, (size_t)files * sizeof *s->end, "read ahead");
        s->token_bytes = dt_text_token_limit(s->text) <= 256     ? 1
                         : dt_text_token_limit(s->text) <= 65536 ? 2
                                                                 : 4;
        s->header_bytes = s->token_bytes > 1 ? 1024 : 0;
        for (int i = 0; s->end && i < files; i++) {
            struct stat st = { .st_size = 0 };
            if (stat(data_file_path(s->files, i), &st) == 0)
                tokens += ((int64_t)st.st_size - s->header_bytes) / s->token_bytes;
            s->end[i] = tokens;
        }
    }
}

/* Asks the kernel to read the sequence at a position into its cache of files, so that data_read
   will not wait for the disk. This starts no thread and is only a hint: it cannot fail. It moves
   the data set's position, so use a second data set, which data_read_ahead has prepared. */
static inline void data_will_need(data_set *d, int64_t position) {
    data_source *s;
    int64_t sequence = data_find(d, position, &s), T = s->files->examples ? 2 * d->T : d->T;
    int64_t at = sequence * T, end = at + T + 1, start = 0;
    for (int i = 0; s->end && i < data_file_count(s->files) && at < end; start = s->end[i++]) {
        int64_t stop = s->end[i] < end ? s->end[i] : end;
        if (at >= stop) continue;
        if (s->fd < 0 || s->open_file != i) {
            if (s->fd >= 0) close(s->fd);
            s->fd = open(data_file_path(s->files, i), O_RDONLY | O_CLOEXEC);
            s->open_file = i;
        }
        if (s->fd >= 0)
            posix_fadvise(s->fd, s->header_bytes + (at - start) * s->token_bytes,
                (stop - at) * s->token_bytes, POSIX_FADV_WILLNEED);
        at = stop;
    }
}

// ==== Documents ==================================================================================

/* Splits a sequence of T tokens into documents: sets the number of each token's document and its
   position in this document, both from 0. A document ends with the tokens of `end`, and its last
   token gets no label (-1), because the next token belongs to another document. A document that
   continues from the previous sequence begins at position 0 again, and a separator that two
   sequences share ends no document. */
static inline void data_split_documents(const data_end *end, int64_t T, const int32_t *ids,
    int32_t *labels, int32_t *positions, int32_t *documents) {
    int32_t document = 0;
    int64_t first = 0; /* the document's first token */
    for (int64_t t = 0; t < T; t++) {
        int n = 0;
        positions[t] = (int32_t)(t - first);
        documents[t] = document;
        while (n < end->n && t - n >= first && ids[t - n] == end->id[end->n - 1 - n]) n++;
        if (end->n == 0 || n < end->n) continue;
        labels[t] = -1;
        first = t + 1;
        document++;
    }
}

#endif /* DATA_H */
