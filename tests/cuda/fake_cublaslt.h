/* fake_cublaslt.h - the part of fake_cuda.c that replaces cuBLASLt

   Matrices are column-major, as in the real library. Every element is one sum in f32 over ascending
   k, rounded once when it is stored. The fake refuses what the real library would refuse, and a
   refusal by cublasLtMatmul is reported as a mistake. */

#include <cublasLt.h>
#include <math.h>

// ==== 1. Numbers ================================================================================

static float bf16_load(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

static uint16_t bf16_round(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float f16_load(uint16_t bits) {
    int e = bits >> 10 & 31, m = bits & 1023;
    float x = e == 31 ? (m ? NAN : INFINITY)
              : e     ? ldexpf((float)(1024 + m), e - 25)
                      : ldexpf((float)m, -24);
    return bits >> 15 ? -x : x;
}

static uint16_t f16_round(float x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    int e;
    float size = fabsf(x), fraction = frexpf(size, &e);
    if (isnan(x)) return sign | 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    if (size < 0x1p-14f) return (uint16_t)(sign | (int)rintf(ldexpf(size, 24)));
    /* a carry goes to the exponent */
    return (uint16_t)(sign | (((e + 13) << 10) + (int)rintf(ldexpf(fraction, 11))));
}

static size_t number_bytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

static float number_load(cudaDataType_t type, const void *p, size_t i) {
    if (type == CUDA_R_32F) return ((const float *)p)[i];
    if (type == CUDA_R_16BF) return bf16_load(((const uint16_t *)p)[i]);
    return f16_load(((const uint16_t *)p)[i]);
}

static void number_store(cudaDataType_t type, void *p, size_t i, float x) {
    if (type == CUDA_R_32F)
        ((float *)p)[i] = x;
    else if (type == CUDA_R_16BF)
        ((uint16_t *)p)[i] = bf16_round(x);
    else
        ((uint16_t *)p)[i] = f16_round(x);
}

// ==== 2. Descriptions ===========================================================================

/* The library's structs are opaque bytes; these structs are stored in them. */
enum { LAYOUT_MAGIC = 0x1a7, PRODUCT_MAGIC, PREFERENCE_MAGIC, ALGORITHM_MAGIC, HANDLE_MAGIC };

typedef struct layout {
    int magic, type, order, batch;
    uint64_t rows, cols;
    int64_t ld, stride; /* elements */
} layout;

typedef struct product {
    int magic, compute, scale, pointers, transa, transb, transc, epilogue, bias_type, aux_type;
    const void *bias; /* gradient epilogues write it */
    void *aux;
    int64_t bias_stride, aux_ld, aux_stride;
    int multiprocessors;
    int8_t fast;
} product;

typedef struct preference {
    int magic;
    uint32_t search, schemes, align[4]; /* alignments promised for A, B, C, D */
    uint64_t workspace;
} preference;

typedef struct algorithm {
    int magic;
    uint32_t align[4];
    uint64_t problem; /* a hash */
    uint64_t workspace;
} algorithm;

struct cublasLtContext { /* a handle points to it */
    int magic, device;
};

_Static_assert(sizeof(layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "a layout fits");
_Static_assert(sizeof(product) <= sizeof(cublasLtMatmulDescOpaque_t), "a product fits");
_Static_assert(sizeof(preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "a preference fits");
_Static_assert(sizeof(algorithm) <= sizeof(cublasLtMatmulAlgo_t), "an algorithm fits");

static struct { /* under fake.lock */
    int handles, none;
    const char *refusal;
} blas;

/* Why the last call was refused. */
static cublasStatus_t refuse(cublasStatus_t status, const char *why) {
    blas.refusal = why;
    return status;
}

const char *fake_cublas_refusal(void) { return blas.refusal; }
SETTER(fake_cublas_no_algorithm, int, blas.none = value)

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    cudaError_t error = enter();
    if (!error) {
        *handle = (cublasLtHandle_t)zeroed(sizeof **handle);
        (*handle)->magic = HANDLE_MAGIC;
        (*handle)->device = current_device;
        blas.handles++;
    }
    leave(cudaSuccess);
    return error ? CUBLAS_STATUS_NOT_INITIALIZED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    if (!handle || handle->magic != HANDLE_MAGIC) return CUBLAS_STATUS_NOT_INITIALIZED;
    enter();
    blas.handles--;
    free(handle);
    leave(cudaSuccess);
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

const char *cublasLtGetStatusName(cublasStatus_t status) {
    switch ((int)status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "unknown status";
}
const char *cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t opaque, size_t size,
    cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
    if (size < sizeof(layout)) return CUBLAS_STATUS_ALLOC_FAILED;
    layout l = {
        .magic = LAYOUT_MAGIC, .type = type, .batch = 1, .rows = rows, .cols = cols, .ld = ld
    };
    memcpy(opaque, &l, sizeof l);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(
    cublasLtMatmulDesc_t opaque, size_t size, cublasComputeType_t compute, cudaDataType_t scale) {
    if (size < sizeof(product)) return CUBLAS_STATUS_ALLOC_FAILED;
    product p = { .magic = PRODUCT_MAGIC,
        .compute = (int)compute,
        .scale = scale,
        .transa = CUBLAS_OP_N,
        .transb = CUBLAS_OP_N,
        .transc = CUBLAS_OP_N,
        .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
        .bias_type = -1,
        .aux_type = -1 };
    memcpy(opaque, &p, sizeof p);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(
    cublasLtMatmulPreference_t opaque, size_t size) {
    if (size < sizeof(preference)) return CUBLAS_STATUS_ALLOC_FAILED;
    preference p = { .magic = PREFERENCE_MAGIC, .align = { 256, 256, 256, 256 } };
    memcpy(opaque, &p, sizeof p);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t *l, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
    *l = (cublasLtMatrixLayout_t)zeroed(sizeof **l);
    return cublasLtMatrixLayoutInit(*l, type, rows, cols, ld);
}
cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t *p, cublasComputeType_t compute, cudaDataType_t scale) {
    *p = (cublasLtMatmulDesc_t)zeroed(sizeof **p);
    return cublasLtMatmulDescInit(*p, compute, scale);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    *p = (cublasLtMatmulPreference_t)zeroed(sizeof **p);
    return cublasLtMatmulPreferenceInit(*p);
}

static cublasStatus_t destroy(void *p) {
    free(p);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return destroy(l); }
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t p) { return destroy(p); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return destroy(p); }

/* Sets a member if the caller's size is the member's. */
static cublasStatus_t set(void *member, size_t size, const void *value, size_t value_size) {
    if (!value || !member || size != value_size)
        return refuse(
            CUBLAS_STATUS_INVALID_VALUE, "an attribute with a wrong size, or one unknown here");
    memcpy(member, value, size);
    return CUBLAS_STATUS_SUCCESS;
}
#define SET(member) return set(&(member), sizeof(member), value, size)

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t opaque,
    cublasLtMatrixLayoutAttribute_t name, const void *value, size_t size) {
    layout *l = (layout *)opaque;
    switch ((int)name) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: SET(l->type);
    case CUBLASLT_MATRIX_LAYOUT_ORDER: SET(l->order);
    case CUBLASLT_MATRIX_LAYOUT_ROWS: SET(l->rows);
    case CUBLASLT_MATRIX_LAYOUT_COLS: SET(l->cols);
    case CUBLASLT_MATRIX_LAYOUT_LD: SET(l->ld);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: SET(l->batch);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: SET(l->stride);
    }
    return set(NULL, 0, value, size);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t opaque,
    cublasLtMatmulDescAttributes_t name, const void *value, size_t size) {
    product *p = (product *)opaque;
    switch ((int)name) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: SET(p->compute);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE: SET(p->scale);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE: SET(p->pointers);
    case CUBLASLT_MATMUL_DESC_TRANSA: SET(p->transa);
    case CUBLASLT_MATMUL_DESC_TRANSB: SET(p->transb);
    case CUBLASLT_MATMUL_DESC_TRANSC: SET(p->transc);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: SET(p->epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: SET(p->bias);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: SET(p->bias_stride);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: SET(p->bias_type);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: SET(p->aux);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: SET(p->aux_ld);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: SET(p->aux_stride);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: SET(p->aux_type);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: SET(p->multiprocessors);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM: SET(p->fast);
    }
    return set(NULL, 0, value, size);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t opaque,
    cublasLtMatmulPreferenceAttributes_t name, const void *value, size_t size) {
    preference *p = (preference *)opaque;
    switch ((int)name) {
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE: SET(p->search);
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: SET(p->workspace);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: SET(p->schemes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: SET(p->align[0]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: SET(p->align[1]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: SET(p->align[2]);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: SET(p->align[3]);
    }
    return set(NULL, 0, value, size);
}

// ==== 3. Checks =================================================================================

typedef struct job {
    product p;
    layout a, b, c, d;
    uint64_t m, n, k;
    float alpha, beta;
    const char *A, *B, *C;
    char *D, *workspace;
    size_t workspace_bytes;
} job;

static int has(const job *j, int epilogue) { return (j->p.epilogue & epilogue) == epilogue; }
static int is_number(int type) {
    return type == CUDA_R_32F || type == CUDA_R_16BF || type == CUDA_R_16F;
}

static cublasStatus_t check_types(const job *j) {
    int f32 = j->p.compute == CUBLAS_COMPUTE_32F || j->p.compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
              j->p.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (!f32 || j->p.scale != CUDA_R_32F)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "computes in f32 only");
    if (j->p.pointers != CUBLASLT_POINTER_MODE_HOST)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "alpha and beta lie on the host");
    if (!is_number(j->a.type) || j->a.type != j->b.type || j->c.type != j->d.type ||
        (j->d.type != j->a.type && j->d.type != CUDA_R_32F))
        return refuse(
            CUBLAS_STATUS_NOT_SUPPORTED, "A and B of one type, C and D of that type or f32");
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_layout(const layout *l) {
    if (l->rows == 0 || l->cols == 0) return refuse(CUBLAS_STATUS_INVALID_VALUE, "an empty matrix");
    if (l->order != CUBLASLT_ORDER_COL && l->order != CUBLASLT_ORDER_ROW)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "an order other than by columns or rows");
    if (l->ld < (int64_t)(l->order == CUBLASLT_ORDER_COL ? l->rows : l->cols))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "a leading dimension below the matrix");
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_epilogue(const job *j) {
    int e = j->p.epilogue;
    if (e != CUBLASLT_EPILOGUE_DEFAULT && e != CUBLASLT_EPILOGUE_RELU &&
        e != CUBLASLT_EPILOGUE_BIAS && e != CUBLASLT_EPILOGUE_RELU_BIAS &&
        e != CUBLASLT_EPILOGUE_GELU && e != CUBLASLT_EPILOGUE_GELU_AUX &&
        e != CUBLASLT_EPILOGUE_GELU_BIAS && e != CUBLASLT_EPILOGUE_GELU_AUX_BIAS &&
        e != CUBLASLT_EPILOGUE_DGELU && e != CUBLASLT_EPILOGUE_DGELU_BGRAD &&
        e != CUBLASLT_EPILOGUE_BGRADA && e != CUBLASLT_EPILOGUE_BGRADB)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "an epilogue that is not in fake_cublaslt.h");
    if (!has(j, 128)) return CUBLAS_STATUS_SUCCESS;
    if (j->p.aux_ld < (int64_t)j->m || j->p.aux_ld % 8 != 0 || j->p.aux_stride % 8 != 0)
        return refuse(CUBLAS_STATUS_INVALID_VALUE,
            "aux's leading dimension or stride: multiples of 8, not below m");
    return CUBLAS_STATUS_SUCCESS;
}

/* Reads the descriptions into j. */
static cublasStatus_t describe(job *j, cublasLtHandle_t handle, const void *p, const void *a,
    const void *b, const void *c, const void *d) {
    if (!handle || handle->magic != HANDLE_MAGIC)
        return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "no handle");
    if (!p || !a || !b || !c || !d)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "a description is NULL");
    memcpy(&j->p, p, sizeof j->p);
    memcpy(&j->a, a, sizeof j->a);
    memcpy(&j->b, b, sizeof j->b);
    memcpy(&j->c, c, sizeof j->c);
    memcpy(&j->d, d, sizeof j->d);
    const layout *all[] = { &j->a, &j->b, &j->c, &j->d };
    for (int i = 0; i < 4; i++) {
        if (all[i]->magic != LAYOUT_MAGIC || j->p.magic != PRODUCT_MAGIC)
            return refuse(CUBLAS_STATUS_INVALID_VALUE, "a description was never set up");
        cublasStatus_t status = check_layout(all[i]);
        if (status) return status;
        if (all[i]->batch != j->d.batch)
            return refuse(CUBLAS_STATUS_INVALID_VALUE, "batch counts differ");
    }
    if (j->d.batch < 1 || (j->d.batch > 1 && j->d.stride == 0))
        return refuse(
            CUBLAS_STATUS_INVALID_VALUE, "a batch count below 1, or all of D in one place");
    j->m = j->p.transa == CUBLAS_OP_N ? j->a.rows : j->a.cols;
    j->k = j->p.transa == CUBLAS_OP_N ? j->a.cols : j->a.rows;
    j->n = j->p.transb == CUBLAS_OP_N ? j->b.cols : j->b.rows;
    uint64_t k = j->p.transb == CUBLAS_OP_N ? j->b.rows : j->b.cols;
    if (k != j->k || j->c.rows != j->m || j->c.cols != j->n || j->d.rows != j->m ||
        j->d.cols != j->n)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "dimensions do not fit each other");
    cublasStatus_t status = check_types(j);
    return status ? status : check_epilogue(j);
}

