/* test_matrix_gpu.c - the cases of test_matrix.c on emulated GPUs

   Models and layouts are trained by dt_kernels.cu on 1 to 8 devices of fake_cuda.c, whose streams
   run late and in an order drawn from a seed, and compared with one rank on the CPU: what the host
   reads without waiting, hands to a kernel or reuses too early, and kernels that touch another
   device's memory without access, make a case fail. Ranks are threads that share the devices; in
   every fifth case each has a device of its own and NCCL (at most 12 ranks), and in every fifth
   they meet over sockets. In every tenth run the host is killed if it touches a device's memory.

   The cases are the CPU's, in f32 where it has f64. What differs: nothing is forked, because forks
   cannot use a device; and of NCCL, whose sums have an order of their own, runs that are equal bit
   for bit elsewhere are each compared with one rank.

       test_matrix_gpu [--cases N] [--seed S]   N of them, spread evenly over the CPU's list; 1000:
                                                all, some 15 minutes
       test_matrix_gpu --case 'devices=2,...'   one case */
#if defined(__has_include)
#if __has_include(<cublasLt.h>) && __has_include(<nccl.h>)
#define ON_DEVICES 1
#include "tests/programs/test_matrix.c"
#endif
#endif

#ifndef ON_DEVICES
#include "tests/support/check.h"
int main(void) {
    check_skip("test_matrix_gpu: the headers of CUDA and NCCL are not here");
    return check_done("test_matrix_gpu");
}
#endif
