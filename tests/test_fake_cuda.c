/* test_fake_cuda.c - that fake_cuda.c finds what it is for: forgotten events and waits, wrong orders, wrong handles

   A program that is right must be right in every order; one with a planted mistake must give a wrong number for some
   seed, an error or a text. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "check.h"
#if defined(__has_include) && __has_include(<cublasLt.h>) && __has_include(<nccl.h>)
#include "fake_cuda.c"

enum { SEEDS = 200, N = 100 };

static int said(const char *part) {
    const char *text = fake_cuda_error();
    return text && strstr(text, part) != NULL;
}

/* A new machine; what the last part of the test left must be nothing. */
static void machine(int devices) {
    CHECK_MSG(!fake_cuda_error(), "%s", fake_cuda_error());
    CHECK(fake_cuda_leaks(1) == 0);
    fake_cuda_reset();
    fake_cuda_devices(devices);
}

/* The mistake that was expected is over. */
static void machine_after(const char *part, int devices) {
    CHECK_MSG(said(part), "not found: %s; %s", part, fake_cuda_error() ? fake_cuda_error() : "nothing");
    fake_cuda_reset();
    fake_cuda_devices(devices);
}

static float *device_floats(size_t n) {
    void *p = NULL;
    CHECK(cudaMalloc(&p, n * sizeof(float)) == cudaSuccess);
    return (float *)p;
}

static cudaStream_t new_stream(void) {
    cudaStream_t s = NULL;
    CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
    return s;
}

static cudaEvent_t new_event(void) {
    cudaEvent_t e = NULL;
    CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess);
    return e;
}

/* A kernel: y = x + 1. */
typedef struct increment { const float *x; float *y; } increment;
static void increment_run(void *arg) {
    const increment *k = (const increment *)arg;
    for (int i = 0; i < N; i++) k->y[i] = k->x[i] + 1;
}
static void launch_increment(cudaStream_t s, const float *x, float *y) {
    increment *k = (increment *)malloc(sizeof *k);
    *k = (increment){x, y};
    fake_cuda_launch(s, increment_run, k, free);
}

// ==== Streams =======================================================================================================

/* One stream fills x, the other reads it; without the event some order must show it. Returns what came out. */
static float two_streams(unsigned seed, int order, int with_event) {
    fake_cuda_reset();
    fake_cuda_seed(seed);
    fake_cuda_order(order);
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t  filled = new_event();
    float       *x = device_floats(N), *y = device_floats(N), *z = device_floats(N), out[N];
    cudaMemsetAsync(x, 0, N * sizeof *x, a);
    launch_increment(a, x, y);
    cudaEventRecord(filled, a);
    if (with_event) cudaStreamWaitEvent(b, filled, 0);
    launch_increment(b, y, z);
    CHECK(cudaMemcpyAsync(out, z, sizeof out, cudaMemcpyDeviceToHost, b) == cudaSuccess);
    cudaFree(x), cudaFree(y), cudaFree(z);
    cudaEventDestroy(filled);
    cudaStreamDestroy(a), cudaStreamDestroy(b);
    CHECK(!fake_cuda_error());
    CHECK(fake_cuda_leaks(1) == 0);
    return out[N - 1];
}

static void test_events(void) {
    int right = 0, wrong = 0;
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        right += two_streams(seed, FAKE_CUDA_RANDOM, 1) == 2;
        wrong += two_streams(seed, FAKE_CUDA_RANDOM, 0) != 2;
    }
    CHECK_MSG(right == SEEDS, "right with the event for %d seeds of %d", right, SEEDS);
    CHECK_MSG(wrong >= SEEDS / 10 && wrong <= SEEDS * 9 / 10, "wrong without it for %d seeds", wrong);
    CHECK(two_streams(1, FAKE_CUDA_LAZY, 1) == 2);
    CHECK(two_streams(1, FAKE_CUDA_LAZY, 0) != 2);
    CHECK(two_streams(1, FAKE_CUDA_EAGER, 1) == 2);
}

