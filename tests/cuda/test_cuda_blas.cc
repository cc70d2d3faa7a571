// test_cuda_blas.cc - products of dt_kernels.cu through cuBLASLt, which fake_cuda.c replaces; and
// calls that CUDA refuses
//
// The cases are compared as in attention_cases.h. An activation is applied to the value as it
// is stored, so in 16 bits the result is rounded twice. With -DCUDA_ON_GPU the real library is
// used.

#include "tests/support/check.h"
#if defined(__has_include) && __has_include(<cublasLt.h>) && __has_include(<nccl.h>)
#ifndef CUDA_ON_GPU
#define DTC_QUEUED
#define DT_CUBLASLT
#endif
#include "tests/cuda/attention_cases.h"

#ifdef CUDA_ON_GPU // dt_kernels.o does not show its plans, and the real library cannot be told to refuse
#define INSIDE(...)
static const bool ON_GPU = true;
#else
#define INSIDE(...) __VA_ARGS__
static const bool ON_GPU = false;
static cuda_queue *queue() { return (cuda_queue *)the_queue; }

static size_t plans() {
    size_t n = 0;
    for (int i = 0; i < PLAN_SLOTS && queue()->blas; i++) n += queue()->blas->plans[i].used;
    return n;
}

static size_t working_plans() {
    size_t n = 0;
    for (int i = 0; i < PLAN_SLOTS && queue()->blas; i++)
        n += queue()->blas->plans[i].used && queue()->blas->plans[i].supported;
    return n;
}
#endif

static void open_queue() {
    char text[128] = "";
    dt_cuda_desc desc = { 0, NULL, 0 };
    the_queue = dt_cuda_open(desc, text, sizeof text);
    CHECK_MSG(the_queue, "%s", text);
}

static void close_queue() {
    dt_cuda_close(the_queue);
    the_queue = NULL;
    INSIDE(CHECK(fake_cuda_leaks(1) == 0);)
}

static void test_shapes() {
    static const int64_t sizes[][3] = { { 1, 1, 1 }, { 17, 33, 9 }, { 64, 48, 72 },
        { 3, 130, 16 } };
    open_queue();
    for (dt_dtype dtype : TYPES)
        for (const auto &s : sizes)
            for (int code = 0; code < 4 * 2 * 2 * 2; code++) {
                int odd = code & 4;
                product p = { dtype, s[0], s[1], s[2], 1 + code % 3, code & 3, odd ? ODD : ALIGNED,
                    odd ? 3 : 8, 0, 0, 0, 0, 0, code >> 3 & 1, code >> 4 };
                // NVIDIA's library rounds a product to 16 bits before it adds it to what is there
                // in 16 bits
                bool twice = ON_GPU && p.accumulate && !p.wide && dtype != DT_F32;
                compare_product(p, 1, twice ? step_of(dtype, 16) : 0);
            }
    INSIDE(CHECK(working_plans() > 100 && working_plans() == plans());)
    close_queue();
}

// All fusions: in the library, after it, or in the kernels of dt_kernels.cu; with row lengths that
// the library's GELU accepts, and with others.
static void test_fusions(bool gelu) {
    (void)gelu;
    open_queue();
    compare_product({ DT_F32, 1, 1, 1, 0, 0, ALIGNED, 0, 0, 0, 0, 0, 0, 0, 0 }, 1);
    INSIDE(queue()->blas->gelu = gelu;)
    for (dt_dtype dtype : TYPES)
        for (int act : { (int)DT_ACT_NONE, (int)DT_ACT_GELU, (int)DT_ACT_SILU })
            for (int code = 0; code < 256; code++) {
                product p = { dtype, 19, 24, 9, 2, 2, code & 1 ? FIRST_ODD : ALIGNED,
                    code & 2 ? 5 : 8, code >> 2 & 1, act, code >> 3 & 1, code >> 4 & 1,
                    code >> 5 & 1, code >> 6 & 1, code >> 7 & 1 };
                if (p.before && p.derivative) continue; // both would use the same array
                if (act == DT_ACT_NONE && code % 4 == 1) p.placement = ODD;
                compare_product(p, 1, dtype == DT_F32 ? 0 : step_of(dtype, 16));
            }
    close_queue();
}

