/* options.h - the command line that train_gpt.c and train_ctr.c share - public domain or MIT, at your
   choice

   A program defines its table of options as the macro OPTIONS, then includes this file, and defines
   the functions refuse, notation and word_of. Include options.h after dt_zero.h.

       #define OPTIONS(X) \
           X(SAVE, "save", TEXT, BUILT, NULL, 0, 0, "DIR", "write checkpoints there") \
           X(STEPS, "steps", INT, BUILT, "100", 1, 1e9, "N", "steps of the optimizer")
       #include "options.h"

       value v[N_OPTIONS] = { 0 };
       set_defaults(v);
       parse_options(v, argc, argv);          v[O_STEPS].number is 100, or what --steps says

   A program that restarts its ranks after a failure finds the shared part at the end. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A row of the table has these columns: id; name; kind; BUILT, or NOT_BUILT if this build accepts
   only the default; default value, or NULL if there is no default or if the program computes it;
   lo; hi; notation of the value; help. The kinds are
     HEADING    not an option, but a heading in --help
     INT        a whole number from lo to hi
     REAL       a number from lo to hi
     SIZE       an INT with an optional suffix K, M or G for 2^10, 2^20, 2^30
     WORD       one of the words in the notation; words after ';' are not available in this build
     TEXT       any text that is not empty
     SWITCH     --x on or --x off; --no-x means --x off
     FLAG       an option without a value */
enum { HEADING, INT, REAL, SIZE, WORD, TEXT, SWITCH, FLAG };
enum { BUILT, NOT_BUILT };

enum {
#define ID(id, ...) O_##id,
    OPTIONS(ID)
#undef ID
        N_OPTIONS
};

typedef struct option {
    const char *name;
    int kind, availability;
    const char *default_text;
    double lo, hi;
    const char *arg, *help;
} option;

static const option table[N_OPTIONS] = {
#define ROW(id, ...) { __VA_ARGS__ },
    OPTIONS(ROW)
#undef ROW
};

enum { DEFAULT = 0, COMPUTED, FROM_ENVIRONMENT, GIVEN, GIVEN_IN_FILE };
typedef struct value {
    const char *text; /* the value as text; NULL: no value */
    /* INT, REAL or SIZE: the number; SWITCH or FLAG: 1 if it is on, 0 if it is off; WORD: the
       word's index in the notation */
    double number;
    /* where the value comes from: DEFAULT, COMPUTED, FROM_ENVIRONMENT (of the launcher), GIVEN on
       the command line, or GIVEN_IN_FILE of --config. From GIVEN on the user has chosen it */
    int from;
    char buffer[32]; /* holds the text of a computed number */
} value;

/* The program defines these three. refuse prints one line "error: ..." and exits with status 2.
   notation returns the notation of an option's value in this build. word_of returns the word of the
   notation that a WORD's text stands for: text, unless the option has values that no list can
   name. */
static __attribute__((noreturn, format(printf, 1, 2))) void refuse(const char *fmt, ...);
static const char *notation(int id);
static const char *word_of(int id, const char *text);

static inline int is_option(int id) { return table[id].kind != HEADING; }