/* A wait is for the record that was the latest when it was asked for. */
static void test_records(void) {
    fake_cuda_reset();
    fake_cuda_order(FAKE_CUDA_LAZY);
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t  e = new_event();
    float       *x = device_floats(N), *y = device_floats(N), out[N];
    cudaMemsetAsync(x, 0, N * sizeof *x, a);
    CHECK(cudaEventQuery(e) == cudaSuccess && cudaEventSynchronize(e) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(b, e, 0) == cudaSuccess); /* never recorded: no wait */
    launch_increment(b, x, y);
    cudaMemcpyAsync(out, y, sizeof out, cudaMemcpyDefault, b);
    CHECK(out[0] != 1);
    cudaEventRecord(e, a);
    cudaStreamWaitEvent(b, e, 0);
    launch_increment(a, x, x);
    cudaEventRecord(e, a);
    launch_increment(b, x, y);
    cudaMemcpyAsync(out, y, sizeof out, cudaMemcpyDefault, b);
    CHECK(out[0] == 1); /* the second record is not waited for */
    CHECK(cudaEventQuery(e) == cudaErrorNotReady || cudaEventQuery(e) == cudaSuccess);
    CHECK(cudaGetLastError() == cudaErrorNotReady || cudaGetLastError() == cudaSuccess);
    CHECK(cudaEventSynchronize(e) == cudaSuccess && cudaStreamQuery(a) == cudaSuccess);
    cudaEventDestroy(e);
    cudaFree(x), cudaFree(y);
    cudaStreamDestroy(a), cudaStreamDestroy(b);
    machine(1);
}

static void test_default_stream(void) {
    int wrong = 0;
    for (unsigned seed = 0; seed < SEEDS; seed++) { /* it orders the blocking streams around it, not the others */
        fake_cuda_reset();
        fake_cuda_seed(seed);
        cudaStream_t blocking, other = new_stream();
        cudaStreamCreate(&blocking);
        float *x = device_floats(N), *y = device_floats(N), *z = device_floats(N), *w = device_floats(N), out[N],
              free_out[N];
        cudaMemsetAsync(x, 0, N * sizeof *x, blocking);
        launch_increment(NULL, x, y);
        launch_increment(blocking, y, z);
        launch_increment(other, y, w);
        cudaMemcpyAsync(out, z, sizeof out, cudaMemcpyDefault, blocking);
        cudaMemcpyAsync(free_out, w, sizeof out, cudaMemcpyDefault, other);
        CHECK(out[0] == 2);
        wrong += free_out[0] != 2;
    }
    CHECK(wrong > 0);
    fake_cuda_reset();
    fake_cuda_forbid_default_stream(1);
    float *x = device_floats(N);
    CHECK(cudaMemsetAsync(x, 0, 4, NULL) == cudaErrorInvalidResourceHandle);
    machine_after("default stream", 1);
}

/* The host must wait before it reads, and must not free or change what a copy still needs. */
static void test_host(void) {
    int seen_old = 0;
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        fake_cuda_reset();
        fake_cuda_seed(seed);
        cudaStream_t s = new_stream();
        float       *x = device_floats(N), *pinned, pageable[N];
        CHECK(cudaMallocHost((void **)&pinned, N * sizeof *pinned) == cudaSuccess);
        for (int i = 0; i < N; i++) pageable[i] = 3;
        cudaMemcpyAsync(x, pageable, sizeof pageable, cudaMemcpyHostToDevice, s);
        for (int i = 0; i < N; i++) pageable[i] = 4; /* was read already */
        cudaMemcpyAsync(pinned, x, sizeof pageable, cudaMemcpyDeviceToHost, s);
        seen_old += pinned[0] != 3;
        CHECK(cudaStreamSynchronize(s) == cudaSuccess && pinned[N - 1] == 3);
        cudaMemcpyAsync(x, pinned, sizeof pageable, cudaMemcpyDefault, s);
        pinned[0] = 5; /* too early for some seeds */
        cudaMemcpyAsync(pageable, x, sizeof pageable, cudaMemcpyDefault, s);
        seen_old += pageable[0] == 5;
        CHECK(pageable[1] == 3);
        cudaFreeHost(pinned), cudaFree(x), cudaStreamDestroy(s);
    }
    CHECK_MSG(seen_old > SEEDS / 2, "%d", seen_old);
    machine(1);
    fake_cuda_order(FAKE_CUDA_LAZY);
    void *pinned;
    cudaHostAlloc(&pinned, 400, cudaHostAllocDefault);
    float *x = device_floats(N);
    cudaMemcpyAsync(pinned, x, 400, cudaMemcpyDefault, new_stream());
    cudaFreeHost(pinned);
    machine_after("cudaFreeHost of memory that a queued operation", 1);
}