/* A hash of the problem that an algorithm was chosen for. */
static uint64_t problem_hash(const job *j) {
    const uint64_t words[] = { j->m, j->n, j->k, (uint64_t)j->d.batch, (uint64_t)j->a.type,
        (uint64_t)j->d.type, (uint64_t)j->p.transa, (uint64_t)j->p.transb,
        (uint64_t)j->p.epilogue };
    uint64_t hash = 0;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) hash = mix(hash + words[i] + 1);
    return hash;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t p,
    cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
    cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t opaque, int wanted,
    cublasLtMatmulHeuristicResult_t *results, int *found) {
    job j = { .alpha = 1 };
    cudaError_t error = enter();
    *found = 0;
    cublasStatus_t status = describe(&j, handle, p, a, b, c, d);
    const preference *wish = (const preference *)opaque;
    if (!status && (!wish || wish->magic != PREFERENCE_MAGIC || wanted < 1))
        status = refuse(CUBLAS_STATUS_INVALID_VALUE, "no preference, or no algorithm wanted");
    if (!status && (error || blas.none))
        status = refuse(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm, as was asked for");
    if (!status) {
        algorithm chosen = { .magic = ALGORITHM_MAGIC, .problem = problem_hash(&j) };
        memcpy(chosen.align, wish->align, sizeof chosen.align);
        chosen.workspace = wish->workspace < 65536 ? wish->workspace : 65536;
        memset(results, 0, sizeof *results);
        memcpy(&results->algo, &chosen, sizeof chosen);
        results->workspaceSize = chosen.workspace;
        results->state = CUBLAS_STATUS_SUCCESS;
        results->wavesCount = 1;
        *found = 1;
    }
    leave(cudaSuccess);
    return status;
}

/* Returns 1 if an operation of the device may use the memory. */
static int device_reads(const void *p, size_t bytes, int device, const char *what) {
    const block *b = block_of(p);
    if (!b)
        mistake("%s: %p is not known to device %d", what, (void *)p, device);
    else if ((const char *)p + bytes > b->p + b->bytes)
        mistake(
            "%s: %zu bytes at %p leave their allocation of %zu", what, bytes, (void *)p, b->bytes);
    else if (b->kind == BLOCK_DEVICE && b->device != device &&
             !fake.devices[device].peer[b->device])
        mistake("%s: %p is device %d's memory, the operation device %d's", what, (void *)p,
            b->device, device);
    else
        return 1;
    return 0;
}

static size_t layout_bytes(const layout *l) {
    int64_t outer = (int64_t)(l->order == CUBLASLT_ORDER_COL ? l->cols : l->rows);
    int64_t inner = (int64_t)(l->order == CUBLASLT_ORDER_COL ? l->rows : l->cols);
    return (size_t)((l->batch - 1) * l->stride + (outer - 1) * l->ld + inner) *
           number_bytes((cudaDataType_t)l->type);
}

static cublasStatus_t check_memory(job *j, const algorithm *algo, int device) {
    const char *at[] = { j->A, j->B, j->C, j->D }, *names[] = { "A", "B", "C", "D" };
    const layout *all[] = { &j->a, &j->b, &j->c, &j->d };
    for (int i = 0; i < 4; i++) {
        if (i == 2 && j->beta == 0) continue;
        char what[32];
        snprintf(what, sizeof what, "cublasLtMatmul, %s", names[i]);
        if (!at[i]) return refuse(CUBLAS_STATUS_INVALID_VALUE, "a matrix is NULL");
        if ((uintptr_t)at[i] % (algo ? algo->align[i] : number_bytes((cudaDataType_t)all[i]->type)))
            return refuse(
                CUBLAS_STATUS_INVALID_VALUE, "a matrix is not aligned as the preference promised");
        if (!device_reads(at[i], layout_bytes(all[i]), device, what))
            return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    if (j->C == j->D && j->beta != 0 &&
        (j->c.ld != j->d.ld || j->c.order != j->d.order || j->c.stride != j->d.stride))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "C is D, in another layout");
    int biased = has(j, CUBLASLT_EPILOGUE_BIAS) || j->p.epilogue & (16 | 256 | 512);
    if (j->p.bias_type < 0) j->p.bias_type = j->d.type;
    if (j->p.aux_type < 0) j->p.aux_type = j->d.type;
    if (!is_number(j->p.bias_type) || !is_number(j->p.aux_type))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "the type of bias or aux");
    size_t bias = (size_t)(j->d.batch - 1) * (size_t)j->p.bias_stride + (has(j, 512) ? j->n : j->m);
    size_t aux = (size_t)(j->d.batch - 1) * (size_t)j->p.aux_stride +
                 (size_t)(j->n - 1) * (size_t)j->p.aux_ld + j->m;
    if ((biased && !j->p.bias) || (has(j, 128) && !j->p.aux))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "the epilogue's vector or matrix is NULL");
    if (biased && !device_reads(j->p.bias, bias * number_bytes((cudaDataType_t)j->p.bias_type),
                      device, "bias"))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (has(j, 128) &&
        !device_reads(j->p.aux, aux * number_bytes((cudaDataType_t)j->p.aux_type), device, "aux"))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (algo && (j->workspace_bytes < algo->workspace || (algo->workspace && !j->workspace)))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "less workspace than the algorithm needs");
    if (algo) j->workspace_bytes = algo->workspace; /* more is not touched */
    if (j->workspace_bytes &&
        ((uintptr_t)j->workspace % 256 ||
            !device_reads(j->workspace, j->workspace_bytes, device, "workspace")))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "the workspace's alignment or place");
    return CUBLAS_STATUS_SUCCESS;
}

