/* late_cpu.h - kernels that the CUDA table lacks: the CPU's, run by a device's stream, late */
#ifndef LATE_CPU_H
#define LATE_CPU_H
static int late_all;
#define LATE(k) \
    static void late_run_##k(void *arg) { dt_kernels_cpu()->k((const dt_##k##_args *)arg, NULL); } \
    static dt_status late_##k(const dt_##k##_args *a, void *stream) { \
        dt_status s = dt_kernels_cuda()->k && !late_all ? dt_kernels_cuda()->k(a, stream) : DT_ERR_UNSUPPORTED; \
        if (s != DT_ERR_UNSUPPORTED) return s; \
        fake_cuda_check_argument(#k, a, sizeof *a); \
        dt_##k##_args *copy = (dt_##k##_args *)malloc(sizeof *copy); \
        *copy = *a; \
        fake_cuda_launch((cudaStream_t)dt_cuda_stream(stream), late_run_##k, copy, free); \
        return DT_OK; \
    }
DT_KERNELS(LATE)
static dt_status late_reduce_(const dt_reduce_args *a, void *stream) {
    dt_status s = late_all ? DT_ERR_UNSUPPORTED : dt_kernels_cuda()->reduce(a, stream);
    if (s != DT_ERR_UNSUPPORTED) return s;
    dt_reduce_args *copy = (dt_reduce_args *)malloc(sizeof *copy + (size_t)(a->n + a->n_also) * sizeof(void *));
    void          **in = (void **)(copy + 1);
    *copy = *a;
    memcpy(in, a->in, (size_t)a->n * sizeof *in);
    if (a->n_also) memcpy(in + a->n, a->also, (size_t)a->n_also * sizeof *in);
    copy->in = (const void *const *)in;
    copy->also = in + a->n;
    fake_cuda_launch((cudaStream_t)dt_cuda_stream(stream), late_run_reduce, copy, free);
    return DT_OK;
}
static const dt_kernels *late_table(void) {
    static dt_kernels t;
    if (t.name) return &t;
    t = *dt_kernels_cuda();
    late_all = getenv("LATE_ALL") != NULL;
#define LATE_ENTRY(k) t.k = late_##k;
    DT_KERNELS(LATE_ENTRY)
    t.work_bytes = 1 << 16;
    t.reduce = late_reduce_;
    return &t;
}
#endif
