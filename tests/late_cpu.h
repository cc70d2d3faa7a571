/* late_cpu.h - kernels that the CUDA table lacks: the CPU's, run by a device's stream, late */
#ifndef LATE_CPU_H
#define LATE_CPU_H
static int late_all;
#define LATE(k) \
    static void late_run_##k(void *arg) { dt_kernels_cpu()->k((const dt_##k##_args *)arg, NULL); } \
    static dt_status late_##k(const dt_##k##_args *a, void *stream) { \
        dt_status s = dt_kernels_cuda()->k && !late_all ? dt_kernels_cuda()->k(a, stream) : DT_ERR_UNSUPPORTED; \
        if (s != DT_ERR_UNSUPPORTED) return s; \
        dt_##k##_args *copy = (dt_##k##_args *)malloc(sizeof *copy); \
        *copy = *a; \
        fake_cuda_launch((cudaStream_t)dt_cuda_stream(stream), late_run_##k, copy, free); \
        return DT_OK; \
    }
DT_KERNELS(LATE)
static const dt_kernels *late_table(void) {
    static dt_kernels t;
    if (t.name) return &t;
    t = *dt_kernels_cuda();
    late_all = getenv("LATE_ALL") != NULL;
#define LATE_ENTRY(k) t.k = late_##k;
    DT_KERNELS(LATE_ENTRY)
    t.work_bytes = 1 << 16;
    t.reduce = dt_kernels_cuda()->reduce;
    return &t;
}
#endif