// ==== 4. The product ============================================================================

/* Packed operands: for each k, 16 rows of op(A) are contiguous, padded with zeros at the end;
   columns of op(B) are contiguous. */
enum { PANEL = 16 };
typedef float lanes __attribute__((vector_size(16)));

static float element(const layout *l, const char *p, int transposed, uint64_t row, uint64_t col) {
    if (transposed) {
        uint64_t t = row;
        row = col;
        col = t;
    }
    size_t ld = (size_t)l->ld;
    return number_load((cudaDataType_t)l->type, p,
        l->order == CUBLASLT_ORDER_COL ? row + col * ld : row * ld + col);
}

static float *packed(size_t n) {
    void *p;
    if (posix_memalign(&p, 64, n * sizeof(float)) != 0) abort();
    return (float *)p;
}

static float *pack_a(const job *j, const char *A) {
    uint64_t panels = (j->m + PANEL - 1) / PANEL;
    float *a = packed(panels * PANEL * j->k);
    for (uint64_t i = 0; i < panels * PANEL; i++)
        for (uint64_t k = 0; k < j->k; k++)
            a[(i / PANEL * j->k + k) * PANEL + i % PANEL] =
                i < j->m ? element(&j->a, A, j->p.transa != CUBLAS_OP_N, i, k) : 0;
    return a;
}