static void test_memory(void) {
    cudaStream_t s = new_stream();
    float       *x = device_floats(N), host[N + 1];
    uint32_t     bits;
    size_t       available, total;
    struct cudaPointerAttributes a;
    CHECK(cudaMemcpy(host, x, 4, cudaMemcpyDefault) == cudaSuccess);
    memcpy(&bits, host, 4);
    CHECK(bits == 0xffffffff);
    CHECK(cudaPointerGetAttributes(&a, x + 5) == cudaSuccess && a.type == cudaMemoryTypeDevice && a.device == 0);
    CHECK(cudaPointerGetAttributes(&a, host) == cudaSuccess && a.type == cudaMemoryTypeUnregistered);
    CHECK(cudaHostRegister(host, sizeof host, 0) == cudaSuccess);
    CHECK(cudaPointerGetAttributes(&a, host + 1) == cudaSuccess && a.type == cudaMemoryTypeHost);
    CHECK(cudaHostRegister(host, 4, 0) == cudaErrorHostMemoryAlreadyRegistered && cudaGetLastError());
    CHECK(cudaHostUnregister(host) == cudaSuccess);
    CHECK(cudaMemcpyAsync(host, x, sizeof host, cudaMemcpyDefault, s) == cudaErrorInvalidValue && cudaGetLastError());
    CHECK(said("leaves its allocation"));
    fake_cuda_clear_error();
    CHECK(cudaMemcpyAsync(host, x, 4, cudaMemcpyHostToDevice, s) == cudaErrorInvalidValue && cudaGetLastError());
    CHECK(said("kind"));
    fake_cuda_clear_error();
    CHECK(cudaFree(x + 1) == cudaErrorInvalidValue && said("not what its allocation returned"));
    fake_cuda_clear_error();
    CHECK(cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess);
    fake_cuda_memory(1000);
    CHECK(cudaMemGetInfo(&available, &total) == cudaSuccess && available == 600 && total == 1000);
    void *p = &bits;
    CHECK(cudaMalloc(&p, 601) == cudaErrorMemoryAllocation && !p && cudaGetLastError());
    CHECK(fake_cuda_leaks(0) == 2);
    cudaFree(x), cudaStreamDestroy(s);
    machine(0);
    int count = 77;
    CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 77);
    CHECK(cudaMalloc(&p, 4) == cudaErrorNoDevice && cudaSetDevice(0) == cudaErrorNoDevice);
    machine(-1);
    CHECK(cudaGetDeviceCount(&count) == cudaErrorInsufficientDriver && count == 77);
    machine(1);
}

static void fail_run(void *arg) {
    (void)arg;
    fake_cuda_launch_failed(cudaErrorLaunchFailure, "a kernel's mistake");
}

/* A kernel's mistake stays with its device; streams must be of the current device for a launch. */
static void test_failures(void) {
    machine(2);
    cudaStream_t s = new_stream(), t;
    float       *x = device_floats(N), host[N] = {0};
    fake_cuda_order(FAKE_CUDA_LAZY);
    fake_cuda_launch(s, fail_run, NULL, NULL);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaStreamSynchronize(s) == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure && cudaGetLastError() == cudaErrorLaunchFailure);
    CHECK(cudaMemcpyAsync(host, x, 4, cudaMemcpyDefault, s) == cudaErrorLaunchFailure);
    CHECK(cudaSetDevice(1) == cudaSuccess && cudaGetLastError());
    t = new_stream();
    CHECK(cudaStreamSynchronize(t) == cudaSuccess);
    machine_after("a kernel's mistake", 2);
    s = new_stream();
    CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice && cudaGetLastError());
    CHECK(cudaSetDevice(1) == cudaSuccess);
    launch_increment(s, NULL, NULL);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    machine_after("launched on a stream of device 0 while device 1", 2);
    s = new_stream();
    cudaStreamDestroy(s);
    CHECK(cudaStreamSynchronize(s) == cudaErrorInvalidResourceHandle);
    machine_after("is not a stream", 1);
}

// ==== Matrix products ===============================================================================================

typedef struct shape { int m, n, k, transa, transb, batch, pad; } shape;
static const cudaDataType_t TYPES[3] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F};

static double plain_gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

/* One matrix on the host and the device, with numbers that its type holds. */
typedef struct matrix {
    cudaDataType_t type;
    int            rows, cols, ld, batch;
    size_t         bytes;
    char          *host, *at;
} matrix;

