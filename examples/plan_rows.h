/* plan_rows.h - predicts the rows of a CSV file of layouts (train_gpt --plan-rows) - public domain
   or MIT, at your choice

   The file has a header line and a row for each measured or planned job. Needed columns, in any
   order: model (1B, 3B, 8B or 80B), nodes, mbs (micro-batch), gradacc (micro-batches), gbs (global
   batch), dp, pp, tp, zero. All other columns are copied. */
#ifndef PLAN_ROWS_H
#define PLAN_ROWS_H

#include <stdarg.h>
#include <stdio.h>

enum { PLAN_MAX_COLUMNS = 256 };
enum {
    PLAN_MODEL,
    PLAN_NODES,
    PLAN_MBS,
    PLAN_GRADACC,
    PLAN_GBS,
    PLAN_DP,
    PLAN_PP,
    PLAN_TP,
    PLAN_ZERO,
    PLAN_COLUMNS
};
static const char *const plan_columns[] = { "model", "nodes", "mbs", "gradacc", "gbs", "dp", "pp",
    "tp", "zero" };

/* The models that rows name: Llama's shape with as many kv heads as heads, and the vocabulary and
   sequences of nanotron's benchmark. */
static const struct plan_shape {
    const char *name;
    dt_plan_model model;
} plan_shapes[] = {
    { "1B", { 16, 2048, 32, 32, 8192, 1, 131072, 4096, 1, 0, 0, 0 } },
    { "3B", { 28, 3072, 32, 32, 8192, 1, 131072, 4096, 1, 0, 0, 0 } },
    { "8B", { 32, 4096, 32, 32, 14336, 1, 131072, 4096, 0, 0, 0, 0 } },
    { "80B", { 80, 8192, 64, 64, 28672, 1, 131072, 4096, 0, 0, 0, 0 } },
};
enum { PLAN_SHAPES = sizeof plan_shapes / sizeof *plan_shapes };

typedef struct plan_file {
    const char *path;
    char *text, *at; /* the whole file; the next record */
    int line;        /* of the next record, counted from 1 */
    /* the current record: its line, its text without the line's end, and its fields unquoted */
    int record_line;
    char *record, *record_end;
    const char *line_end;
    char *fields[PLAN_MAX_COLUMNS];
    int n_fields;
    char *unquoted;                        /* the fields' memory */
    int field_of[PLAN_COLUMNS], n_columns; /* the field of each needed column; all columns */
    char error[400];
} plan_file;