static float *pack_b(const job *j, const char *B) {
    float *b = packed(j->n * j->k);
    for (uint64_t col = 0; col < j->n; col++)
        for (uint64_t k = 0; k < j->k; k++)
            b[col * j->k + k] = element(&j->b, B, j->p.transb != CUBLAS_OP_N, k, col);
    return b;
}

/* Computes 16 rows of two columns, because so many sums fit into registers. */
static void panel_product(
    const float *panel, const float *b0, const float *b1, uint64_t k, lanes out[8]) {
    lanes s0 = { 0 }, s1 = s0, s2 = s0, s3 = s0, t0 = s0, t1 = s0, t2 = s0, t3 = s0;
    for (uint64_t i = 0; i < k; i++) {
        const lanes *a = (const lanes *)(panel + i * PANEL);
        float x = b0[i], y = b1[i];
        s0 += a[0] * x, s1 += a[1] * x, s2 += a[2] * x, s3 += a[3] * x;
        t0 += a[0] * y, t1 += a[1] * y, t2 += a[2] * y, t3 += a[3] * y;
    }
    out[0] = s0, out[1] = s1, out[2] = s2, out[3] = s3;
    out[4] = t0, out[5] = t1, out[6] = t2, out[7] = t3;
}

/* The library's GELU is the tanh one. */
static float gelu(float x) {
    return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}
