/* fake_cuda.h - the controls of fake_cuda.c, which replaces the CUDA runtime, cuBLASLt and NCCL on
   a CPU A program is compiled with the toolkit's headers and linked with fake_cuda.c instead of
   -lcudart -lcublasLt -lnccl. Devices are memory of this process, kernels run through cuda_on_cpu.h
   (compiled with -DDTC_QUEUED), ranks are threads. Work in a stream runs LATE, and streams advance
   in an order drawn from a seed, within what CUDA allows. So a forgotten event, a host that reads
   without waiting, or a different order of collectives on another rank gives wrong results or an
   error text here, as it would sooner or later on a GPU. From the environment: FAKE_CUDA_DEVICES
   (1), FAKE_CUDA_SEED (1), FAKE_CUDA_ORDER (random, lazy or eager), FAKE_CUDA_GUARD (0). */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* RANDOM: any ready operation may run inside any call. LAZY: nothing runs before a wait, and then
   only the operations that the wait needs. EAGER: all ready operations have run when a call
   returns. */
enum { FAKE_CUDA_RANDOM, FAKE_CUDA_LAZY, FAKE_CUDA_EAGER };

/* Resets all objects, memory, errors and settings to those of a new process. No other thread may be
   in a call. */
void fake_cuda_reset(void);
/* 0: a machine without a GPU; -1: without a driver */
void fake_cuda_devices(int n);
void fake_cuda_memory(size_t bytes); /* of each device; 0: 8 GiB */
void fake_cuda_seed(unsigned long long seed);
void fake_cuda_order(int order);
void fake_cuda_forbid_default_stream(int on); /* any use of the default stream is an error */
void fake_cuda_no_peers(int on);              /* devices cannot access each other's memory */
/* from now on, the host is killed if it touches newly allocated device memory */
void fake_cuda_guard(int on);
/* a wait without any progress for this time fails; default 20 s */
void fake_cuda_wait_limit(double seconds);

/* The first mistake since the last clear, or NULL. A mistake that was not read is printed at
   exit. */
const char *fake_cuda_error(void);
void fake_cuda_clear_error(void);

/* Number of objects that were not freed: allocations, streams, events, cuBLASLt handles,
   communicators. If `print`, writes one line for each to stderr. */
int fake_cuda_leaks(int print);

/* For cuda_on_cpu.h: launches a kernel as a closure. drop frees it, whether it ran or not. */
void fake_cuda_launch(cudaStream_t stream, void (*run)(void *), void *arg, void (*drop)(void *));
/* Before a launch: checks that addresses among the argument's bytes are memory that a kernel on the
   current device can access. */
void fake_cuda_check_argument(const char *kernel, const void *argument, size_t bytes);
/* Inside run: the device has failed permanently. Elsewhere: the launch was refused,
   cudaGetLastError tells. */
void fake_cuda_launch_failed(cudaError_t error, const char *text);

void fake_cublas_no_algorithm(int on); /* the heuristic finds nothing */
const char *fake_cublas_refusal(void); /* why cuBLASLt last refused a call */

/* Plants a failure in the operation that the device starts after `after` more operations:
   ncclCommGetAsyncError on its communicator gives `error`, an ncclResult_t, and its stream and its
   peers hang. */
void fake_nccl_fail(int device, int after, int error);
/* A device runs one communicator's operation at a time, in the order of the calls, as a full GPU
   does: ranks that call their communicators in different orders hang. */
void fake_nccl_one_at_a_time(int on);
/* Non-blocking calls take this long, like the connection setup of real communicators. */
void fake_nccl_slow(double seconds);

#ifdef __cplusplus
}
#endif
#endif
