/* test_matrix_gpu.c - test_matrix.c on emulated GPUs */
#define ON_DEVICES 1
#include "test_matrix.c"
