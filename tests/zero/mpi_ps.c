/* mpi_ps.c - started by test_mpi.sh with mpirun: a parameter server of 2 workers and 2 servers

       mpirun -np 4 mpi_ps DIR       trains, saves to the folder DIR, loads it and goes on; rank 0
                                     prints the rows' digest
       mpi_ps DIR threads            the same for ranks that are threads */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_zero.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { KEYS = 50, WIDTH = 6, N = 20 };

typedef struct job {
    const char *dir;
    int steps, load, save;
    float rows[KEYS * WIDTH];
} job;

static dt_status work(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    const int rank = dt_ctx_rank(ctx);
    uint64_t keys[KEYS];
    float rows[KEYS * WIDTH];
    dt_ps *ps = dt_ps_make(ctx, (dt_ps_desc){ .servers = 2 });
    int t = dt_ps_table(
        ps, (dt_table_desc){
                .name = "t", .width = WIDTH, .init = DT_NORMAL(1), .optimizer = DT_TABLE_ADAGRAD });
    int64_t clock = j->load ? dt_ps_load(ps, j->dir) : 0;
    if (dt_ps_is_server(ps)) return dt_ps_serve(ps);
    for (int step = (int)clock; step < j->steps && dt_error(ctx) == DT_OK; step++) {
        for (int i = 0; i < N; i++)
            keys[i] = (uint64_t)((i * 7 + step * 3 + rank * 11) * (i + 5) % KEYS);
        dt_ps_wait(ps, dt_ps_pull_start(ps, t, keys, N, rows));
        for (int i = 0; i < N * WIDTH; i++) rows[i] = rows[i] / 3 + (float)(i % 7) / 5 - 0.5f;
        dt_ps_add(ps, t, keys, N, rows);
        dt_ps_step(ps, 0.1);
    }
    if (j->save) dt_ps_save(ps, j->dir, (dt_ps_save_desc){ 0, 0 });
    for (int i = 0; i < KEYS; i++) keys[i] = (uint64_t)i;
    dt_ps_wait(ps, dt_ps_pull_start(ps, t, keys, KEYS, rows));
    if (rank == 0) memcpy(j->rows, rows, sizeof rows);
    dt_ps_end(ps);
    return dt_error(ctx);
}

int main(int argc, char **argv) {
    const char *what = argc > 2 ? argv[2] : "";
    int is_mpi = strcmp(what, "threads") != 0, provided = 0, rank = 0;
    job j = { .dir = argc > 1 ? argv[1] : ".", .steps = 3, .save = 1 };
    dt_report report;
    if (is_mpi) { /* the program begins MPI, because it has two runs */
        MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    }
    for (int run = 0; run < 2; run++) {
        memset(&report, 0, sizeof report);
        dt_status status = dt_run((dt_run_desc){ .ranks = 4,
                                      .backend = is_mpi ? DT_BACKEND_MPI : DT_BACKEND_THREADS,
                                      .timeout_s = 20,
                                      .report = &report },
            work, &j);
        if (status != DT_OK) return printf("FAIL %s\n", report.text), 1;
        j.load = 1;
        j.save = 0;
        j.steps = 6;
    }
    uint64_t digest = dt__digest(1, j.rows, sizeof j.rows);
    if (rank == 0) printf("rows %016llx\n", (unsigned long long)digest);
    if (is_mpi) MPI_Finalize();
    return 0;
}