static uint64_t numbers = 1;
static matrix new_matrix(cudaDataType_t type, int rows, int cols, int ld, int batch) {
    matrix m = {type, rows, cols, ld, batch, (size_t)batch * (size_t)ld * (size_t)cols * number_bytes(type), NULL, NULL};
    m.host = (char *)malloc(m.bytes);
    for (size_t i = 0; i < m.bytes / number_bytes(type); i++)
        number_store(type, m.host, i, (float)((int)(mix(++numbers) % 65) - 32) / 32);
    CHECK(cudaMalloc((void **)&m.at, m.bytes) == cudaSuccess);
    CHECK(cudaMemcpy(m.at, m.host, m.bytes, cudaMemcpyDefault) == cudaSuccess);
    return m;
}
static double get(const matrix *m, int b, int row, int col) {
    return number_load(m->type, m->host, ((size_t)b * (size_t)m->cols + (size_t)col) * (size_t)m->ld + (size_t)row);
}
static void free_matrix(matrix *m) {
    free(m->host);
    cudaFree(m->at);
}
static void layout_of(cublasLtMatrixLayoutOpaque_t *l, const matrix *m) {
    int64_t stride = (int64_t)m->ld * m->cols;
    CHECK(!cublasLtMatrixLayoutInit(l, m->type, (uint64_t)m->rows, (uint64_t)m->cols, m->ld));
    CHECK(!cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &m->batch, sizeof m->batch));
    CHECK(!cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
}

static double tolerance(cudaDataType_t type, double x) {
    return (type == CUDA_R_32F ? 1e-5 : type == CUDA_R_16F ? 6e-4 : 4.1e-3) * (1 + fabs(x));
}

/* Every element against doubles. */
static int compare(const shape *s, const matrix *a, const matrix *b, const matrix *c, const matrix *d,
                   const matrix *bias, const matrix *aux_in, const matrix *aux, int epilogue) {
    int wrong = 0;
    for (int batch = 0; batch < s->batch; batch++) {
        double gradient[300] = {0};
        for (int row = 0; row < s->m; row++)
            for (int col = 0; col < s->n; col++) {
                double x = 0;
                for (int k = 0; k < s->k; k++)
                    x += (s->transa ? get(a, batch, k, row) : get(a, batch, row, k)) *
                         (s->transb ? get(b, batch, col, k) : get(b, batch, k, col));
                x = 1.5 * x + 0.5 * get(c, batch, row, col);
                if (epilogue & CUBLASLT_EPILOGUE_BIAS && epilogue < 64) x += get(bias, 0, row, 0);
                if (epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) x += get(bias, 0, row, 0);
                if ((epilogue & CUBLASLT_EPILOGUE_GELU_AUX) == CUBLASLT_EPILOGUE_GELU_AUX)
                    wrong += fabs(get(aux, batch, row, col) - x) > tolerance(d->type, x);
                if (epilogue & CUBLASLT_EPILOGUE_GELU) x = plain_gelu(x);
                if (epilogue & CUBLASLT_EPILOGUE_RELU && epilogue < 8) x = x > 0 ? x : 0;
                if ((epilogue & CUBLASLT_EPILOGUE_DGELU) == CUBLASLT_EPILOGUE_DGELU) {
                    double at = get(aux_in, batch, row, col);
                    x *= (plain_gelu(at + 1e-5) - plain_gelu(at - 1e-5)) / 2e-5;
                }
                gradient[row] += x;
                wrong += fabs(get(d, batch, row, col) - x) > tolerance(d->type, x);
            }
        if (epilogue & (256 | 512)) memset(gradient, 0, sizeof gradient);
        int of_b = epilogue & 512;
        for (int i = 0; epilogue & (256 | 512) && i < (of_b ? s->n : s->m); i++)
            for (int k = 0; k < s->k; k++)
                gradient[i] += of_b ? (s->transb ? get(b, batch, i, k) : get(b, batch, k, i))
                                    : (s->transa ? get(a, batch, k, i) : get(a, batch, i, k));
        for (int i = 0; epilogue & (16 | 256 | 512) && i < (of_b ? s->n : s->m); i++)
            wrong += fabs(get(bias, batch, i, 0) - gradient[i]) > 4 * tolerance(bias->type, gradient[i]);
    }
    return wrong;
}

