/* implementation.c - the implementation as two objects, which the programs of the Makefile share,
   because compiling it into each program would take most of the build time
   Public domain or MIT, at your choice; see LICENSE.

   With -DKERNELS: only dt_kernels_cpu and the kernels in its table. Without: the rest of all
   headers. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#ifdef KERNELS
#define DT_STATIC /* the kernels' helpers are in this object again, as static functions */
#define dt_kernels_cpu dt__kernels_cpu_here
#include "dt_tensor.h"
#undef dt_kernels_cpu
const dt_kernels *dt_kernels_cpu(void);
const dt_kernels *dt_kernels_cpu(void) { return dt__kernels_cpu_here(); }
#else
#define DT__TENSOR_TABLE /* makes dt_tensor.h leave out the section of the kernels */
#include "dt_zero.h"
#endif
