/* cuda_on_gpu.h - the parts of cuda_on_cpu.h that a test needs when its kernels run on a GPU

   With -DCUDA_ON_GPU the cases of cuda_cases.h are compiled by the host's compiler and linked with
   dt_kernels.o and the CUDA runtime; kernels and host share pinned memory. Linked with fake_cuda.c
   instead they run without a GPU, which tests that the host waits before it reads.

       make CUDA=1 ARCH=90a B=build-gpu build-gpu/test_cuda_on_gpu        for a GPU
       make build/test_cuda_on_gpu                                       for fake_cuda.c */

#ifndef CUDA_ON_GPU_H
#define CUDA_ON_GPU_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

__attribute__((format(printf, 1, 2))) inline std::string dtc_text(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}

// The order on a GPU cannot be set, so a case simply runs as often as it has orders elsewhere.
enum dtc_order { DTC_FORWARD, DTC_REVERSE, DTC_PERMUTED };
inline void dtc_set_order(int, unsigned) {}

// Waits for all launches. Returns the error of a refused launch or a failed kernel, or NULL.
inline const char *dtc_error() {
    cudaError_t waited = cudaDeviceSynchronize(), launched = cudaGetLastError();
    cudaError_t error = waited != cudaSuccess ? waited : launched;
    return error == cudaSuccess ? NULL : cudaGetErrorName(error);
}

// A refused launch leaves no state; after a failed kernel no CUDA call of this process works any
// more.
inline void dtc_clear_error() {
    if (cudaDeviceSynchronize() == cudaSuccess) return;
    printf("the device is lost: later cases were not run\n");
    exit(1);
}

// Pinned memory in blocks of powers of two. Allocating it is slow, so it is never returned to the
// driver.
struct dtc_memory {
    enum { SMALLEST = 6, CHUNK = 64 << 20 };
    std::vector<void *> spare[48]; // free blocks by log2 of their size
    std::map<void *, int> power;   // log2 of the size of blocks in use
    char *next = NULL, *end = NULL;

    int get(void **p, size_t bytes) {
        int k = SMALLEST;
        while ((size_t)1 << k < bytes) k++;
        size_t size = (size_t)1 << k;
        if (spare[k].empty() && (size_t)(end - next) < size) {
            size_t chunk = size > CHUNK ? size : (size_t)CHUNK;
            void *fresh = NULL;
            if (cudaHostAlloc(&fresh, chunk, cudaHostAllocPortable | cudaHostAllocMapped) !=
                cudaSuccess) {
                printf("no %zu bytes of pinned memory: %s\n", chunk,
                    cudaGetErrorName(cudaGetLastError()));
                return 1;
            }
            next = (char *)fresh, end = next + chunk;
        }
        if (spare[k].empty()) {
            *p = next;
            next += size;
        } else {
            *p = spare[k].back();
            spare[k].pop_back();
        }
        power[*p] = k;
        return 0;
    }

    void give(void *p) {
        auto at = power.find(p);
        spare[at->second].push_back(p);
        power.erase(at);
    }
};
inline dtc_memory dtc_pinned;

#endif
