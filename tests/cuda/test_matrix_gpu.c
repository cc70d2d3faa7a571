/* test_matrix_gpu.c - the cases of test_matrix.c on emulated GPUs

   Models are trained by dt_kernels.cu in all layouts on 1 to 8 devices of fake_cuda.c, whose
   streams run late and in an order drawn from a seed, and compared with one rank on the CPU. A case
   fails if the host reads without waiting, passes memory to a kernel or reuses it too early, or if
   a kernel touches another device's memory without access. Ranks are threads that share the
   devices. In every fifth case each rank has its own device and uses NCCL (at most 12 ranks), and
   in every fifth ranks connect over sockets. In every tenth run the host is killed if it touches a
   device's memory.

   The cases are those of the CPU, in f32 instead of f64, with two differences: nothing is forked,
   because forks cannot use a device; and NCCL has its own order of summation, so each run that must
   be equal bit for bit elsewhere is compared with one rank instead.

       test_matrix_gpu [--cases N] [--seed S]   N cases, spread evenly over the CPU's list; 1000:
                                                all, about 15 minutes
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