/* Returns the Levenshtein distance of a and b. b must have fewer than 80 characters. */
static inline int edit_distance(const char *a, const char *b) {
    int row[80], n = (int)strlen(b);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; *a; a++, i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (*a != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[n];
}

/* Parses the decimal number at the start of text into *number. Returns the length of the number in
   bytes; 0 if text does not start with a number, or if a double would overflow or underflow to 0.
   If `real` is 1, the number may have a decimal point and an exponent. Unlike strtod, this function
   does not accept a blank, a sign, a hexadecimal number, inf or nan. */
static inline size_t decimal(const char *text, int real, double *number) {
    static const char digits[] = "0123456789";
    size_t n = strspn(text, digits), point = real && text[n] == '.';
    size_t fraction = point ? strspn(text + n + 1, digits) : 0;
    if (n + fraction == 0) return 0;
    n += point + fraction;
    if (real && (text[n] == 'e' || text[n] == 'E')) {
        size_t sign = text[n + 1] == '-' || text[n + 1] == '+',
               exponent = strspn(text + n + 1 + sign, digits);
        if (exponent) n += 1 + sign + exponent;
    }
    errno = 0;
    *number = strtod(text, NULL);
    return errno == ERANGE && (*number == 0 || *number == HUGE_VAL) ? 0 : n;
}

static inline __attribute__((noreturn)) void refuse_unknown(const char *name) {
    int best = -1, min_distance = 0;
    for (int i = 0; i < N_OPTIONS; i++) {
        int distance = is_option(i) ? edit_distance(name, table[i].name) : 0;
        if (is_option(i) && (best < 0 || distance < min_distance)) {
            best = i;
            min_distance = distance;
        }
    }
    if (min_distance > 1 + (int)strlen(name) / 3)
        refuse("unknown option --%s (--help lists all)", name);
    refuse("unknown option --%s; the nearest is --%s (--help lists all)", name, table[best].name);
}

static inline void parse_number(int id, value *v, const char *text) {
    const option *o = &table[id];
    double x = 0;
    size_t n = decimal(text, o->kind == REAL, &x);
    if (n && o->kind == SIZE && text[n] && strchr("KMG", text[n])) {
        x *= text[n] == 'K' ? 0x1p10 : text[n] == 'M' ? 0x1p20 : 0x1p30;
        n++;
    }
    if (!n || text[n] || !(x >= o->lo && x <= o->hi))
        refuse("--%s %s: not %s from %.12g to %.12g", o->name, *text ? text : "''",
            o->kind == REAL ? "a number" : "a whole number", o->lo, o->hi);
    v->number = x;
}

/* Returns the index of text among the words of `arg`, which is the notation of a WORD, for example
   "threads|procs|tcp;mpi|nccl"; -1 if text is none of these words. Sets *built to the number of
   words before the ';', or to the number of all words if there is no ';'. */
static inline int word_index(const char *arg, const char *text, int *built) {
    int index = -1, n = 0;
    *built = 0;
    for (const char *at = arg; *at; n++) {
        size_t length = strcspn(at, "|;");
        if (length == strlen(text) && strncmp(at, text, length) == 0) index = n;
        at += length;
        if (*at == ';') *built = n + 1;
        if (*at) at++;
    }
    if (*built == 0) *built = n;
    return index;
}

/* Returns the end of an error text: a colon and the make command that builds support for the word,
   or "" if no command does. */
static inline const char *built_by(const char *word) {
    if (strcmp(word, "mpi") == 0) return ": make MPI=1";
    return strcmp(word, "cuda") == 0 || strcmp(word, "nccl") == 0 ? ": make CUDA=1 NCCL=1" : "";
}

static inline void parse_word(int id, value *v, const char *text) {
    const option *o = &table[id];
    const char *arg = notation(id);
    int built, index = word_index(arg, word_of(id, text), &built);
    int length = (int)strcspn(arg, ";");
    const char *verb = built > 1 ? "values are" : "value is";
    if (index < 0)
        refuse("--%s %s: the legal %s %.*s%s", o->name, *text ? text : "''", verb, length, arg,
            strncmp(text, "cuda:", 5) == 0 ? "; CUDA_VISIBLE_DEVICES chooses among GPUs" : "");
    if (index >= built)
        refuse("--%s is not available in this build with %s%s; the legal %s %.*s", o->name, text,
            built_by(text), verb, length, arg);
    v->number = index;
}

/* Sets the option's value *v to text. Refuses text that is not a legal value for the option's kind.
   If the option is not available in this build, also refuses a value that the user has given and
   that differs from the default. */
static inline void set(value *v, int id, const char *text, int from) {
    const option *o = &table[id];
    value default_value = { 0 };
    if (o->kind == INT || o->kind == REAL || o->kind == SIZE) parse_number(id, v, text);
    if (o->kind == WORD) parse_word(id, v, text);
    if (o->kind == SWITCH || o->kind == FLAG) {
        v->number = strcmp(text, "on") == 0 || strcmp(text, "true") == 0;
        if (!v->number && strcmp(text, "off") != 0 && strcmp(text, "false") != 0)
            refuse("--%s %s: the legal values are on|off", o->name, *text ? text : "''");
    }
    if (o->kind == TEXT && !*text) refuse("--%s '': needs %s", o->name, o->arg);
    if (o->availability == NOT_BUILT && from >= GIVEN) {
        if (!o->default_text) refuse("--%s is not available in this build", o->name);
        if (o->kind == INT || o->kind == REAL) parse_number(id, &default_value, o->default_text);
        if (o->kind == SWITCH ? v->number != 0
            : o->kind == TEXT ? strcmp(text, o->default_text) != 0
                              : v->number != default_value.number)
            refuse("--%s is not available in this build (only %s is): %s", o->name, o->default_text,
                text);
    }
    v->text = text;
    v->from = from;
}

static inline void set_number(value *v, int64_t number, int from) {
    snprintf(v->buffer, sizeof v->buffer, "%lld", (long long)number);
    v->text = v->buffer;
    v->number = (double)number;
    v->from = from;
}

static inline void compute(value *v, int64_t number) { set_number(v, number, COMPUTED); }

/* Returns the id of the option whose name is the first `length` characters of `name`; N_OPTIONS if
   there is no such option. */
static inline int find_option(const char *name, size_t length) {
    for (int i = 0; i < N_OPTIONS; i++)
        if (is_option(i) && strlen(table[i].name) == length &&
            strncmp(table[i].name, name, length) == 0)
            return i;
    return N_OPTIONS;
}

static inline void set_defaults(value *v) {
    for (int i = 0; i < N_OPTIONS; i++)
        if (table[i].default_text) set(&v[i], i, table[i].default_text, DEFAULT);
}

/* Sets the options that the command line gives. */
static inline void parse_options(value *v, int argc, char **argv) {
    char seen[N_OPTIONS] = { 0 };
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) != 0 || !argv[i][2])
            refuse("'%s' is not an option: options begin with --, and --help lists them", argv[i]);
        const char *name = argv[i] + 2, *text = strchr(name, '=');
        size_t length = text ? (size_t)(text - name) : strlen(name);
        int id = find_option(name, length), no = 0;
        if (id == N_OPTIONS && strncmp(name, "no-", 3) == 0 && !text) {
            id = find_option(name + 3, length - 3);
            no = id < N_OPTIONS && table[id].kind == SWITCH;
            if (!no) id = N_OPTIONS;
        }
        if (id == N_OPTIONS) {
            char typed[64];
            snprintf(typed, sizeof typed, "%.*s", (int)(length < 63 ? length : 63), name);
            refuse_unknown(typed);
        }
        if (text && table[id].kind == FLAG) refuse("--%s takes no value", table[id].name);
        if (text)
            text++;
        else if (no)
            text = "off";
        else if (table[id].kind == FLAG)
            text = "on";
        else if (i + 1 == argc || strncmp(argv[i + 1], "--", 2) == 0)
            refuse("--%s needs a value %s", table[id].name, table[id].arg);
        else
            text = argv[++i];
        int is_path =
            strncmp(table[id].arg, "FILE", 4) == 0 || strncmp(table[id].arg, "DIR", 3) == 0;
        if (is_path && seen[id]++)
            refuse("--%s %s: it was given before, %s", table[id].name, text, v[id].text);
        set(&v[id], id, text, GIVEN);
    }
}

// ==== Restarts ==================================================================================

/* get_flag and set_flag access an integer that threads, forked ranks and signal handlers share.
   shared_flags allocates n of these integers, all 0. */
static inline int get_flag(const int *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
static inline void set_flag(int *at, int to) { __atomic_store_n(at, to, __ATOMIC_RELAXED); }

static inline int *shared_flags(int n) {
    void *flags = mmap(
        NULL, (size_t)n * sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (flags == MAP_FAILED) _exit(2);
    return (int *)flags;
}

/* Returns 1 if a restart from the newest checkpoint may get past this failure: a lost rank, or a
   file error. Wrong arguments and numbers would come back. So would a file error before the first
   step, for example of a folder that cannot be opened. */
static inline int restart_may_help(const dt_report *report, int made_step) {
    switch (report->status) {
    case DT_ERR_ARG:
    case DT_ERR_SHAPE:
    case DT_ERR_UNSUPPORTED:
    case DT_ERR_NUMERIC: return 0;
    case DT_ERR_IO: return made_step;
    default: return 1;
    }
}

#endif /* OPTIONS_H */
