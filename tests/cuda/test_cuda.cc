// test_cuda.cc - compares every kernel of dt_kernels.cu with the CPU's kernel of the same name
//
// g++ -std=c++17 -O1 -g -Wall -Wextra -fsanitize=address,undefined -I. tests/cuda/test_cuda.cc -o test_cuda
//
//     test_cuda            all cases
//     test_cuda attention  only products and attention
//     test_cuda others     only the other kernels

#include "tests/cuda/attention_cases.h"
#include "tests/cuda/kernel_cases.h"

int main(int argc, char **argv) {
    const char *part = argc > 1 ? argv[1] : "";
    if (strcmp(part, "attention") != 0) test_other_kernels();
    if (strcmp(part, "others") != 0) test_products_and_attention();
    return check_done("test_cuda");
}
