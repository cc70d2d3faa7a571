/* test_fake_cuda.c - fake_cuda.c detects the mistakes that it is made for: forgotten events and
   waits, wrong orders, wrong handles A correct program must give correct results in every order. A
   program with a planted mistake must give a wrong number for some seed, an error or a text. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "tests/support/check.h"
#if defined(__has_include) && __has_include(<cublasLt.h>) && __has_include(<nccl.h>)
#include "tests/cuda/fake_cuda.c"
#include <sys/wait.h>

enum { SEEDS = 200, N = 100 };
#ifdef __SANITIZE_THREAD__
enum { PLANT_RACES = 0 };
#else
enum { PLANT_RACES = 1 };
#endif

static int error_contains(const char *part) {
    const char *text = fake_cuda_error();
    return text && strstr(text, part) != NULL;
}

/* Resets to a new machine. The previous part of the test must have freed everything. */
static void new_machine(int devices) {
    CHECK_MSG(!fake_cuda_error(), "%s", fake_cuda_error());
    CHECK(fake_cuda_leaks(1) == 0);
    fake_cuda_reset();
    fake_cuda_devices(devices);
}

/* Checks and clears the expected mistake, and resets to a new machine. */
static void expect_mistake(const char *part, int devices) {
    CHECK_MSG(error_contains(part), "not found: %s; %s", part,
        fake_cuda_error() ? fake_cuda_error() : "nothing");
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
typedef struct increment {
    const float *x;
    float *y;
} increment;
static void increment_run(void *arg) {
    const increment *k = (const increment *)arg;
    for (int i = 0; i < N; i++) k->y[i] = k->x[i] + 1;
}
static void launch_increment(cudaStream_t s, const float *x, float *y) {
    increment *k = (increment *)malloc(sizeof *k);
    *k = (increment){ x, y };
    fake_cuda_launch(s, increment_run, k, free);
}

// ==== Streams ===================================================================================

/* One stream fills x, the other reads x. Without the event, some order must give a wrong result.
   Returns the result. */
static float two_streams(unsigned seed, int order, int with_event) {
    fake_cuda_reset();
    fake_cuda_seed(seed);
    fake_cuda_order(order);
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t filled = new_event();
    float *x = device_floats(N), *y = device_floats(N), *z = device_floats(N), out[N];
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
    CHECK_MSG(right == SEEDS, "correct with the event for %d seeds of %d", right, SEEDS);
    CHECK_MSG(wrong >= SEEDS / 10 && wrong <= SEEDS * 9 / 10,
        "wrong without the event for %d seeds", wrong);
    CHECK(two_streams(1, FAKE_CUDA_LAZY, 1) == 2);
    CHECK(two_streams(1, FAKE_CUDA_LAZY, 0) != 2);
    CHECK(two_streams(1, FAKE_CUDA_EAGER, 1) == 2);
}

/* A wait refers to the latest record at the time of the wait call. */
static void test_records(void) {
    fake_cuda_reset();
    fake_cuda_order(FAKE_CUDA_LAZY);
    cudaStream_t a = new_stream(), b = new_stream();
    cudaEvent_t e = new_event();
    float *x = device_floats(N), *y = device_floats(N), out[N];
    cudaMemsetAsync(x, 0, N * sizeof *x, a);
    CHECK(cudaEventQuery(e) == cudaSuccess && cudaEventSynchronize(e) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(b, e, 0) == cudaSuccess); /* never recorded: does not wait */
    launch_increment(b, x, y);
    cudaMemcpyAsync(out, y, sizeof out, cudaMemcpyDefault, b);
    CHECK(out[0] != 1);
    cudaEventRecord(e, a);
    cudaStreamWaitEvent(b, e, 0);
    launch_increment(a, x, x);
    cudaEventRecord(e, a);
    launch_increment(b, x, y);
    cudaMemcpyAsync(out, y, sizeof out, cudaMemcpyDefault, b);
    CHECK(out[0] == 1); /* the wait does not include the second record */
    CHECK(cudaEventQuery(e) == cudaErrorNotReady || cudaEventQuery(e) == cudaSuccess);
    CHECK(cudaGetLastError() == cudaErrorNotReady || cudaGetLastError() == cudaSuccess);
    CHECK(cudaEventSynchronize(e) == cudaSuccess && cudaStreamQuery(a) == cudaSuccess);
    cudaEventDestroy(e);
    cudaFree(x), cudaFree(y);
    cudaStreamDestroy(a), cudaStreamDestroy(b);
    new_machine(1);
}

static void test_default_stream(void) {
    int wrong = 0;
    /* the default stream orders blocking streams only */
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        fake_cuda_reset();
        fake_cuda_seed(seed);
        cudaStream_t blocking, other = new_stream();
        cudaStreamCreate(&blocking);
        float *x = device_floats(N), *y = device_floats(N), *z = device_floats(N),
              *w = device_floats(N), out[N], free_out[N];
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
    expect_mistake("default stream", 1);
}

/* The host must wait before it reads, and must not free or change what a copy still needs. */
static void test_host(void) {
    int seen_old = 0;
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        fake_cuda_reset();
        fake_cuda_seed(seed);
        cudaStream_t s = new_stream();
        float *x = device_floats(N), *pinned, pageable[N];
        CHECK(cudaMallocHost((void **)&pinned, N * sizeof *pinned) == cudaSuccess);
        for (int i = 0; i < N; i++) pageable[i] = 3;
        cudaMemcpyAsync(x, pageable, sizeof pageable, cudaMemcpyHostToDevice, s);
        for (int i = 0; i < N; i++) pageable[i] = 4; /* the copy has read it already */
        cudaMemcpyAsync(pinned, x, sizeof pageable, cudaMemcpyDeviceToHost, s);
        seen_old += pinned[0] != 3;
        CHECK(cudaStreamSynchronize(s) == cudaSuccess && pinned[N - 1] == 3);
        cudaMemcpyAsync(x, pinned, sizeof pageable, cudaMemcpyDefault, s);
        pinned[0] = 5; /* too early: wrong for some seeds */
        cudaMemcpyAsync(pageable, x, sizeof pageable, cudaMemcpyDefault, s);
        seen_old += pageable[0] == 5;
        CHECK(pageable[1] == 3);
        cudaFreeHost(pinned), cudaFree(x), cudaStreamDestroy(s);
    }
    CHECK_MSG(seen_old > SEEDS / 2, "%d", seen_old);
    new_machine(1);
    fake_cuda_order(FAKE_CUDA_LAZY);
    void *pinned;
    cudaHostAlloc(&pinned, 400, cudaHostAllocDefault);
    float *x = device_floats(N);
    cudaMemcpyAsync(pinned, x, 400, cudaMemcpyDefault, new_stream());
    cudaFreeHost(pinned);
    expect_mistake("cudaFreeHost of memory that a queued operation", 1);
}

