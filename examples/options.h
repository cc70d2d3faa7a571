/* options.h - parts of a command line that train_gpt.c and train_ctr.c share - public domain or MIT,
   at your choice */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

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

#endif /* OPTIONS_H */