// A repeated call finds its cached plan; evicted plans are made again.
static void test_plans() {
    open_queue();
    product p = { DT_F32, 5, 6, 7, 0, 0, ALIGNED, 0, 1, 0, 0, 0, 0, 0, 0 };
    compare_product(p, 1);
    INSIDE(CHECK(plans() == 1);)
    for (int i = 0; i < 3; i++) compare_product(p, 1);
    INSIDE(CHECK(plans() == 1);)
    for (int round = 0; round < 2; round++)
        for (p.m = 1; p.m <= 600; p.m++) compare_product(p, 1);
    INSIDE(CHECK(plans() > PLAN_SLOTS / 2 && plans() <= PLAN_SLOTS);)
    close_queue();
}

#ifndef CUDA_ON_GPU
// If the library has no algorithm, the kernels of dt_kernels.cu compute the product, and the
// library is not asked again.
static void test_refused() {
    fake_cublas_no_algorithm(1);
    open_queue();
    product p = { DT_BF16, 33, 40, 24, 0, 2, ALIGNED, 0, 1, DT_ACT_GELU, 1, 0, 1, 0, 0 };
    compare_product(p, 1);
    CHECK(plans() == 2 && working_plans() == 0); // with the library's GELU and without
    fake_cublas_no_algorithm(0);
    compare_product(p, 1);
    CHECK(plans() == 2 && working_plans() == 0);
    close_queue();
}

// A CUDA error is returned by the failing call; it leaves no state, and the next launch does not
// see it.
static void test_refused_calls() {
    const dt_kernels *t = dt_kernels_cuda();
    char text[128];
    float here = 0;
    auto seen = [] { return cudaGetLastError() != cudaSuccess || !fake_cuda_error(); };
    fake_cuda_devices(2);
    void *there = dt_cuda_open(
        { 1, NULL, 0 }, text, sizeof text); // an event of device 0 is not valid for this stream
    CHECK(dt_cuda_device(there) == 1 && dt_cuda_device(NULL) == 1);
    open_queue();
    CHECK(dt_cuda_device(the_queue) == 0 && dt_cuda_device(NULL) == 0);
    void *mark = t->event_record(the_queue, NULL);
    float *p = (float *)t->alloc(t->user, sizeof *p);
    CHECK(mark && p && !fake_cuda_error());
    CHECK(t->event_record(there, NULL) == NULL && !seen());
    CHECK(t->event_record(there, mark) == NULL && !seen());
    fake_cuda_clear_error();
    CHECK(t->move(p, &here, 1000, the_queue) == DT_ERR_DEVICE && !seen());
    fake_cuda_clear_error();
    t->free(t->user, &here, sizeof here);
    CHECK(!seen());
    fake_cuda_clear_error();
    dt_fill_args fill = { DT_F32, p, 1, 7 };
    CHECK(t->fill(&fill, the_queue) == DT_OK && t->move(&here, p, sizeof here, the_queue) == DT_OK);
    CHECK(t->event_record(the_queue, mark) == mark && t->sync(the_queue) == DT_OK && here == 7 &&
          t->event_query(mark) == 1);
    t->event_destroy(mark);
    t->free(t->user, p, sizeof *p);
    dt_cuda_close(there);
    close_queue();
    CHECK(!fake_cuda_error());
}
#endif

int main() {
    INSIDE(fake_cuda_reset();)
    INSIDE(fake_cuda_order(FAKE_CUDA_LAZY);)
    test_shapes();
    test_fusions(true);
    INSIDE(test_fusions(false);)
    test_plans();
    INSIDE(test_refused();)
    INSIDE(test_refused_calls();)
    return check_done("test_cuda_blas");
}
#else
int main() {
    check_skip("products through cuBLASLt: needs cublasLt.h and nccl.h");
    return check_done("test_cuda_blas");
}
#endif
