/* slowdown.c - prints by how much this machine slows a thread, for the limits of shell tests */
#define _GNU_SOURCE
#include "tests/support/jitter.h"

#include <stdio.h>

int main(void) { return printf("%.0f\n", slowdown()) < 0; }
