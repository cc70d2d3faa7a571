/* fuzz_manifest.c - a checkpoint with any bytes as its manifest. If bit 0 of the first byte is set,
   the manifest gets a valid digest, so that the code after the check of the digest is reached. The
   other files are those of a valid checkpoint. The manifest must be refused with an error text, or
   the loaded values must have the bits that were saved. */
#include "tests/fuzz/fuzz.h"
#include "tests/zero/disk_sim.h"

static struct {
    disk d;
    disk_seat seat;
    dt_io io;
    float values[6], moments[6];
    char manifest[4096];
    size_t bytes;
} fuzz_saved;

typedef struct manifest_job {
    dt_ctx *ctx;
    dt_tensor *w;
    dt_zero *zero;
    dt_checkpoint *checkpoint;
    double samples;
    dt_extra_state saved;
} manifest_job;

static void manifest_begin(manifest_job *j, const char *dir) {
    dt_host host = *dt_host_default();
    host.log = fuzz_silent;
    j->ctx = dt_ctx_make((dt_ctx_desc){ .seed = 1, .host = &host, .io = &fuzz_saved.io });
    j->w = dt_param(j->ctx, "w", DT_SHAPE(2, 3), DT_NORMAL(0.5));
    j->zero = dt_zero_make(j->ctx, (dt_zero_desc){ .stage = 0 });
    j->samples = 7;
    j->saved = (dt_extra_state){ "samples", &j->samples, 1 };
    j->checkpoint = dt_checkpoint_open(j->zero, (dt_checkpoint_desc){ .dir = dir,
                                                    .extra_state = &j->saved,
                                                    .n_extra_state = 1,
                                                    .config = "text",
                                                    .config_json = "{}" });
}

static void manifest_end(manifest_job *j) {
    dt_checkpoint_close(j->checkpoint);
    dt_ctx_free(j->ctx);
}

/* Makes one step, saves it, and keeps the values that a load must find. */
static void manifest_make(void) {
    manifest_job j;
    disk_make(&fuzz_saved.d);
    fuzz_saved.seat.disk = &fuzz_saved.d;
    fuzz_saved.seat.root = "";
    fuzz_saved.io = disk_io(&fuzz_saved.seat);
    manifest_begin(&j, "d");
    float x[3] = { 1, 2, 3 };
    dt_tensor *y = dt_linear(dt_input(j.ctx, DT_F32, DT_SHAPE(1, 3), x), j.w, NULL);
    dt_backward(dt_mse(y, dt_input(j.ctx, DT_F32, DT_SHAPE(1, 2), x), 1));
    dt_zero_step(j.zero, 0.1);
    dt_reset(j.ctx);
    fuzz_must(dt_checkpoint_save(j.checkpoint) == DT_OK, dt_error_text(j.ctx));
    dt_read(j.w, fuzz_saved.values);
    dt_zero_state(j.zero, 0, j.w, fuzz_saved.moments);
    int fd = fuzz_saved.io.open(&fuzz_saved.seat, "d/step-1/manifest.json", DT_IO_READ);
    int64_t n = fuzz_saved.io.pread(
        &fuzz_saved.seat, fd, fuzz_saved.manifest, sizeof fuzz_saved.manifest, 0);
    fuzz_saved.io.close(&fuzz_saved.seat, fd);
    fuzz_must(n > 100 && n < (int64_t)sizeof fuzz_saved.manifest, "the manifest cannot be read");
    fuzz_saved.bytes = (size_t)n;
    manifest_end(&j);
}

static void manifest_put(const unsigned char *data, size_t bytes, int seal) {
    char end[DT__MANIFEST_END + 1];
    int fd = fuzz_saved.io.open(&fuzz_saved.seat, "d/step-1/manifest.json", DT_IO_WRITE);
    fuzz_saved.io.resize(&fuzz_saved.seat, fd, 0);
    fuzz_saved.io.pwrite(&fuzz_saved.seat, fd, data, bytes, 0);
    dt__manifest_end(end, (const char *)data, bytes);
    if (seal) fuzz_saved.io.pwrite(&fuzz_saved.seat, fd, end, DT__MANIFEST_END, (int64_t)bytes);
    fuzz_saved.io.close(&fuzz_saved.seat, fd);
    fuzz_saved.d.n_ops = 0; /* discards the log of writes, which only simulated power cuts need */
    fuzz_saved.d.n_bytes = 0;
}

static void fuzz_one(const unsigned char *data, size_t bytes) {
    manifest_job j;
    float values[6], moments[6];
    if (bytes == 0) return;
    if (!fuzz_saved.bytes) manifest_make();
    manifest_put(data + 1, bytes - 1, data[0] % 2);
    manifest_begin(&j, NULL);
    int64_t step = dt_checkpoint_load(j.checkpoint, data[0] % 4 < 2 ? "d" : "d/step-1");
    fuzz_must((step < 0) == (dt_error(j.ctx) != DT_OK), "no error text");
    if (step > 0 || (step == 0 && dt_checkpoint_path(j.checkpoint)[0])) {
        dt_read(j.w, values);
        dt_zero_state(j.zero, 0, j.w, moments);
        fuzz_must(
            memcmp(values, fuzz_saved.values, sizeof values) == 0, "other values were loaded");
        fuzz_must(
            memcmp(moments, fuzz_saved.moments, sizeof moments) == 0, "other moments were loaded");
    }
    manifest_end(&j);
    fuzz_must(fuzz_saved.d.open == 0, "a descriptor is leaked");
}