static float gelu_slope(float x) {
    float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

typedef struct matrices { /* one of the batch */
    const char *C;
    char *D, *bias, *aux;
    float *gradient; /* sums for the bias gradient */
} matrices;

static void finish(const job *j, const matrices *at, uint64_t row, uint64_t col, float sum) {
    float x = j->alpha * sum;
    size_t aux = row + col * (size_t)j->p.aux_ld;
    size_t d = j->d.order == CUBLASLT_ORDER_COL ? row + col * (size_t)j->d.ld
                                                : row * (size_t)j->d.ld + col;
    if (j->beta != 0) x += j->beta * element(&j->c, at->C, 0, row, col);
    if (has(j, CUBLASLT_EPILOGUE_BIAS))
        x += number_load((cudaDataType_t)j->p.bias_type, at->bias, row);
    if (has(j, CUBLASLT_EPILOGUE_GELU_AUX))
        number_store((cudaDataType_t)j->p.aux_type, at->aux, aux, x);
    if (has(j, CUBLASLT_EPILOGUE_DGELU))
        x *= gelu_slope(number_load((cudaDataType_t)j->p.aux_type, at->aux, aux));
    else if (has(j, CUBLASLT_EPILOGUE_GELU))
        x = gelu(x);
    else if (has(j, CUBLASLT_EPILOGUE_RELU))
        x = x > 0 ? x : 0;
    if (has(j, 16)) at->gradient[row] += x;
    number_store((cudaDataType_t)j->d.type, at->D, d, x);
}

static void store_gradient(const job *j, const matrices *at, const float *a, const float *b) {
    int of_b = has(j, CUBLASLT_EPILOGUE_BGRADB);
    uint64_t n = of_b ? j->n : j->m;
    for (uint64_t i = 0; i < n; i++) {
        float sum = at->gradient[i];
        for (uint64_t k = 0; k < j->k && !has(j, 16); k++)
            sum += of_b ? b[i * j->k + k] : a[(i / PANEL * j->k + k) * PANEL + i % PANEL];
        number_store((cudaDataType_t)j->p.bias_type, at->bias, i, sum);
    }
}

static const char *batch_at(const layout *l, const char *p, int i) {
    return p ? p + (int64_t)i * l->stride * (int64_t)number_bytes((cudaDataType_t)l->type) : NULL;
}

static void multiply(const job *j, int batch) {
    float *a = pack_a(j, batch_at(&j->a, j->A, batch)),
          *b = pack_b(j, batch_at(&j->b, j->B, batch));
    size_t bias = (size_t)(batch * j->p.bias_stride) * number_bytes((cudaDataType_t)j->p.bias_type);
    size_t aux = (size_t)(batch * j->p.aux_stride) * number_bytes((cudaDataType_t)j->p.aux_type);
    matrices at = { .C = batch_at(&j->c, j->C, batch),
        .D = (char *)batch_at(&j->d, j->D, batch),
        .bias = j->p.bias ? (char *)j->p.bias + bias : NULL,
        .aux = j->p.aux ? (char *)j->p.aux + aux : NULL,
        .gradient = (float *)zeroed((j->m + j->n) * sizeof(float)) };
    for (uint64_t row = 0; row < j->m; row += PANEL)
        for (uint64_t col = 0; col < j->n; col += 2) {
            float sums[2][PANEL];
            lanes out[8];
            uint64_t other = col + 1 < j->n ? col + 1 : col;
            panel_product(a + row * j->k, b + col * j->k, b + other * j->k, j->k, out);
            memcpy(sums, out, sizeof sums);
            for (uint64_t c = col; c <= other; c++)
                for (uint64_t i = 0; i < PANEL && row + i < j->m; i++)
                    finish(j, &at, row + i, c, sums[c - col][i]);
        }
    if (j->p.epilogue & (16 | 256 | 512)) store_gradient(j, &at, a, b);
    free(at.gradient);
    free(a);
    free(b);
}

static void matmul_run(void *arg) {
    const job *j = (const job *)arg;
    /* the workspace's content is lost */
    if (j->workspace_bytes) memset(j->workspace, 0xA5, j->workspace_bytes);
    for (int i = 0; i < j->d.batch; i++) multiply(j, i);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t p, const void *alpha,
    const void *A, cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b,
    const void *beta, const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
    const cublasLtMatmulAlgo_t *opaque, void *workspace, size_t workspace_bytes,
    cudaStream_t stream) {
    cudaError_t error = enter();
    cudaStream_t s = error ? NULL : stream_of(stream);
    job *j = (job *)zeroed(sizeof *j);
    cublasStatus_t status = s ? describe(j, handle, p, a, b, c, d) : CUBLAS_STATUS_EXECUTION_FAILED;
    algorithm algo;
    if (opaque) memcpy(&algo, opaque, sizeof algo);
    if (!status && (!alpha || !beta))
        status = refuse(CUBLAS_STATUS_INVALID_VALUE, "alpha or beta is NULL");
    if (!status && opaque && (algo.magic != ALGORITHM_MAGIC || algo.problem != problem_hash(j)))
        status = refuse(CUBLAS_STATUS_INVALID_VALUE, "the algorithm was found for another product");
    if (!status && (handle->device != s->device || s->device != current_device))
        status = refuse(CUBLAS_STATUS_EXECUTION_FAILED,
            "handle, stream and current device are not one device's");
    if (!status) {
        j->alpha = *(const float *)alpha;
        j->beta = *(const float *)beta;
        j->A = (const char *)A, j->B = (const char *)B, j->C = (const char *)C, j->D = (char *)D;
        j->workspace = (char *)workspace;
        j->workspace_bytes = workspace_bytes;
        status = check_memory(j, opaque ? &algo : NULL, s->device);
    }
    if (!status)
        enqueue_run(s, "a matrix product", matmul_run, j, free);
    else {
        free(j);
        if (!error) mistake("cublasLtMatmul: %s", blas.refusal ? blas.refusal : "a wrong stream");
    }
    leave(cudaSuccess);
    return status;
}