static cublasLtHandle_t handle;

static cublasStatus_t product_of(const shape *s, cudaDataType_t in, cudaDataType_t out, int epilogue, int *wrong) {
    int    ta = s->transa, tb = s->transb, pad = s->pad, ld = s->m + pad, gradients = epilogue & (16 | 256 | 512);
    matrix a = new_matrix(in, ta ? s->k : s->m, ta ? s->m : s->k, (ta ? s->k : s->m) + pad, s->batch);
    matrix b = new_matrix(in, tb ? s->n : s->k, tb ? s->k : s->n, (tb ? s->n : s->k) + pad, s->batch);
    matrix c = new_matrix(out, s->m, s->n, ld, s->batch), d = new_matrix(out, s->m, s->n, ld + 1, s->batch);
    matrix aux = new_matrix(out, s->m, s->n, (s->m + 7) / 8 * 8, s->batch), aux_in = aux;
    matrix bias = new_matrix(out, s->m > s->n ? s->m : s->n, 1, s->m > s->n ? s->m : s->n, s->batch);
    aux_in.host = (char *)memcpy(malloc(aux.bytes), aux.host, aux.bytes);
    cublasLtMatmulDescOpaque_t   p;
    cublasLtMatrixLayoutOpaque_t la, lb, lc, ld_;
    cublasLtMatmulPreferenceOpaque_t wish;
    cublasLtMatmulHeuristicResult_t  best;
    int32_t  opa = ta ? CUBLAS_OP_T : CUBLAS_OP_N, opb = tb ? CUBLAS_OP_T : CUBLAS_OP_N, found;
    int64_t  aux_ld = aux.ld, aux_stride = (int64_t)aux.ld * aux.cols, bias_stride = gradients ? bias.ld : 0;
    uint64_t room = 4096;
    float    alpha = 1.5f, beta = 0.5f;
    void    *workspace;
    CHECK(!cublasLtMatmulDescInit(&p, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_TRANSA, &opa, sizeof opa));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_TRANSB, &opb, sizeof opb));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.at, sizeof bias.at));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, &bias_stride, 8));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux.at, sizeof aux.at));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_ld, sizeof aux_ld));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, &aux_stride, 8));
    layout_of(&la, &a), layout_of(&lb, &b), layout_of(&lc, &c), layout_of(&ld_, &d);
    CHECK(!cublasLtMatmulPreferenceInit(&wish));
    CHECK(!cublasLtMatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room));
    cudaMalloc(&workspace, room);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &p, &la, &lb, &lc, &ld_, &wish, 1, &best, &found);
    cudaStream_t   stream = new_stream();
    if (!status) {
        CHECK(found == 1);
        status = cublasLtMatmul(handle, &p, &alpha, a.at, &la, b.at, &lb, &beta, c.at, &lc, d.at, &ld_, &best.algo,
                                workspace, best.workspaceSize, stream);
    }
    if (!status) {
        cudaMemcpyAsync(d.host, d.at, d.bytes, cudaMemcpyDefault, stream);
        cudaMemcpyAsync(aux.host, aux.at, aux.bytes, cudaMemcpyDefault, stream);
        cudaMemcpyAsync(bias.host, bias.at, bias.bytes, cudaMemcpyDefault, stream);
        *wrong = compare(s, &a, &b, &c, &d, &bias, &aux_in, &aux, epilogue);
    }
    free(aux_in.host);
    free_matrix(&a), free_matrix(&b), free_matrix(&c), free_matrix(&d), free_matrix(&aux), free_matrix(&bias);
    cudaFree(workspace);
    cudaStreamDestroy(stream);
    return status;
}

