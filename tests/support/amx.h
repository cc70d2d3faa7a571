/* amx.h - the tile operations of dt_tensor.h in plain C, for processors without AMX
   Public domain or MIT, at your choice; see LICENSE.

   Include before dt_tensor.h. Follows the operation sections of Intel's manual. An operation on
   tiles that are not configured ends the program, as the processor does. Every thread has its own
   tiles. */
#ifndef DT_TESTS_AMX_H
#define DT_TESTS_AMX_H
#if defined(__x86_64__)
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef AMX_IS_READY
#define AMX_IS_READY 0 /* 1: every product of bf16 is computed with emulated tiles */
#endif

typedef union amx_tile {
    float f[16][16];
    uint16_t pair[16][32];
} amx_tile;

static __thread struct {
    int configured;
    amx_tile tile[8];
} amx;
static int amx_in_use; /* threads that have configured tiles and have not released them */

static amx_tile *amx_get(int t) {
    if (amx.configured) return &amx.tile[t];
    fprintf(stderr, "amx: tile %d is used, but not configured\n", t);
    abort();
}

static void amx_configure(const void *config) {
    const uint8_t *c = (const uint8_t *)config;
    int wrong = c[0] != 1;
    for (int i = 1; i < 16; i++) wrong += c[i] != 0;
    for (int t = 0; t < 16; t++) {
        wrong += c[16 + 2 * t] != (t < 8 ? 64 : 0) || c[17 + 2 * t] != 0;
        wrong += c[48 + t] != (t < 8 ? 16 : 0);
    }
    if (wrong) {
        fprintf(stderr, "amx: the configuration is not 8 tiles of 16 rows of 64 bytes\n");
        abort();
    }
    if (!amx.configured) __atomic_fetch_add(&amx_in_use, 1, __ATOMIC_RELAXED);
    amx.configured = 1;
    memset(amx.tile, 0, sizeof amx.tile);
}

static void amx_release(void) {
    if (amx.configured) __atomic_fetch_sub(&amx_in_use, 1, __ATOMIC_RELAXED);
    amx.configured = 0;
}

static void amx_load(int t, const void *from, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(amx_get(t)->f[r], (const char *)from + r * stride, 64);
}

static void amx_store(int t, void *to, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char *)to + r * stride, amx_get(t)->f[r], 64);
}

/* Denormals are zeros with their sign. */
static float amx_flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

static float amx_widen(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return amx_flush(x);
}

/* The even and the odd products have a chain of fused multiply-adds each. Then both sums are added,
   and the result to the tile. */
__attribute__((target("fma"))) static void amx_dot(int to, int left, int right) {
    amx_tile *c = amx_get(to), *a = amx_get(left), *b = amx_get(right);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float sum[2] = { 0, 0 };
            for (int k = 0; k < 32; k++) {
                float x = amx_widen(a->pair[m][k]), y = amx_widen(b->pair[k / 2][2 * n + k % 2]);
                sum[k % 2] = amx_flush(__builtin_fmaf(x, y, sum[k % 2]));
            }
            c->f[m][n] = amx_flush(amx_flush(c->f[m][n]) + amx_flush(sum[0] + sum[1]));
        }
}

static inline int dt__amx_is_ready(void) { return AMX_IS_READY; }

#define DT__AMX
#define DT__TILE_CONFIGURE(config) amx_configure(config)
#define DT__TILE_RELEASE() amx_release()
#define DT__TILE_ZERO(t) memset(amx_get(t), 0, sizeof(amx_tile))
#define DT__TILE_LOAD(t, from, stride) amx_load(t, from, stride)
#define DT__TILE_STORE(t, to, stride) amx_store(t, to, stride)
#define DT__TILE_DOT(c, a, b) amx_dot(c, a, b)
#endif
#endif