static inline int plan_error(plan_file *f, const char *column, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Writes "FILE:LINE: column NAME: text" and returns 0. */
static inline int plan_error(plan_file *f, const char *column, const char *fmt, ...) {
    va_list args;
    int n = snprintf(f->error, sizeof f->error, "%.200s:%d: %s%s%s", f->path, f->record_line,
        column ? "column " : "", column ? column : "", column ? ": " : "");
    va_start(args, fmt);
    vsnprintf(f->error + n, sizeof f->error - (size_t)n, fmt, args);
    va_end(args);
    return 0;
}

/* Unquotes the field at f->at into *to and moves both on. Returns 0 after an error. */
static inline int plan_field(plan_file *f, char **to) {
    char *out = *to;
    if (f->n_fields == PLAN_MAX_COLUMNS)
        return plan_error(f, NULL, "more than %d columns", PLAN_MAX_COLUMNS);
    f->fields[f->n_fields++] = out;
    if (*f->at == '"') {
        for (f->at++; *f->at != '"' || f->at[1] == '"'; f->at++) {
            if (!*f->at) return plan_error(f, NULL, "field %d: a quote is not closed", f->n_fields);
            if (*f->at == '\n') f->line++;
            if (*f->at == '"') f->at++;
            *out++ = *f->at;
        }
        f->at++;
        if (*f->at && !strchr(",\r\n", *f->at))
            return plan_error(f, NULL, "field %d: text after the closing quote", f->n_fields);
    } else {
        while (*f->at && !strchr(",\r\n", *f->at)) {
            if (*f->at == '"')
                return plan_error(f, NULL, "field %d: a quote inside the text", f->n_fields);
            *out++ = *f->at++;
        }
    }
    *out++ = 0;
    *to = out;
    return 1;
}

/* Reads the next record. Returns 1; 0 at the end of the file; 0 with f->error after an error.
   Records may have quoted fields with line ends and doubled quotes (RFC 4180); empty lines are
   skipped. */
static inline int plan_record(plan_file *f) {
    char *to = f->unquoted;
    for (; *f->at == '\n' || *f->at == '\r'; f->at++) f->line += *f->at == '\n';
    f->record = f->at;
    f->record_line = f->line;
    f->n_fields = 0;
    if (!*f->at) return 0;
    do {
        if (!plan_field(f, &to)) return 0;
    } while (*f->at == ',' && f->at++);
    f->record_end = f->at;
    f->line_end = "\n";
    if (*f->at == '\r') f->at++, f->line_end = "\r\n";
    if (*f->at == '\n')
        f->at++, f->line++;
    else if (*f->at)
        return plan_error(f, NULL, "a carriage return inside the line");
    return 1;
}

/* Finds the needed columns in the header. */
static inline int plan_header(plan_file *f) {
    if (!plan_record(f)) return *f->error ? 0 : plan_error(f, NULL, "the file is empty");
    f->n_columns = f->n_fields;
    for (int c = 0; c < PLAN_COLUMNS; c++) {
        f->field_of[c] = -1;
        for (int i = 0; i < f->n_fields; i++) {
            if (!strncmp(f->fields[i], "pred_", 5))
                return plan_error(f, f->fields[i], "the file has predictions already");
            if (strcmp(f->fields[i], plan_columns[c]) != 0) continue;
            if (f->field_of[c] >= 0) return plan_error(f, plan_columns[c], "occurs twice");
            f->field_of[c] = i;
        }
        if (f->field_of[c] < 0) return plan_error(f, plan_columns[c], "is missing");
    }
    return 1;
}

/* Reads the whole number of column c, at least `least`. A file that a table program wrote may have
   16.0 for 16. */
static inline int plan_number(plan_file *f, int c, int least, int *out) {
    const char *text = f->fields[f->field_of[c]];
    double number = 0;
    size_t n = decimal(text, 1, &number);
    if (n == 0 || text[n] || number != floor(number) || number < least || number > 1e6)
        return plan_error(
            f, plan_columns[c], "\"%.40s\" is no whole number from %d to 1000000", text, least);
    *out = (int)number;
    return 1;
}

/* Reads the sizes of the current record. */
static inline int plan_layout(
    plan_file *f, const dt_plan_model **model, dt_layout *l, int numbers[PLAN_COLUMNS]) {
    const char *name = f->fields[f->field_of[PLAN_MODEL]];
    *model = NULL;
    for (int i = 0; i < PLAN_SHAPES; i++)
        if (!strcmp(name, plan_shapes[i].name)) *model = &plan_shapes[i].model;
    if (!*model)
        return plan_error(
            f, "model", "\"%.40s\" is unknown; known models are 1B, 3B, 8B and 80B", name);
    for (int c = PLAN_NODES; c < PLAN_COLUMNS; c++)
        if (!plan_number(f, c, c == PLAN_ZERO ? 0 : 1, &numbers[c])) return 0;
    if (numbers[PLAN_ZERO] > 3)
        return plan_error(f, "zero", "%d is no ZeRO stage from 0 to 3", numbers[PLAN_ZERO]);
    memset(l, 0, sizeof *l);
    l->mesh.dp = numbers[PLAN_DP], l->mesh.tp = numbers[PLAN_TP], l->mesh.pp = numbers[PLAN_PP];
    l->zero = numbers[PLAN_ZERO];
    l->schedule = DT_SCHEDULE_1F1B;
    l->micro_batch = numbers[PLAN_MBS], l->accum = numbers[PLAN_GRADACC];
    l->sp = 1;
    return 1;
}

/* Appends one reason, after "; " if there is another. */
static inline void plan_note(char *note, size_t bytes, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static inline void plan_note(char *note, size_t bytes, const char *fmt, ...) {
    va_list args;
    size_t n = strlen(note);
    if (n) n += (size_t)snprintf(note + n, bytes - n, "; ");
    va_start(args, fmt);
    vsnprintf(note + n, bytes - n, fmt, args);
    va_end(args);
}

/* Predicts the current record and writes it with its three more fields. */
static inline int plan_row(plan_file *f, const dt_plan_profile *profile, FILE *out) {
    const dt_plan_model *model;
    dt_layout l;
    dt_plan_cost cost;
    int n[PLAN_COLUMNS] = { 0 };
    char note[400] = "";
    if (f->n_fields != f->n_columns)
        return plan_error(f, NULL, "%d fields, but the header has %d", f->n_fields, f->n_columns);
    if (!plan_layout(f, &model, &l, n)) return 0;
    double batch = (double)n[PLAN_DP] * n[PLAN_MBS] * n[PLAN_GRADACC];
    double gpus = (double)n[PLAN_DP] * n[PLAN_TP] * n[PLAN_PP],
           have = n[PLAN_NODES] * profile->node;
    fwrite(f->record, 1, (size_t)(f->record_end - f->record), out);
    if (batch != n[PLAN_GBS])
        plan_note(
            note, sizeof note, "dp x mbs x gradacc is %.0f and not gbs %d", batch, n[PLAN_GBS]);
    if (gpus != have)
        plan_note(note, sizeof note, "dp x tp x pp is %.0f and not the %.0f GPUs of %d nodes", gpus,
            have, n[PLAN_NODES]);
    if (model->heads % l.mesh.tp)
        plan_note(note, sizeof note, "tp %d does not divide %d heads", l.mesh.tp, model->heads);
    if (dt_plan_estimate(model, &l, profile, &cost) != DT_OK) {
        plan_note(note, sizeof note, "no prediction for pp %d", l.mesh.pp);
        fprintf(out, ",,,%s%s", note, f->line_end);
        return 1;
    }
    if (cost.stages_without_layers)
        plan_note(note, sizeof note, "%d of %d stages have no layer", cost.stages_without_layers,
            l.mesh.pp);
    if (cost.bytes > profile->memory)
        plan_note(note, sizeof note, "does not fit: %.1f of %.1f GiB", cost.bytes / 0x1p30,
            profile->memory / 0x1p30);
    fprintf(out, ",%.6g,%.4g,%s%s", cost.tokens_per_s_gpu, cost.bytes / 0x1p30, note, f->line_end);
    return 1;
}

/* Reads all of a file as text. Returns NULL, with f->error, if that fails. */
static inline char *plan_read(plan_file *f) {
    FILE *in = fopen(f->path, "rb");
    size_t room = 1 << 16, n = 0, got = 1;
    char *text = in ? (char *)malloc(room) : NULL;
    while (text && got) {
        got = fread(text + n, 1, room - n - 1, in);
        n += got;
        if (room - n > 1) continue;
        char *more = room < (size_t)1 << 31 ? (char *)realloc(text, room *= 2) : NULL;
        if (!more) free(text), errno = EFBIG;
        text = more;
    }
    int failed = !text || ferror(in), why = errno;
    if (in) fclose(in);
    if (text) text[n] = 0;
    if (failed)
        snprintf(f->error, sizeof f->error, "%.200s: %s", f->path, strerror(why));
    else if (strlen(text) != n)
        snprintf(f->error, sizeof f->error, "%.200s: byte %zu is 0", f->path, strlen(text));
    if (!*f->error) return text;
    free(text);
    return NULL;
}

/* Predicts all rows of `in` and writes them to the file `out`. Returns the exit status: 0, 2 if the
   input is wrong, or 1 if the output cannot be written; then *error is the text. */
static inline int plan_rows(const char *in, const dt_plan_profile *profile, const char *out,
    char *error, size_t error_bytes) {
    plan_file f;
    memset(&f, 0, sizeof f);
    f.path = in;
    f.line = 1;
    int status = 2;
    char *result = NULL;
    size_t bytes = 0;
    /* the output is opened last: a wrong input leaves it as it was, even if it is the input */
    FILE *rows = open_memstream(&result, &bytes);
    f.text = plan_read(&f);
    f.unquoted = f.text ? (char *)malloc(2 * strlen(f.text) + 2) : NULL;
    if (rows && f.text && f.unquoted) {
        f.at = f.text;
        if (!strncmp(f.at, "\xEF\xBB\xBF", 3)) f.at += 3; /* byte order mark */
        if (plan_header(&f)) {
            fwrite(f.record, 1, (size_t)(f.record_end - f.record), rows);
            fprintf(rows, ",pred_tok_s_gpu,pred_gpu_mem,pred_note%s", f.line_end);
            while (plan_record(&f) && plan_row(&f, profile, rows)) continue;
        }
    } else if (!*f.error) {
        snprintf(f.error, sizeof f.error, "no memory");
    }
    if (rows && fclose(rows) != 0 && !*f.error) snprintf(f.error, sizeof f.error, "no memory");
    if (!*f.error) {
        FILE *file = fopen(out, "wb");
        int failed = !file || fwrite(result, 1, bytes, file) != bytes;
        if (file && fclose(file) != 0) failed = 1;
        status = failed;
        if (failed) snprintf(f.error, sizeof f.error, "%.200s: %s", out, strerror(errno));
    }
    snprintf(error, error_bytes, "%s", f.error);
    free(result);
    free(f.unquoted);
    free(f.text);
    return status;
}

#endif /* PLAN_ROWS_H */