static void test_products(void) {
    static const int EPILOGUES[] = {
        CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU_BIAS,
        CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA, CUBLASLT_EPILOGUE_BGRADB};
    enum { KINDS = sizeof EPILOGUES / sizeof *EPILOGUES };
    static const shape SHAPES[] = {{1, 1, 1, 0, 0, 1, 0}, {17, 5, 9, 0, 0, 1, 3}, {33, 18, 7, 1, 0, 2, 1},
                                   {16, 31, 20, 0, 1, 3, 0}, {47, 3, 65, 1, 1, 1, 2}};
    machine(1);
    CHECK(!cublasLtCreate(&handle));
    for (size_t s = 0; s < sizeof SHAPES / sizeof *SHAPES; s++)
        for (int type = 0; type < 5; type++)
            for (int e = 0; e < KINDS; e++) {
                int            wrong = -1;
                cudaDataType_t in = TYPES[type % 3 + type / 3], out = type < 3 ? in : CUDA_R_32F;
                cublasStatus_t status = product_of(&SHAPES[s], in, out, EPILOGUES[e], &wrong);
                CHECK_MSG(!status && wrong == 0, "shape %zu, types %d %d, epilogue %d: status %d, %d wrong", s, in, out,
                          EPILOGUES[e], status, wrong);
            }
    int wrong;
    fake_cublas_no_algorithm(1);
    CHECK(product_of(&SHAPES[1], CUDA_R_32F, CUDA_R_32F, 1, &wrong) == CUBLAS_STATUS_NOT_SUPPORTED);
    fake_cublas_no_algorithm(0);
    CHECK(product_of(&SHAPES[1], CUDA_R_32F, CUDA_R_16F, 1, &wrong) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(product_of(&SHAPES[1], CUDA_R_8I, CUDA_R_8I, 1, &wrong) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(product_of(&SHAPES[1], CUDA_R_32F, CUDA_R_32F, CUBLASLT_EPILOGUE_DRELU, &wrong) != CUBLAS_STATUS_SUCCESS);
    CHECK(!cublasLtDestroy(handle));
    CHECK(!fake_cuda_error());
}

/* Each call is right but for one thing; the text tells which. */
static void test_refusals(void) {
    for (int wrong = 0; wrong < 8; wrong++) {
        machine(2);
        cublasLtMatmulDescOpaque_t       p;
        cublasLtMatrixLayoutOpaque_t     a, b, d;
        cublasLtMatmulPreferenceOpaque_t wish;
        cublasLtMatmulHeuristicResult_t  best;
        int                              found;
        float                            one = 1, zero = 0, *x = device_floats(1024);
        static _Alignas(256) float       host[64];
        uint64_t                         room = 64;
        cudaStream_t                     s = new_stream();
        CHECK(!cublasLtCreate(&handle));
        cublasLtMatmulDescInit(&p, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        cublasLtMatrixLayoutInit(&a, CUDA_R_32F, 8, 4, 8);
        cublasLtMatrixLayoutInit(&b, CUDA_R_32F, 4, 8, 4);
        cublasLtMatrixLayoutInit(&d, CUDA_R_32F, 8, 8, 8);
        cublasLtMatmulPreferenceInit(&wish);
        cublasLtMatmulPreferenceSetAttribute(&wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
        CHECK(!cublasLtMatmulAlgoGetHeuristic(handle, &p, &a, &b, &d, &d, &wish, 1, &best, &found) && found);
        if (wrong == 1) cublasLtMatrixLayoutInit(&b, CUDA_R_32F, 5, 8, 5);
        if (wrong == 2) cublasLtMatrixLayoutInit(&a, CUDA_R_32F, 8, 4, 7);
        if (wrong == 3) cublasLtMatrixLayoutInit(&b, CUDA_R_32F, 4, 7, 4), cublasLtMatrixLayoutInit(&d, CUDA_R_32F, 8, 7, 8);
        if (wrong == 7) cudaSetDevice(1);
        cublasStatus_t status =
            cublasLtMatmul(handle, &p, &one, wrong == 4 ? x + 4 : wrong == 6 ? host : x, &a, x + 64, &b, &zero,
                           x + 512, &d, x + 512, &d, &best.algo, x + 256, wrong == 5 ? 63 : 64, s);
        static const char *const TEXTS[] = {NULL, "dimensions", "leading dimension", "another product", "aligned",
                                            "workspace", "A: ", "current device"};
        CHECK((status == CUBLAS_STATUS_SUCCESS) == (wrong == 0));
        cublasLtDestroy(handle);
        if (wrong) machine_after(TEXTS[wrong], 1);
        else {
            cudaStreamDestroy(s);
            cudaFree(x);
        }
    }
}

int main(void) {
    test_events();
    test_records();
    test_default_stream();
    test_host();
    test_memory();
    test_failures();
    test_products();
    test_refusals();
    fake_cuda_reset();
    return check_done("test_fake_cuda");
}

#else
int main(void) {
    check_skip("the emulated GPU: needs cublasLt.h and nccl.h");
    return check_done("test_fake_cuda");
}
#endif
