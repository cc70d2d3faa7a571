/* test_matrix_gpu.c - test_matrix.c on emulated GPUs */
#define ON_DEVICES
#include "test_matrix.c"