static void test_memory(void) {
    cudaStream_t s = new_stream();
    float *x = device_floats(N), host[N + 1];
    uint32_t bits;
    size_t available, total;
    struct cudaPointerAttributes a;
    CHECK(cudaMemcpy(host, x, 4, cudaMemcpyDefault) == cudaSuccess);
    memcpy(&bits, host, 4);
    CHECK(bits == 0xffffffff);
    CHECK(cudaPointerGetAttributes(&a, x + 5) == cudaSuccess && a.type == cudaMemoryTypeDevice &&
          a.device == 0);
    CHECK(
        cudaPointerGetAttributes(&a, host) == cudaSuccess && a.type == cudaMemoryTypeUnregistered);
    CHECK(cudaHostRegister(host, sizeof host, 0) == cudaSuccess);
    CHECK(cudaPointerGetAttributes(&a, host + 1) == cudaSuccess && a.type == cudaMemoryTypeHost);
    CHECK(
        cudaHostRegister(host, 4, 0) == cudaErrorHostMemoryAlreadyRegistered && cudaGetLastError());
    CHECK(cudaHostUnregister(host) == cudaSuccess);
    CHECK(cudaMemcpyAsync(host, x, sizeof host, cudaMemcpyDefault, s) == cudaErrorInvalidValue &&
          cudaGetLastError());
    CHECK(error_contains("leaves its allocation"));
    fake_cuda_clear_error();
    CHECK(cudaMemcpyAsync(host, x, 4, cudaMemcpyHostToDevice, s) == cudaErrorInvalidValue &&
          cudaGetLastError());
    CHECK(error_contains("kind"));
    fake_cuda_clear_error();
    CHECK(cudaFree(x + 1) == cudaErrorInvalidValue &&
          error_contains("not what its allocation returned"));
    fake_cuda_clear_error();
    CHECK(cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess);
    fake_cuda_memory(1000);
    CHECK(cudaMemGetInfo(&available, &total) == cudaSuccess && available == 600 && total == 1000);
    void *p = &bits;
    CHECK(cudaMalloc(&p, 601) == cudaErrorMemoryAllocation && !p && cudaGetLastError());
    CHECK(fake_cuda_leaks(0) == 2);
    cudaFree(x), cudaStreamDestroy(s);
    new_machine(0);
    int count = 77;
    CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 77);
    CHECK(cudaMalloc(&p, 4) == cudaErrorNoDevice && cudaSetDevice(0) == cudaErrorNoDevice);
    new_machine(-1);
    CHECK(cudaGetDeviceCount(&count) == cudaErrorInsufficientDriver && count == 77);
    new_machine(1);
}

static void fail_run(void *arg) {
    (void)arg;
    fake_cuda_launch_failed(cudaErrorLaunchFailure, "a kernel's mistake");
}

/* After a kernel's mistake the device stays failed. A launch needs a stream of the current
   device. */
static void test_failures(void) {
    new_machine(2);
    cudaStream_t s = new_stream(), t;
    float *x = device_floats(N), host[N] = { 0 };
    fake_cuda_order(FAKE_CUDA_LAZY);
    fake_cuda_launch(s, fail_run, NULL, NULL);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaStreamSynchronize(s) == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure &&
          cudaGetLastError() == cudaErrorLaunchFailure);
    CHECK(cudaMemcpyAsync(host, x, 4, cudaMemcpyDefault, s) == cudaErrorLaunchFailure);
    CHECK(cudaSetDevice(1) == cudaSuccess && cudaGetLastError());
    t = new_stream();
    CHECK(cudaStreamSynchronize(t) == cudaSuccess);
    expect_mistake("a kernel's mistake", 2);
    s = new_stream();
    CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice && cudaGetLastError());
    CHECK(cudaSetDevice(1) == cudaSuccess);
    launch_increment(s, NULL, NULL);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    expect_mistake("launched on a stream of device 0 while device 1", 2);
    s = new_stream();
    cudaStreamDestroy(s);
    CHECK(cudaStreamSynchronize(s) == cudaErrorInvalidResourceHandle);
    expect_mistake("is not a stream", 1);
}

static void run_touch(void *arg) { *(volatile float *)arg += 1; }

