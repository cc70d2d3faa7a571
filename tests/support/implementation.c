/* implementation.c - the implementation as two objects, which the programs of the Makefile share:
   compiled into each of them it would be nearly all of what a build takes Public domain or MIT, at
   your choice; see LICENSE.

   With -DKERNELS: dt_kernels_cpu and the kernels in its table, nothing else. Without: all the rest
   of all headers. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#ifdef KERNELS
#define DT_STATIC /* what the kernels call is in their object once more, seen by nobody */
#define dt_kernels_cpu dt__kernels_cpu_here
#include "dt_tensor.h"
#undef dt_kernels_cpu
const dt_kernels *dt_kernels_cpu(void);
const dt_kernels *dt_kernels_cpu(void) { return dt__kernels_cpu_here(); }
#else
#define DT__TENSOR_TABLE /* that section is there already, dt_tensor.h thinks */
#include "dt_zero.h"
#endif
