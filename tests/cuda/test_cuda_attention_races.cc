// test_cuda_attention_races.cc - are products and attention of dt_kernels.cu free of races?
//
// Runs the cases of test_cuda_attention.cc under the race detector, which test_cuda_races.cc tests.

#define CUDA_ORDERS 1
#define main test_cases
#include "tests/cuda/test_cuda_attention.cc"
#undef main

int main() {
    test_cases();
    return check_done("test_cuda_attention_races");
}
