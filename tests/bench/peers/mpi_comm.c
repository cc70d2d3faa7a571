/* mpi_comm.c - bench_comm's operations in MPI - public domain or MIT, at your choice

       mpicc -O3 mpi_comm.c -o mpi_comm && mpirun -n N ./mpi_comm OPERATION SECONDS BYTES...

   OPERATION is all-reduce, all-gather, reduce-scatter, all-to-all or send-recv, f32 and sums, send
   and receive buffers apart. BYTES are those of the full buffer: of all-gather what one rank
   receives, of reduce-scatter and all-to-all what it sends. Each size is called for SECONDS, in
   bursts of a twentieth of it, as bench_comm.c does. Rank 0 prints a line "BYTES,US" a size: the
   time of one call in the best burst; for send-recv half a round trip. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BURSTS = 20, LEAST_BURSTS = 4 };

static void once(const char *op, float *send, float *recv, int count, int rank, int ranks) {
    int share = count / ranks;
    if (strcmp(op, "all-reduce") == 0) {
        MPI_Allreduce(send, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (strcmp(op, "all-gather") == 0) {
        MPI_Allgather(send, share, MPI_FLOAT, recv, share, MPI_FLOAT, MPI_COMM_WORLD);
    } else if (strcmp(op, "reduce-scatter") == 0) {
        MPI_Reduce_scatter_block(send, recv, share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (strcmp(op, "all-to-all") == 0) {
        MPI_Alltoall(send, share, MPI_FLOAT, recv, share, MPI_FLOAT, MPI_COMM_WORLD);
    } else if (rank % 2 == 0) { /* ping-pong between pairs of ranks */
        MPI_Send(send, count, MPI_FLOAT, rank + 1, 0, MPI_COMM_WORLD);
        MPI_Recv(recv, count, MPI_FLOAT, rank + 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        MPI_Recv(recv, count, MPI_FLOAT, rank - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(send, count, MPI_FLOAT, rank - 1, 0, MPI_COMM_WORLD);
    }
}

static double now(void) { /* a clock that all processes share */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of one call in the best burst, from the first rank's start to the last one's end. */
static double measure(
    const char *op, double seconds, float *send, float *recv, int count, int rank, int ranks) {
    double total = 0, best = 1e30, burst = seconds / BURSTS;
    int bursts = 0;
    once(op, send, recv, count, rank, ranks);
    for (int calls = 1; total < seconds || bursts < LEAST_BURSTS;) {
        /* the latest end, and the negated earliest start */
        double mine[2], most[2];
        MPI_Barrier(MPI_COMM_WORLD);
        mine[1] = -now();
        for (int i = 0; i < calls; i++) once(op, send, recv, count, rank, ranks);
        mine[0] = now();
        MPI_Allreduce(mine, most, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        double took = most[0] + most[1];
        if (took < burst) {
            double grow = took > 0 ? 1.2 * burst / took : 8;
            calls = (int)(calls * (grow > 8 ? 8 : grow)) + 1;
            continue;
        }
        total += took;
        bursts++;
        if (took / calls < best) best = took / calls;
    }
    return best / (strcmp(op, "send-recv") == 0 ? 2 : 1);
}

int main(int argc, char **argv) {
    int rank = 0, ranks = 1, most = 1;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 3; i < argc; i++)
        if (atoi(argv[i]) / 4 > most) most = atoi(argv[i]) / 4;
    float *send = (float *)aligned_alloc(4096, ((size_t)most * 4 + 4095) / 4096 * 4096);
    float *recv = (float *)aligned_alloc(4096, ((size_t)most * 4 + 4095) / 4096 * 4096);
    if (argc < 4 || !send || !recv) MPI_Abort(MPI_COMM_WORLD, 2);
    for (int i = 0; i < most; i++) send[i] = (float)((i * 3 + rank) % 8), recv[i] = 0;
    for (int i = 3; i < argc; i++) {
        int bytes = atoi(argv[i]);
        double s = measure(argv[1], atof(argv[2]), send, recv, bytes / 4, rank, ranks);
        if (rank == 0) printf("%d,%.4f\n", bytes, 1e6 * s), fflush(stdout);
    }
    free(send);
    free(recv);
    MPI_Finalize();
    return 0;
}