/* Runs a touch in a child process. Returns the signal that killed the child, or 0. */
static int signal_of_touch(int touch) {
    pid_t child = fork();
    if (child == 0) {
        fake_cuda_reset();
        fake_cuda_devices(2);
        fake_cuda_guard(1);
        if (!freopen("/dev/null", "w", stderr)) _exit(2);
        float *x = device_floats(N), *y, out[N];
        cudaStream_t s = new_stream();
        cudaMemsetAsync(x, 0, N * sizeof *x, s);
        launch_increment(s, x, x);
        cudaMemcpyAsync(out, x, sizeof out, cudaMemcpyDefault, s);
        cudaSetDevice(1);
        y = device_floats(N);
        if (touch == 3) cudaDeviceEnablePeerAccess(0, 0);
        if (touch == 1) y[N - 1] = 1;
        if (touch >= 2) fake_cuda_launch(new_stream(), run_touch, x, NULL);
        cudaDeviceSynchronize();
        _exit(out[N - 1] == 1 ? 0 : 2);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

static void test_guard(void) {
    CHECK(signal_of_touch(0) == 0);
    CHECK(signal_of_touch(1) == SIGSEGV); /* the host */
    CHECK(signal_of_touch(2) == SIGSEGV); /* a kernel of another device */
    CHECK(signal_of_touch(3) == 0);       /* with access to the peer */
}

// ==== Matrix products ===========================================================================

typedef struct shape {
    int m, n, k, transa, transb, batch, pad;
} shape;
static const cudaDataType_t TYPES[3] = { CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F };

static double plain_gelu(double x) {
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

/* A matrix on the host and the device, with values that its type represents exactly. */
typedef struct matrix {
    cudaDataType_t type;
    int rows, cols, ld, batch;
    size_t bytes;
    char *host, *at;
} matrix;

static uint64_t numbers = 1;
static matrix new_matrix(cudaDataType_t type, int rows, int cols, int ld, int batch) {
    matrix m = { .type = type, .rows = rows, .cols = cols, .ld = ld, .batch = batch };
    m.bytes = (size_t)batch * (size_t)ld * (size_t)cols * number_bytes(type);
    m.host = (char *)malloc(m.bytes);
    for (size_t i = 0; i < m.bytes / number_bytes(type); i++)
        number_store(type, m.host, i, (float)((int)(mix(++numbers) % 65) - 32) / 32);
    CHECK(cudaMalloc((void **)&m.at, m.bytes) == cudaSuccess);
    CHECK(cudaMemcpy(m.at, m.host, m.bytes, cudaMemcpyDefault) == cudaSuccess);
    return m;
}
static double get(const matrix *m, int b, int row, int col) {
    return number_load(m->type, m->host,
        ((size_t)b * (size_t)m->cols + (size_t)col) * (size_t)m->ld + (size_t)row);
}
static void free_matrix(matrix *m) {
    free(m->host);
    cudaFree(m->at);
}
static void layout_of(cublasLtMatrixLayoutOpaque_t *l, const matrix *m) {
    int64_t stride = (int64_t)m->ld * m->cols;
    CHECK(!cublasLtMatrixLayoutInit(l, m->type, (uint64_t)m->rows, (uint64_t)m->cols, m->ld));
    CHECK(!cublasLtMatrixLayoutSetAttribute(
        l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &m->batch, sizeof m->batch));
    CHECK(!cublasLtMatrixLayoutSetAttribute(
        l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
}

static double tolerance(cudaDataType_t type, double x) {
    return (type == CUDA_R_32F ? 1e-5 : type == CUDA_R_16F ? 6e-4 : 4.1e-3) * (1 + fabs(x));
}

/* Compares every element with a sum in double. Returns the number of wrong elements. */
static int compare(const shape *s, const matrix *a, const matrix *b, const matrix *c,
    const matrix *d, const matrix *bias, const matrix *aux_in, const matrix *aux, int epilogue) {
    int wrong = 0;
    for (int batch = 0; batch < s->batch; batch++) {
        double gradient[300] = { 0 };
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
            wrong +=
                fabs(get(bias, batch, i, 0) - gradient[i]) > 4 * tolerance(bias->type, gradient[i]);
    }
    return wrong;
}

static cublasLtHandle_t handle;

static cublasStatus_t product_of(
    const shape *s, cudaDataType_t in, cudaDataType_t out, int epilogue, int *wrong) {
    int ta = s->transa, tb = s->transb, pad = s->pad, ld = s->m + pad,
        gradients = epilogue & (16 | 256 | 512);
    matrix a =
        new_matrix(in, ta ? s->k : s->m, ta ? s->m : s->k, (ta ? s->k : s->m) + pad, s->batch);
    matrix b =
        new_matrix(in, tb ? s->n : s->k, tb ? s->k : s->n, (tb ? s->n : s->k) + pad, s->batch);
    matrix c = new_matrix(out, s->m, s->n, ld, s->batch),
           d = new_matrix(out, s->m, s->n, ld + 1, s->batch);
    matrix aux = new_matrix(out, s->m, s->n, (s->m + 7) / 8 * 8, s->batch), aux_in = aux;
    matrix bias =
        new_matrix(out, s->m > s->n ? s->m : s->n, 1, s->m > s->n ? s->m : s->n, s->batch);
    aux_in.host = (char *)memcpy(malloc(aux.bytes), aux.host, aux.bytes);
    cublasLtMatmulDescOpaque_t p;
    cublasLtMatrixLayoutOpaque_t la, lb, lc, ld_;
    cublasLtMatmulPreferenceOpaque_t wish;
    cublasLtMatmulHeuristicResult_t best;
    int32_t opa = ta ? CUBLAS_OP_T : CUBLAS_OP_N, opb = tb ? CUBLAS_OP_T : CUBLAS_OP_N, found;
    int64_t aux_ld = aux.ld, aux_stride = (int64_t)aux.ld * aux.cols,
            bias_stride = gradients ? bias.ld : 0;
    uint64_t room = 4096;
    float alpha = 1.5f, beta = 0.5f;
    void *workspace;
    CHECK(!cublasLtMatmulDescInit(&p, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_TRANSA, &opa, sizeof opa));
    CHECK(!cublasLtMatmulDescSetAttribute(&p, CUBLASLT_MATMUL_DESC_TRANSB, &opb, sizeof opb));
    CHECK(!cublasLtMatmulDescSetAttribute(
        &p, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    CHECK(!cublasLtMatmulDescSetAttribute(
        &p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.at, sizeof bias.at));
    CHECK(!cublasLtMatmulDescSetAttribute(
        &p, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, &bias_stride, 8));
    CHECK(!cublasLtMatmulDescSetAttribute(
        &p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux.at, sizeof aux.at));
    CHECK(!cublasLtMatmulDescSetAttribute(
        &p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_ld, sizeof aux_ld));
    CHECK(!cublasLtMatmulDescSetAttribute(
        &p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, &aux_stride, 8));
    layout_of(&la, &a), layout_of(&lb, &b), layout_of(&lc, &c), layout_of(&ld_, &d);
    CHECK(!cublasLtMatmulPreferenceInit(&wish));
    CHECK(!cublasLtMatmulPreferenceSetAttribute(
        &wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room));
    cudaMalloc(&workspace, room);
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, &p, &la, &lb, &lc, &ld_, &wish, 1, &best, &found);
    cudaStream_t stream = new_stream();
    if (!status) {
        CHECK(found == 1);
        status = cublasLtMatmul(handle, &p, &alpha, a.at, &la, b.at, &lb, &beta, c.at, &lc, d.at,
            &ld_, &best.algo, workspace, best.workspaceSize, stream);
    }
    if (!status) {
        cudaMemcpyAsync(d.host, d.at, d.bytes, cudaMemcpyDefault, stream);
        cudaMemcpyAsync(aux.host, aux.at, aux.bytes, cudaMemcpyDefault, stream);
        cudaMemcpyAsync(bias.host, bias.at, bias.bytes, cudaMemcpyDefault, stream);
        *wrong = compare(s, &a, &b, &c, &d, &bias, &aux_in, &aux, epilogue);
    }
    free(aux_in.host);
    free_matrix(&a), free_matrix(&b), free_matrix(&c), free_matrix(&d), free_matrix(&aux),
        free_matrix(&bias);
    cudaFree(workspace);
    cudaStreamDestroy(stream);
    return status;
}

static void test_products(void) {
    static const int EPILOGUES[] = { CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_RELU,
        CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_GELU,
        CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA,
        CUBLASLT_EPILOGUE_BGRADB };
    enum { KINDS = sizeof EPILOGUES / sizeof *EPILOGUES };
    static const shape SHAPES[] = { { 1, 1, 1, 0, 0, 1, 0 }, { 17, 5, 9, 0, 0, 1, 3 },
        { 33, 18, 7, 1, 0, 2, 1 }, { 16, 31, 20, 0, 1, 3, 0 }, { 47, 3, 65, 1, 1, 1, 2 } };
    new_machine(1);
    CHECK(!cublasLtCreate(&handle));
    for (size_t s = 0; s < sizeof SHAPES / sizeof *SHAPES; s++)
        for (int type = 0; type < 5; type++)
            for (int e = 0; e < KINDS; e++) {
                int wrong = -1;
                cudaDataType_t in = TYPES[type % 3 + type / 3], out = type < 3 ? in : CUDA_R_32F;
                cublasStatus_t status = product_of(&SHAPES[s], in, out, EPILOGUES[e], &wrong);
                CHECK_MSG(!status && wrong == 0,
                    "shape %zu, types %d %d, epilogue %d: status %d, %d wrong", s, in, out,
                    EPILOGUES[e], status, wrong);
            }
    int wrong;
    fake_cublas_no_algorithm(1);
    CHECK(product_of(&SHAPES[1], CUDA_R_32F, CUDA_R_32F, 1, &wrong) == CUBLAS_STATUS_NOT_SUPPORTED);
    fake_cublas_no_algorithm(0);
    CHECK(product_of(&SHAPES[1], CUDA_R_32F, CUDA_R_16F, 1, &wrong) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(product_of(&SHAPES[1], CUDA_R_8I, CUDA_R_8I, 1, &wrong) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(product_of(&SHAPES[1], CUDA_R_32F, CUDA_R_32F, CUBLASLT_EPILOGUE_DRELU, &wrong) !=
          CUBLAS_STATUS_SUCCESS);
    CHECK(!cublasLtDestroy(handle));
    CHECK(!fake_cuda_error());
}

/* Each call has exactly one mistake, and the text must name it. */
static void test_refusals(void) {
    for (int wrong = 0; wrong < 8; wrong++) {
        new_machine(2);
        cublasLtMatmulDescOpaque_t p;
        cublasLtMatrixLayoutOpaque_t a, b, d;
        cublasLtMatmulPreferenceOpaque_t wish;
        cublasLtMatmulHeuristicResult_t best;
        int found;
        float one = 1, zero = 0, *x = device_floats(1024);
        static _Alignas(256) float host[64];
        uint64_t room = 64;
        cudaStream_t s = new_stream();
        CHECK(!cublasLtCreate(&handle));
        cublasLtMatmulDescInit(&p, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        cublasLtMatrixLayoutInit(&a, CUDA_R_32F, 8, 4, 8);
        cublasLtMatrixLayoutInit(&b, CUDA_R_32F, 4, 8, 4);
        cublasLtMatrixLayoutInit(&d, CUDA_R_32F, 8, 8, 8);
        cublasLtMatmulPreferenceInit(&wish);
        cublasLtMatmulPreferenceSetAttribute(
            &wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
        CHECK(
            !cublasLtMatmulAlgoGetHeuristic(handle, &p, &a, &b, &d, &d, &wish, 1, &best, &found) &&
            found);
        if (wrong == 1) cublasLtMatrixLayoutInit(&b, CUDA_R_32F, 5, 8, 5);
        if (wrong == 2) cublasLtMatrixLayoutInit(&a, CUDA_R_32F, 8, 4, 7);
        if (wrong == 3) cublasLtMatrixLayoutInit(&b, CUDA_R_32F, 4, 7, 4);
        if (wrong == 3) cublasLtMatrixLayoutInit(&d, CUDA_R_32F, 8, 7, 8);
        if (wrong == 7) cudaSetDevice(1);
        cublasStatus_t status = cublasLtMatmul(handle, &p, &one,
            wrong == 4   ? x + 4
            : wrong == 6 ? host
                         : x,
            &a, x + 64, &b, &zero, x + 512, &d, x + 512, &d, &best.algo, x + 256,
            wrong == 5 ? 63 : 64, s);
        static const char *const TEXTS[] = { NULL, "dimensions", "leading dimension",
            "another product", "aligned", "workspace", "A: ", "current device" };
        CHECK((status == CUBLAS_STATUS_SUCCESS) == (wrong == 0));
        cublasLtDestroy(handle);
        if (wrong)
            expect_mistake(TEXTS[wrong], 1);
        else {
            cudaStreamDestroy(s);
            cudaFree(x);
        }
    }
}

// ==== Ranks =====================================================================================

enum { MAX_RANKS = 6, SLOTS = 4096 };

typedef struct rank rank;
struct rank {
    int rank, size, blocking, device;
    ncclUniqueId id;
    void (*body)(rank *);
    ncclComm_t comm;
    cudaStream_t stream;
    float *x, *y; /* arrays of SLOTS numbers; x[i] = rank + i */
    float out[SLOTS];
    ncclResult_t init;
    int answer; /* result of the body */
};

/* Waits for a non-blocking communicator and returns its state. */
static ncclResult_t settle(ncclComm_t comm, ncclResult_t result) {
    while (result == ncclInProgress) {
        if (ncclCommGetAsyncError(comm, &result)) return ncclInternalError;
        sched_yield();
    }
    return result;
}

/* A pending split may return ncclSuccess, so this always polls. */
static ncclResult_t settle_split(ncclComm_t comm, ncclResult_t result) {
    return settle(comm, result == ncclSuccess ? ncclInProgress : result);
}

/* Polls with a time limit, as a client does instead of an endless wait. A reported mistake ends the
   loop, too. */
static cudaError_t poll_stream(cudaStream_t s, double seconds) {
    double until = now() + seconds;
    cudaError_t error;
    while ((error = cudaStreamQuery(s)) == cudaErrorNotReady && now() < until && !fake_cuda_error())
        sched_yield();
    return error;
}

static void *rank_thread(void *arg) {
    rank *r = (rank *)arg;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = r->blocking;
    CHECK(cudaSetDevice(r->device) == cudaSuccess);
    r->stream = new_stream();
    r->x = device_floats(SLOTS), r->y = device_floats(SLOTS);
    for (int i = 0; i < SLOTS; i++) r->out[i] = (float)(r->rank + i);
    CHECK(
        cudaMemcpyAsync(r->x, r->out, sizeof r->out, cudaMemcpyDefault, r->stream) == cudaSuccess);
    ncclResult_t result = ncclCommInitRankConfig(&r->comm, r->size, r->id, r->rank, &config);
    r->init = r->comm ? settle(r->comm, result) : result;
    if (!r->init) r->body(r);
    if (r->comm) ncclCommAbort(r->comm);
    cudaFree(r->x), cudaFree(r->y);
    cudaStreamDestroy(r->stream);
    return NULL;
}

static rank ranks[MAX_RANKS];

/* Runs a body on every rank of a new communicator, and then aborts the communicator, because most
   bodies are incorrect programs. */
static void run_ranks_on(int size, int devices, int blocking, void (*body)(rank *)) {
    pthread_t threads[MAX_RANKS];
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    for (int r = 0; r < size; r++) {
        ranks[r] = (rank){ .rank = r,
            .size = size,
            .blocking = blocking,
            .device = r % devices,
            .id = id,
            .body = body };
        CHECK(pthread_create(&threads[r], NULL, rank_thread, &ranks[r]) == 0);
    }
    for (int r = 0; r < size; r++) pthread_join(threads[r], NULL);
}

static double wait_limit = 20; /* short where a hang is expected */
static void run_ranks(int size, unsigned seed, int order, int blocking, void (*body)(rank *)) {
    fake_cuda_reset();
    fake_cuda_devices(size);
    fake_cuda_seed(seed);
    fake_cuda_order(order);
    fake_cuda_wait_limit(wait_limit);
    run_ranks_on(size, size, blocking, body);
}

/* Copies y to the host. */
static const float *fetch(rank *r) {
    cudaMemcpyAsync(r->out, r->y, sizeof r->out, cudaMemcpyDefault, r->stream);
    return r->out;
}

enum { C = 13 }; /* elements per rank: a prime */

/* Runs every collective and compares with its definition. */
static void all_collectives(rank *r) {
    int n = r->size, me = r->rank, wrong = 0, ok = 0, first = n * (n - 1) / 2;
    ncclComm_t c = r->comm;
    const float *y;
    ok += settle(c, ncclAllReduce(r->x, r->y, C, ncclFloat, ncclSum, c, r->stream));
    for (int i = 0; i < C; i++) wrong += fetch(r)[i] != (float)(n * i + first);
    ok += settle(c, ncclAllReduce(r->x, r->y, C, ncclFloat, ncclMax, c, r->stream));
    for (int i = 0; i < C; i++) wrong += fetch(r)[i] != (float)(n - 1 + i);
    ok += settle(c, ncclReduceScatter(r->x, r->y, C, ncclFloat, ncclSum, c, r->stream));
    for (int i = 0; i < C; i++) wrong += fetch(r)[i] != (float)(n * (i + me * C) + first);
    ok += settle(c, ncclAllGather(r->x, r->y, C, ncclFloat, c, r->stream));
    for (int i = 0; i < n * C; i++) wrong += fetch(r)[i] != (float)(i / C + i % C);
    ok += settle(c, ncclBroadcast(r->x, r->y, C, ncclFloat, n - 1, c, r->stream));
    for (int i = 0; i < C; i++) wrong += fetch(r)[i] != (float)(n - 1 + i);
    ok += settle(c, ncclReduce(r->x, r->y, C, ncclFloat, ncclMin, n / 2, c, r->stream));
    for (y = fetch(r), ok += 0; me == n / 2 && y < r->out + C; y++)
        wrong += *y != (float)(y - r->out);
    ok += settle(c, ncclAlltoAll(r->x, r->y, C, ncclFloat, c, r->stream));
    for (int i = 0; i < n * C; i++) wrong += fetch(r)[i] != (float)(i / C + i % C + me * C);
    ok += settle(c, ncclGather(r->x, r->y, C, ncclFloat, 0, c, r->stream));
    for (int i = 0; me == 0 && i < n * C; i++) wrong += fetch(r)[i] != (float)(i / C + i % C);
    ok += settle(c, ncclScatter(r->x, r->y, C, ncclFloat, 0, c, r->stream));
    for (int i = 0; i < C; i++) wrong += fetch(r)[i] != (float)(i + me * C);
    ok += settle(c, ncclAllGather(r->x + me * C, r->x, C, ncclFloat, c, r->stream)); /* in place */
    ok += settle(c, ncclReduceScatter(r->x, r->x + me * C, C, ncclFloat, ncclAvg, c, r->stream));
    cudaMemcpyAsync(r->y, r->x, sizeof r->out, cudaMemcpyDefault, r->stream);
    for (int i = 0; i < C; i++)
        wrong += fabsf(fetch(r)[me * C + i] - (float)(me + i + me * C)) > 1e-4f;
    CHECK(poll_stream(r->stream, 5) == cudaSuccess);
    r->answer = wrong + ok;
}

/* Sums that round in every order: all ranks get equal bits, which differ from those of rank
   order. */
static void rounded_sums(rank *r) {
    int16_t bits[2][SLOTS];
    float in_order;
    for (int i = 0; i < C; i++)
        bits[0][i] = (int16_t)bf16_round(1 + 0.37f * (float)((r->rank + 1) * (i + 1)));
    cudaMemcpyAsync(r->x, bits[0], sizeof bits[0], cudaMemcpyDefault, r->stream);
    r->answer = (int)settle(
        r->comm, ncclAllReduce(r->x, r->y, C, ncclBfloat16, ncclSum, r->comm, r->stream));
    fetch(r);
    memcpy(bits[1], r->out, sizeof bits[1]);
    for (int i = 0, differ = 0; i < C; i++) {
        in_order = 0;
        for (int k = 0; k < r->size; k++)
            in_order = bf16_load(bf16_round(
                in_order + bf16_load(bf16_round(1 + 0.37f * (float)((k + 1) * (i + 1))))));
        differ += bf16_load((uint16_t)bits[1][i]) != in_order;
        if (i == C - 1) CHECK_MSG(differ > 0, "the sums have the bits of rank order");
    }
}

static void test_collectives(void) {
    new_machine(1);
    for (int size = 1; size <= 5; size++)
        for (int mode = 0; mode < 6; mode++) {
            if (mode == 5) setenv("FAKE_CUDA_GUARD", "1", 1);
            run_ranks(size, (unsigned)(size * 10 + mode), mode % 3, mode / 3, all_collectives);
            unsetenv("FAKE_CUDA_GUARD");
            CHECK_MSG(!fake_cuda_error(), "%s", fake_cuda_error());
            for (int r = 0; r < size; r++)
                CHECK_MSG(ranks[r].init == ncclSuccess && ranks[r].answer == 0,
                    "%d ranks, mode %d, rank %d: %d, %d", size, mode, r, ranks[r].init,
                    ranks[r].answer);
            CHECK(fake_cuda_leaks(1) == 0);
        }
    run_ranks(5, 1, FAKE_CUDA_RANDOM, 1, rounded_sums);
    for (int r = 1; r < 5; r++) CHECK(memcmp(ranks[0].out, ranks[r].out, 2 * C) == 0);
    new_machine(1);
}

static void reduced_types(rank *r) {
    static const ncclDataType_t TYPES_[] = { ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64,
        ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16 };
    /* results for 3, 4, 5: sum, product, max, min, average */
    static const int RESULTS[5] = { 12, 60, 5, 3, 4 };
    for (int t = 0; t < 10; t++)
        for (int op = 0; op < 5; op++) {
            double in = 3 + r->rank, out = 0;
            int64_t whole = 3 + r->rank;
            float f = (float)in;
            uint16_t half = TYPES_[t] == ncclFloat16 ? f16_round(f) : bf16_round(f);
            const void *from = is_half(TYPES_[t])         ? (void *)&half
                               : TYPES_[t] == ncclFloat32 ? (void *)&f
                               : TYPES_[t] == ncclFloat64 ? (void *)&in
                                                          : (void *)&whole;
            cudaMemcpyAsync(r->x, from, type_bytes(TYPES_[t]), cudaMemcpyDefault, r->stream);
            r->answer +=
                (int)ncclAllReduce(r->x, r->x, 1, TYPES_[t], (ncclRedOp_t)op, r->comm, r->stream);
            whole = 0;
            void *to = is_half(TYPES_[t])         ? (void *)&half
                       : TYPES_[t] == ncclFloat32 ? (void *)&f
                       : TYPES_[t] == ncclFloat64 ? (void *)&out
                                                  : (void *)&whole;
            cudaMemcpyAsync(to, r->x, type_bytes(TYPES_[t]), cudaMemcpyDefault, r->stream);
            double got = is_half(TYPES_[t]) ? (double)number_load(half_type(TYPES_[t]), &half, 0)
                         : TYPES_[t] == ncclFloat32 ? (double)f
                         : TYPES_[t] == ncclFloat64 ? out
                                                    : (double)whole;
            CHECK_MSG(fabs(got - RESULTS[op]) < 0.04, "type %d, operation %d: %g", (int)TYPES_[t],
                op, got);
        }
}

/* ---- events and orders ---- */

static int with_event;

/* A kernel's result is all-reduced on another stream, and the sum is used on the first stream. */
static void two_streams_of_a_rank(rank *r) {
    cudaStream_t side = new_stream();
    cudaEvent_t filled = new_event(), summed = new_event();
    launch_increment(r->stream, r->x, r->x);
    cudaEventRecord(filled, r->stream);
    if (with_event) cudaStreamWaitEvent(side, filled, 0);
    r->answer =
        (int)settle(r->comm, ncclAllReduce(r->x, r->x, N, ncclFloat, ncclSum, r->comm, side));
    cudaEventRecord(summed, side);
    if (with_event) cudaStreamWaitEvent(r->stream, summed, 0);
    launch_increment(r->stream, r->x, r->y);
    r->answer += fetch(r)[1] != 6;
    CHECK(cudaStreamSynchronize(side) == cudaSuccess);
    cudaEventDestroy(filled), cudaEventDestroy(summed);
    cudaStreamDestroy(side);
}

static int settle_first;

/* An event recorded while a call is in progress comes before the call's operation. */
static void event_too_early(rank *r) {
    cudaStream_t side = new_stream();
    cudaEvent_t summed = new_event();
    cudaStreamSynchronize(r->stream);
    ncclResult_t result = ncclAllReduce(r->x, r->x, N, ncclFloat, ncclSum, r->comm, side);
    if (settle_first) result = settle(r->comm, result);
    cudaEventRecord(summed, side);
    cudaStreamWaitEvent(r->stream, summed, 0);
    launch_increment(r->stream, r->x, r->y);
    cudaStreamSynchronize(r->stream);
    settle(r->comm, result);
    r->answer = fetch(r)[1] != 4;
    cudaStreamSynchronize(side);
    cudaEventDestroy(summed);
    cudaStreamDestroy(side);
}

static void exchange(rank *r) {
    int peer = 1 - r->rank;
    if (r->rank == 0 || r->answer == 0) {
        ncclSend(r->x, N, ncclFloat, peer, r->comm, r->stream);
        ncclRecv(r->y, N, ncclFloat, peer, r->comm, r->stream);
    }
    r->answer = (int)cudaStreamSynchronize(r->stream);
}
static void grouped_exchange(rank *r) {
    int peer = 1 - r->rank;
    ncclGroupStart();
    ncclSend(r->x, N, ncclFloat, peer, r->comm, r->stream);
    ncclSend(r->x + N, N, ncclFloat, peer, r->comm, r->stream);
    ncclRecv(r->y, N, ncclFloat, peer, r->comm, r->stream);
    ncclRecv(r->y + N, N, ncclFloat, peer, r->comm, r->stream);
    r->answer = (int)settle(r->comm, ncclGroupEnd());
    fetch(r);
    for (int i = 0; i < 2 * N; i++) r->answer += r->out[i] != (float)(peer + i);
}
/* A pipeline: each rank receives from the previous rank and sends to the next, in separate
   calls. */
static void chain(rank *r) {
    if (r->rank > 0) r->answer += ncclRecv(r->x, N, ncclFloat, r->rank - 1, r->comm, r->stream);
    launch_increment(r->stream, r->x, r->y);
    if (r->rank < r->size - 1)
        r->answer += ncclSend(r->y, N, ncclFloat, r->rank + 1, r->comm, r->stream);
    r->answer += fetch(r)[0] != (float)(r->rank + 1);
}

static void wrong_order(rank *r) {
    for (int i = 0; i < 2; i++)
        if (i == r->rank)
            ncclAllReduce(r->x, r->y, N, ncclFloat, ncclSum, r->comm, r->stream);
        else
            ncclAllGather(r->x, r->y, N, ncclFloat, r->comm, r->stream);
    r->answer = (int)cudaStreamSynchronize(r->stream);
}
static void wrong_count(rank *r) {
    ncclAllReduce(r->x, r->y, N + (size_t)(r->rank == 1), ncclFloat, ncclSum, r->comm, r->stream);
    r->answer = (int)poll_stream(r->stream, 10);
    cudaGetLastError();
}
static void wrong_root(rank *r) {
    ncclBroadcast(r->x, r->y, N, ncclFloat, r->rank == 1, r->comm, r->stream);
    r->answer = (int)poll_stream(r->stream, 10);
}
static void wrong_send(rank *r) {
    if (r->rank)
        ncclSend(r->x, N, ncclFloat, 0, r->comm, r->stream);
    else
        ncclRecv(r->y, N - 1, ncclFloat, 1, r->comm, r->stream);
    r->answer = (int)poll_stream(r->stream, 10);
}
static void rank_1_missing(rank *r) {
    if (r->rank == 1) return;
    ncclAllReduce(r->x, r->y, N, ncclFloat, ncclSum, r->comm, r->stream);
    r->answer = (int)cudaStreamSynchronize(r->stream);
}

/* Runs a body in two orders. Every rank must end with `answer` (cudaErrorLaunchTimeout: the rank
   hangs; cudaErrorNotReady: it is pending when a mistake is reported), and the fake must report
   `text` (NULL: no mistake). */
static void expect_outcome(
    int size, int blocking, void (*body)(rank *), cudaError_t answer, const char *text) {
    for (int order = 0; order < 2; order++) {
        wait_limit = answer == cudaErrorLaunchTimeout ? 0.2 : 20;
        run_ranks(size, 7, order, blocking, body);
        wait_limit = 20;
        CHECK_MSG(text ? error_contains(text) : !fake_cuda_error(), "%s, not %s", fake_cuda_error(),
            text);
        for (int r = 0; r < size && body != rank_1_missing; r++)
            CHECK_MSG(ranks[r].answer == (int)answer, "rank %d: %d", r, ranks[r].answer);
    }
}

static void test_orders(void) {
    int right = 0, wrong = 0, early = 0;
    for (unsigned seed = 0; seed < SEEDS; seed++) {
        with_event = 1;
        run_ranks(2, seed, FAKE_CUDA_RANDOM, (int)seed % 2, two_streams_of_a_rank);
        right += ranks[0].answer == 0 && ranks[1].answer == 0 && !fake_cuda_error();
        settle_first = 1;
        run_ranks(2, seed, FAKE_CUDA_RANDOM, 0, event_too_early);
        CHECK(ranks[0].answer == 0 && ranks[1].answer == 0);
        if (!PLANT_RACES) continue;
        with_event = 0;
        run_ranks(2, seed, FAKE_CUDA_RANDOM, (int)seed % 2, two_streams_of_a_rank);
        wrong += ranks[0].answer || ranks[1].answer;
        settle_first = 0;
        run_ranks(2, seed, FAKE_CUDA_RANDOM, 0, event_too_early);
        early += ranks[0].answer || ranks[1].answer;
    }
    CHECK_MSG(right == SEEDS, "%d of %d correct with events", right, SEEDS);
    if (PLANT_RACES) {
        CHECK_MSG(wrong > SEEDS / 4, "%d of %d wrong without events", wrong, SEEDS);
        CHECK_MSG(early > SEEDS / 10, "%d of %d wrong with an event too early", early, SEEDS);
    } else {
        check_skip("forgotten events between rank threads: the thread sanitizer finds them first");
    }
    expect_outcome(3, 1, reduced_types, cudaSuccess, NULL);
    expect_outcome(2, 1, exchange, cudaErrorLaunchTimeout, "does not end");
    expect_outcome(2, 1, grouped_exchange, cudaSuccess, NULL);
    expect_outcome(2, 0, grouped_exchange, cudaSuccess, NULL);
    expect_outcome(4, 1, chain, cudaSuccess, NULL);
    expect_outcome(2, 1, wrong_order, cudaErrorLaunchTimeout, "rank 1 ncclAllGather of 100");
    expect_outcome(2, 1, wrong_count, cudaErrorNotReady, "of 101 x type 7");
    expect_outcome(3, 1, wrong_root, cudaErrorNotReady, "root 1");
    expect_outcome(2, 1, wrong_send, cudaErrorNotReady, "ncclRecv of 99");
    expect_outcome(2, 1, rank_1_missing, cudaErrorLaunchTimeout, "rank 1 is not there");
    expect_mistake("rank 1 is not there", 1);
}

/* ---- communicators ---- */

/* for nearly every seed the third call is too early on some rank */
static void call_without_poll(rank *r) {
    for (int i = 0; i < 3; i++)
        r->answer |= ncclAllReduce(r->x, r->y, N, ncclFloat, ncclSum, r->comm, r->stream) == 5;
}

/* Rank 1 does not call. Rank 0 notices, aborts, and can use its stream again. */
static void aborted(rank *r) {
    if (r->rank == 0) {
        settle(r->comm, ncclAllReduce(r->x, r->x, N, ncclFloat, ncclSum, r->comm, r->stream));
        settle(r->comm, ncclAllReduce(r->x, r->y, N, ncclFloat, ncclSum, r->comm, r->stream));
        CHECK(poll_stream(r->stream, 0.02) == cudaErrorNotReady);
        CHECK(ncclCommAbort(r->comm) == ncclSuccess);
        CHECK(cudaStreamSynchronize(r->stream) == cudaSuccess);
        CHECK(cudaGetLastError() == cudaErrorNotReady);
        CHECK(!(fetch(r)[0] == 1)); /* not the sum: the content is unspecified */
        r->comm = NULL;
    }
}

static void planted(rank *r) {
    ncclResult_t state = ncclSuccess;
    for (int i = 0; i < 3; i++) {
        ncclResult_t result = ncclAllReduce(r->x, r->y, N, ncclFloat, ncclSum, r->comm, r->stream);
        state = settle(r->comm, result);
        if (state) break;
    }
    for (double until = now() + 10;
         !state && now() < until && !__atomic_load_n(&ranks[1].answer, __ATOMIC_SEQ_CST);) {
        ncclCommGetAsyncError(r->comm, &state);
        cudaStreamQuery(r->stream);
    }
    CHECK(poll_stream(r->stream, 0.01) == cudaErrorNotReady);
    __atomic_store_n(&r->answer, (int)state, __ATOMIC_SEQ_CST);
}

static void split_communicator(rank *r) {
    ncclComm_t part = NULL, none = r->comm;
    ncclResult_t result =
        settle_split(r->comm, ncclCommSplit(r->comm, r->rank % 2, -r->rank, &part, NULL));
    int size = 0, me = -1, device = -1, wrong = 0;
    CHECK(result == ncclSuccess && part);
    ncclCommCount(part, &size), ncclCommUserRank(part, &me), ncclCommCuDevice(part, &device);
    CHECK(size == (r->rank % 2 ? 2 : 3) && me == size - 1 - r->rank / 2 && device == r->rank);
    settle(part, ncclAllGather(r->x, r->y, 1, ncclFloat, part, r->stream));
    fetch(r);
    for (int i = 0; i < size; i++) wrong += r->out[i] != (float)(r->rank % 2 + 2 * (size - 1 - i));
    result = settle_split(
        r->comm, ncclCommSplit(r->comm, r->rank == 2 ? 0 : NCCL_SPLIT_NOCOLOR, 0, &none, NULL));
    CHECK(result == ncclSuccess && (none != NULL) == (r->rank == 2));
    if (none)
        CHECK(settle(none, ncclCommFinalize(none)) == ncclSuccess &&
              ncclCommDestroy(none) == ncclSuccess);
    CHECK(settle(part, ncclCommFinalize(part)) == ncclSuccess);
    CHECK(ncclCommDestroy(part) == ncclSuccess);
    r->answer = wrong;
}

/* Two communicators of the same ranks, called in different orders on two streams. */
static void two_orders(rank *r) {
    ncclComm_t second = NULL;
    cudaStream_t side = new_stream();
    ncclCommSplit(r->comm, 0, r->rank, &second, NULL);
    for (int i = 0; i < 2; i++)
        if (i == r->rank)
            ncclAllReduce(r->x, r->x, N, ncclFloat, ncclSum, r->comm, r->stream);
        else
            ncclAllReduce(r->y, r->y, N, ncclFloat, ncclSum, second, side);
    r->answer = cudaStreamSynchronize(r->stream) || cudaStreamSynchronize(side);
    ncclCommAbort(second);
    cudaStreamDestroy(side);
}

static void *second_thread(void *arg) {
    rank *r = (rank *)arg;
    int n;
    for (double until = now() + 2; now() < until && !fake_cuda_error();) ncclCommCount(r->comm, &n);
    return NULL;
}
static void two_threads(rank *r) {
    pthread_t other;
    CHECK(pthread_create(&other, NULL, second_thread, r) == 0);
    second_thread(r);
    pthread_join(other, NULL);
}

static void unknown_memory(rank *r) {
    static float host[N];
    r->answer = (int)ncclAllReduce(host, r->y, N, ncclFloat, ncclSum, r->comm, r->stream);
}
static void overlapping(rank *r) {
    r->answer = (int)ncclAllReduce(r->x, r->x + 1, N, ncclFloat, ncclSum, r->comm, r->stream);
}
static void memory_of_other_device(rank *r) {
    ncclComm_t comm = r->comm;
    struct cudaPointerAttributes a;
    static float *volatile first;
    if (r->rank == 0) __atomic_store_n(&first, r->x, __ATOMIC_SEQ_CST);
    ncclAllReduce(r->y, r->y, N, ncclFloat, ncclSum, comm, r->stream); /* a barrier */
    cudaStreamSynchronize(r->stream);
    if (r->rank == 1) {
        float *theirs = __atomic_load_n(&first, __ATOMIC_SEQ_CST);
        CHECK(cudaPointerGetAttributes(&a, theirs) == cudaSuccess && a.device == 0);
        r->answer = (int)ncclSend(theirs, N, ncclFloat, 0, comm, r->stream);
    }
    /* keeps its memory until the mistake is reported */
    while (r->rank == 0 && !fake_cuda_error()) sched_yield();
}

static void empty_body(rank *r) { (void)r; }

/* Some seed and order must give the text; the others must not crash. */
static void test_communicators(void) {
    int found = 0;
    for (unsigned seed = 0; seed < 20; seed++) {
        run_ranks(2, seed, FAKE_CUDA_RANDOM, 0, call_without_poll);
        found += error_contains("in progress");
    }
    CHECK_MSG(found >= 15, "%d", found);
    for (unsigned seed = 0; seed < 20; seed++) {
        run_ranks(2, seed, (int)seed % 2, seed % 4 < 2, aborted);
        CHECK(!fake_cuda_error());
        run_ranks(5, seed, (int)seed % 2, seed % 4 < 2, split_communicator);
        CHECK_MSG(!fake_cuda_error(), "%s", fake_cuda_error());
        for (int r = 0; r < 5; r++) CHECK(ranks[r].answer == 0);
        CHECK(fake_cuda_leaks(1) == 0);
    }
    fake_cuda_reset();
    fake_cuda_devices(2);
    fake_nccl_fail(1, 1, ncclRemoteError);
    run_ranks_on(2, 2, 0, planted);
    CHECK(ranks[1].answer == ncclRemoteError && ranks[0].answer == ncclSuccess);
    new_machine(2);
    run_ranks_on(4, 2, 0, empty_body);
    CHECK(ranks[0].init == ncclInvalidUsage && ranks[3].init == ncclInvalidUsage);
    run_ranks_on(4, 2, 1, empty_body);
    CHECK(ranks[0].init == ncclInvalidUsage && !ranks[0].comm);
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    run_ranks_on(4, 2, 1, all_collectives);
    unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
    for (int r = 0; r < 4; r++) CHECK(!ranks[r].init && ranks[r].answer == 0);
    new_machine(2);
    run_ranks_on(2, 2, 1, two_orders);
    CHECK(!ranks[0].answer && !ranks[1].answer && !fake_cuda_error());
    fake_cuda_wait_limit(0.2);
    fake_nccl_one_at_a_time(1);
    run_ranks_on(2, 2, 1, two_orders);
    CHECK(ranks[0].answer && ranks[1].answer);
    expect_mistake("not started", 2);
    run_ranks_on(2, 2, 1, two_threads);
    expect_mistake("two threads", 2);
    run_ranks_on(2, 2, 1, unknown_memory);
    expect_mistake("is not known to device", 2);
    run_ranks_on(2, 2, 1, overlapping);
    expect_mistake("overlap", 2);
    run_ranks_on(2, 2, 1, memory_of_other_device);
    expect_mistake("is device 0's memory", 2);
    ncclComm_t alone;
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    CHECK(
        ncclCommInitRank(&alone, 1, id, 0) == ncclSuccess && ncclCommDestroy(alone) == ncclSuccess);
    CHECK(!fake_cuda_error());
    CHECK(ncclCommAbort(alone) == ncclInvalidArgument);
    expect_mistake("after the end", 1);
}

int main(void) {
    test_events();
    test_records();
    test_default_stream();
    test_host();
    test_memory();
    test_failures();
    test_guard();
    test_products();
    test_refusals();
    test_collectives();
    test_orders();
    test_communicators();
    fake_cuda_reset();
    return check_done("test_fake_cuda");
}

#else
int main(void) {
    check_skip("the emulated GPU: needs cublasLt.h and nccl.h");
    return check_done("test_fake_cuda");
}
#endif
