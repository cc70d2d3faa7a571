/* fake_cuda.h - the switches of fake_cuda.c, which stands in for the CUDA runtime, cuBLASLt and
   NCCL on a CPU

   A program is compiled with the toolkit's headers and linked with fake_cuda.c instead of -lcudart
   -lcublasLt -lnccl. Devices are memory of this process, kernels run through cuda_on_cpu.h
   (compiled with -DDTC_QUEUED), ranks are threads. What is given to a stream runs LATE, and streams
   advance in an order drawn from a seed: whatever CUDA allows. So a forgotten event, a host that
   reads without waiting, or collectives in another order on another rank give wrong numbers or a
   text here, as they would on a GPU some day.

   From the environment: FAKE_CUDA_DEVICES (1), FAKE_CUDA_SEED (1), FAKE_CUDA_ORDER (random, lazy or
   eager), FAKE_CUDA_GUARD (0). */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* RANDOM: any operation that may run does so inside any call. LAZY: nothing runs before somebody
   waits, and then only what is waited for. EAGER: all that can run has run when a call returns. */
enum { FAKE_CUDA_RANDOM, FAKE_CUDA_LAZY, FAKE_CUDA_EAGER };

/* All objects, memory, errors and settings as in a new process. No other thread may be in a
   call. */
void fake_cuda_reset(void);
/* 0: a machine without a GPU; -1: without a driver */
void fake_cuda_devices(int n);
void fake_cuda_memory(size_t bytes); /* of each device; 0: 8 GiB */
void fake_cuda_seed(unsigned long long seed);
void fake_cuda_order(int order);
void fake_cuda_forbid_default_stream(int on); /* its use is a mistake and an error */
void fake_cuda_no_peers(int on);              /* no device has access to another's memory */
/* a host that touches device memory made from now on is killed */
void fake_cuda_guard(int on);
/* a wait in which nothing happens for so long fails (20) */
void fake_cuda_wait_limit(double seconds);

/* The first mistake since the last clear, or NULL; unread ones are printed at exit. */
const char *fake_cuda_error(void);
void fake_cuda_clear_error(void);

/* What was made and not given back: allocations, streams, events, cuBLASLt handles, communicators.
   If `print`, one line each to stderr. */
int fake_cuda_leaks(int print);

/* For cuda_on_cpu.h: a kernel as a closure. drop frees it, whether it ran or not. */
void fake_cuda_launch(cudaStream_t stream, void (*run)(void *), void *arg, void (*drop)(void *));
/* Before a launch: addresses among the argument's bytes must be memory that a kernel of the current
   device reaches. */
void fake_cuda_check_argument(const char *kernel, const void *argument, size_t bytes);
/* Inside run: the device has failed for good. Elsewhere: the launch was refused, cudaGetLastError
   tells. */
void fake_cuda_launch_failed(cudaError_t error, const char *text);

void fake_cublas_no_algorithm(int on); /* the heuristic finds nothing */
const char *fake_cublas_refusal(void); /* why cuBLASLt last refused something */

/* The operation that device starts after `after` more fails: its communicator answers `error`, an
   ncclResult_t, to ncclCommGetAsyncError, its stream and its peers hang. */
void fake_nccl_fail(int device, int after, int error);
/* A device runs one communicator's operation at a time, in the order of the calls, as a full GPU
   does: ranks that call their communicators in different orders hang. */
void fake_nccl_one_at_a_time(int on);
/* What does not block takes so long, as with real communicators, which connect to each other. */
void fake_nccl_slow(double seconds);

#ifdef __cplusplus
}
#endif
#endif
