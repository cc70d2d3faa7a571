// test_cuda_attention_races.cc - are products and attention of dt_kernels.cu free of races?
//
// The cases of test_cuda_attention.cc again, under the detector that test_cuda_races.cc shows to
// work.

#define CUDA_ORDERS 1
#define main test_cases
#include "tests/cuda/test_cuda_attention.cc"
#undef main

int main() {
    test_cases();
    return check_done("test_cuda_attention_races");
}
