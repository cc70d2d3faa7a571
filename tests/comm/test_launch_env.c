/* test_launch_env.c - dt_launch_find: the variables that launchers set, their precedence, and
   invalid values

   Each row is a complete environment and the expected result. Rows with the variables of real
   launchers (Debian's slurm-wlm 22.05, Open MPI 4.1, MPICH 4.0, torchrun of PyTorch 2) are marked;
   tests/comm/test_launch.sh starts programs with the launchers themselves. */
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/support/check.h"

#include <stdlib.h>

/* Replaces the environment by words such as "A=1 B=2"; '~' means a space. */
static void environment(const char *words) {
    char copy[2048], *save = NULL;
    clearenv();
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok_r(copy, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        char *value = strchr(word, '=');
        *value++ = 0;
        for (char *c = value; *c; c++)
            if (*c == '~') *c = ' ';
        setenv(word, value, 1);
    }
}

typedef struct row {
    const char *words;
    int rank, size, local_rank, local_size;
    const char *rendezvous, *by, *text; /* text: a part of the expected text */
} row;

#define STEP "SLURM_STEP_ID=0 SLURM_JOB_ID=77 "
#define TORCHRUN "RANK=2 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4 "

/* Ports of jobs: 20000 + h % 10000, where h becomes 31 h + c for each letter of the names: "77" "0"
   is 54608 */
static const row good[] = {
    { "", 0, 1, -1, 0, "", "", "not distributed: no launcher's variables are set: one process" },
    { "HOME=/ MASTER_ADDR=x MASTER_PORT=none LOCAL_RANK=7", 0, 1, -1, 0, "", "",
        "not distributed: no launcher" },
    { "DT_RENDEZVOUS=10.0.0.7:80", 0, 1, -1, 0, "10.0.0.7:80", "", "not distributed" },

    /* by hand */
    { "DT_RANK=1 DT_WORLD_SIZE=3", 1, 3, -1, 0, "127.0.0.1:29500", "DT",
        "rank 1 of 3 by DT: DT_RANK, DT_WORLD_SIZE; rendezvous 127.0.0.1:29500" },
    { "DT_RANK=0 DT_WORLD_SIZE=3 DT_LOCAL_RANK=0 DT_RENDEZVOUS=10.1.2.3:4567", 0, 3, 0, 0,
        "10.1.2.3:4567", "DT", "rank 0 of 3 (local 0) by DT" },
    { "DT_RANK=5 DT_WORLD_SIZE=8 DT_LOCAL_RANK=1 DT_LOCAL_SIZE=4 DT_RENDEZVOUS=n1", 5, 8, 1, 4,
        "n1:29500", "DT",
        "rank 5 of 8 (local 1 of 4) by DT: DT_RANK, DT_WORLD_SIZE; rendezvous n1:29500" },
    { "DT_RANK=5 DT_WORLD_SIZE=8 DT_LOCAL_RANK=1 DT_LOCAL_SIZE=4", 5, 8, 1, 4, "", "DT",
        "no rendezvous" },
    { "DT_RANK=0 DT_WORLD_SIZE=1", 0, 1, -1, 0, "127.0.0.1:29500", "DT", "rank 0 of 1 by DT" },
    { "DT_RANK=65535 DT_WORLD_SIZE=65536", 65535, 65536, -1, 0, "127.0.0.1:29500", "DT",
        "rank 65535 of 65536" },
    { "DT_RANK=007 DT_WORLD_SIZE=08", 7, 8, -1, 0, "127.0.0.1:29500", "DT", "rank 7 of 8" },

    /* torchrun: its agent listens at MASTER_PORT if TORCHELASTIC_USE_AGENT_STORE is set */
    { TORCHRUN "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True", 2, 4, 2,
        4, "127.0.0.1:29501", "torchrun",
        "rank 2 of 4 (local 2 of 4) by torchrun: RANK, WORLD_SIZE; rendezvous 127.0.0.1:29501" },
    { TORCHRUN "MASTER_ADDR=localhost MASTER_PORT=45811 TORCHELASTIC_USE_AGENT_STORE=True", 2, 4, 2,
        4,
        /* an ephemeral port: the next port may be in use */
        "localhost:25811", "torchrun", "" },
    { TORCHRUN "MASTER_ADDR=h MASTER_PORT=32766 TORCHELASTIC_USE_AGENT_STORE=True", 2, 4, 2, 4,
        "h:32767", "torchrun", "" },
    { TORCHRUN "MASTER_ADDR=h MASTER_PORT=32767 TORCHELASTIC_USE_AGENT_STORE=True", 2, 4, 2, 4,
        "h:22767", "torchrun", "" },
    { TORCHRUN "MASTER_ADDR=node-1.cluster_2 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=False",
        2, 4, 2, 4, "node-1.cluster_2:29500", "torchrun", "" },
    { TORCHRUN "MASTER_ADDR=10.0.0.1 MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True", 2, 4, 2,
        4, "10.0.0.1:25535", "torchrun", "" },
    { TORCHRUN "MASTER_ADDR=10.0.0.1", 2, 4, 2, 4, "10.0.0.1:29500", "torchrun", "" },
    { TORCHRUN "MASTER_PORT=1234", 2, 4, 2, 4, "127.0.0.1:1234", "torchrun", "" },
    { "RANK=2 WORLD_SIZE=4", 2, 4, -1, 0, "127.0.0.1:29500", "torchrun",
        "rank 2 of 4 by torchrun" },
    { "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2", 2, 4, 0, 2, "", "torchrun",
        "no rendezvous" },
    { TORCHRUN "MASTER_ADDR=10.0.0.1 MASTER_PORT=5 DT_RENDEZVOUS=10.0.0.2:6", 2, 4, 2, 4,
        "10.0.0.2:6", "torchrun", "rendezvous 10.0.0.2:6" },

    /* Open MPI */
    { "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
      "OMPI_COMM_WORLD_LOCAL_SIZE=2 "
      "PMIX_RANK=1 PMIX_NAMESPACE=1060962305",
        1, 2, 1, 2, "127.0.0.1:24988", "Open MPI",
        "by Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE; rendezvous 127.0.0.1:2" },
    { "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
      "OMPI_COMM_WORLD_LOCAL_SIZE=2 "
      "PMIX_RANK=3 PMIX_NAMESPACE=1060962305",
        3, 4, 1, 2, "", "Open MPI", "no rendezvous, as DT_RENDEZVOUS is not set" },
    { "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
      "DT_RENDEZVOUS=10.0.0.1:99",
        3, 4, -1, 2, "10.0.0.1:99", "Open MPI", "rendezvous 10.0.0.1:99" },
    /* ... in a batch script */
    { "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_PROCID=0 "
      "SLURM_NTASKS=4",
        1, 2, -1, 2, "127.0.0.1:29500", "Open MPI",
        "rank 1 of 2 by Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE; " },

    /* MPICH's Hydra */
    { "PMI_RANK=1 PMI_SIZE=2 PMI_FD=8 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1", 1, 2, 1, 2,
        "127.0.0.1:29500", "PMI",
        "rank 1 of 2 (local 1 of 2) by PMI: PMI_RANK, PMI_SIZE; rendezvous 127.0.0.1:29500" },
    { "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1", 1, 4, 1, 2, "", "PMI",
        "no rendezvous" },
    /* ... in a batch script: each of Hydra's proxies is a separate SLURM step, whose variables the
       ranks inherit */
    { "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 SLURM_STEP_ID=1 SLURM_PROCID=0 "
      "SLURM_NTASKS=4 "
      "SLURM_STEP_NUM_TASKS=1",
        1, 2, 1, 2, "127.0.0.1:29500", "PMI", "; also set, but ignored: SLURM" },
    /* srun --mpi=pmi2: PMI and SLURM describe the same ranks, and SLURM's variables say more */
    { "PMI_RANK=1 PMI_SIZE=2 PMI_JOBID=4.0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 "
      "SLURM_NODEID=1 "
      "SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_STEP_NODELIST=a[7-8] " STEP,
        1, 2, 0, 1, "a7:21446", "PMI",
        "rank 1 of 2 (local 0 of 1) by PMI: PMI_RANK, PMI_SIZE; rendezvous a7:" },

    /* SLURM */
    { "SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=3 SLURM_NODEID=0 "
      "SLURM_STEP_TASKS_PER_NODE=4 "
      "SLURM_STEP_NODELIST=vm SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 " STEP,
        3, 4, 3, 4, "127.0.0.1:24608", "SLURM",
        "rank 3 of 4 (local 3 of 4) by SLURM: SLURM_PROCID, SLURM_STEP_NUM_TASKS; rendezvous "
        "127.0.0.1:2" },
    { "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=4 " STEP, 3, 4, -1, 0, "127.0.0.1:24608",
        "SLURM", "of 4" },
    { "SLURM_PROCID=3 SLURM_NTASKS=8 " STEP, 3, 8, -1, 0, "127.0.0.1:24608", "SLURM",
        "SLURM_PROCID, SLURM_NTASKS;" },
    { "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_NODELIST=x[01-02,04],y " STEP, 0, 2, -1, 0,
        "x01:24608", "SLURM", "" },
    { "SLURM_PROCID=6 SLURM_NTASKS=7 SLURM_LOCALID=0 SLURM_NODEID=3 "
      "SLURM_STEP_TASKS_PER_NODE=2(x3),1 "
      "SLURM_STEP_NODELIST=r[1-2,7]n[03-12],s SLURM_JOB_NODELIST=q[1-9] " STEP,
        6, 7, 0, 1, "r1n03:24608", "SLURM", "rank 6 of 7 (local 0 of 1) by SLURM" },
    { "SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_LOCALID=1 SLURM_NODEID=2 "
      "SLURM_STEP_TASKS_PER_NODE=2(x3),1 "
      "SLURM_STEP_NODELIST=a,b[1-3] " STEP,
        5, 7, 1, 2, "a:24608", "SLURM", "(local 1 of 2)" },
    { "SLURM_PROCID=0 SLURM_NTASKS=4", 0, 1, -1, 0, "", "",
        "a batch script of SLURM, where srun starts ranks" },
    { "SLURM_NTASKS=3 SLURM_JOB_ID=3 SLURM_JOB_NODELIST=vm", 0, 1, -1, 0, "", "",
        "not distributed: no launcher" },

    /* precedence of launchers */
    { "DT_RANK=1 DT_WORLD_SIZE=3 " TORCHRUN
      "PMI_RANK=0 PMI_SIZE=9 SLURM_PROCID=0 SLURM_NTASKS=4 " STEP,
        1, 3, -1, 0, "127.0.0.1:29500", "DT", "also set, but ignored: torchrun, PMI, SLURM" },
    { TORCHRUN "MASTER_ADDR=h MASTER_PORT=7 SLURM_PROCID=0 SLURM_NTASKS=1 " STEP, 2, 4, 2, 4, "h:7",
        "torchrun", "also set, but ignored: SLURM" },
    { TORCHRUN "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", 2, 4, 2, 4, "127.0.0.1:29500",
        "torchrun", "ignored: Open MPI" },
    { "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=3", 1, 2, -1, 0,
        "127.0.0.1:29500", "Open MPI", "ignored: PMI" },
    { "PMI_RANK=0 PMI_SIZE=4 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_NODEID=0 "
      "SLURM_STEP_TASKS_PER_NODE=1 " STEP,
        0, 4, -1, 0, "127.0.0.1:29500", "PMI",
        "rank 0 of 4 by PMI: PMI_RANK, PMI_SIZE; rendezvous "
        "127.0.0.1:29500; also set, but ignored: SLURM" },
    { "PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 " STEP, 1, 2, -1, 0,
        "127.0.0.1:29500", "PMI", "ignored: SLURM" },
    /* invalid variables of an ignored launcher do no harm */
    { TORCHRUN "OMPI_COMM_WORLD_RANK=x PMI_RANK=4 SLURM_PROCID=-1 SLURM_NTASKS=3 PMIX_RANK=1 " STEP,
        2, 4, 2, 4, "127.0.0.1:29500", "torchrun", "rendezvous 127.0.0.1:29500" },
    /* MASTER_ADDR takes precedence over the machine that SLURM names for the rank */
    { "RANK=1 WORLD_SIZE=2 MASTER_ADDR=m MASTER_PORT=9 SLURM_PROCID=1 SLURM_NTASKS=2 "
      "SLURM_LOCALID=0 SLURM_NODEID=1 "
      "SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_STEP_NODELIST=a,b " STEP,
        1, 2, 0, 1, "m:9", "torchrun", "rank 1 of 2 (local 0 of 1) by torchrun" },
};

static const char *const bad[][2] = {
    /* incomplete pairs of variables */
    { "DT_RANK=1", "DT_RANK=1 is set, but DT_WORLD_SIZE is not" },
    { "DT_WORLD_SIZE=4", "DT_WORLD_SIZE=4 is set, but DT_RANK is not" },
    { "RANK=1", "RANK=1 is set, but WORLD_SIZE is not" },
    { "WORLD_SIZE=4", "WORLD_SIZE=4 is set, but RANK is not" },
    { "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE=4 is set, but OMPI_COMM_WORLD_RANK is not" },
    { "PMI_RANK=4", "PMI_RANK=4 is set, but PMI_SIZE is not" },
    { "PMIX_RANK=0", "PMIX_RANK=0 is set, but PMI_SIZE is not" },
    { "SLURM_STEP_ID=0 SLURM_PROCID=0", "SLURM_PROCID=0 is set, but SLURM_NTASKS is not" },
    { "DT_RANK=1 RANK=0 WORLD_SIZE=2", "DT_RANK=1 is set, but DT_WORLD_SIZE is not" },
    /* invalid ranks */
    { "RANK=4 WORLD_SIZE=4", "RANK=4: not a whole number from 0 to 3" },
    { "RANK=-1 WORLD_SIZE=4", "RANK=-1: not a whole number from 0 to 3" },
    { "RANK=+1 WORLD_SIZE=4", "RANK=+1: not" },
    { "RANK=1.0 WORLD_SIZE=4", "RANK=1.0: not" },
    { "RANK=1e0 WORLD_SIZE=4", "RANK=1e0: not" },
    { "RANK=0x1 WORLD_SIZE=4", "RANK=0x1: not" },
    { "RANK=one WORLD_SIZE=4", "RANK=one: not" },
    { "RANK= WORLD_SIZE=4", "RANK=: not" },
    { "RANK=~1 WORLD_SIZE=4", "RANK= 1: not" },
    { "RANK=1~ WORLD_SIZE=4", "RANK=1 : not" },
    { "RANK=1 WORLD_SIZE=0", "WORLD_SIZE=0: not a whole number from 1 to 65536" },
    { "RANK=1 WORLD_SIZE=-4", "WORLD_SIZE=-4: not" },
    { "RANK=1 WORLD_SIZE=65537", "WORLD_SIZE=65537: not a whole number from 1 to 65536" },
    { "RANK=100000000000000000000 WORLD_SIZE=4", "RANK=100000000000000000000: not" },
    { "RANK=1 WORLD_SIZE=100000000000000000000", "WORLD_SIZE=100000000000000000000: not" },
    { "RANK=4294967297 WORLD_SIZE=4", "RANK=4294967297: not" }, /* truncates to 1 in 32 bits */
    { "RANK=1 WORLD_SIZE=4294967300", "WORLD_SIZE=4294967300: not" },
    { "RANK=1 "
      "WORLD_SIZE="
      "1000000000000000000000000000000000000000000000000000000000000000000000000000000000",
        "WORLD_SIZE=100000000000000000000000000000000000...: not" },
    { "RANK=1\n WORLD_SIZE=4", "RANK=1\\x0a: not" },
    { "RANK=1 WORLD_SIZE=\033[31m", "WORLD_SIZE=\\x1b[31m: not" },
    { "RANK=1 WORLD_SIZE=4 LOCAL_RANK=4", "LOCAL_RANK=4: not a whole number from 0 to 3" },
    { "RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
        "LOCAL_RANK=2: not a whole number from 0 to 1" },
    { "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=5",
        "LOCAL_WORLD_SIZE=5: not a whole number from 1 to 4" },
    { "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0: not" },
    { "RANK=1 WORLD_SIZE=4 LOCAL_RANK=a", "LOCAL_RANK=a: not" },
    { "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=2",
        "OMPI_COMM_WORLD_RANK=2: not a whole number from 0 to 1" },
    { "PMI_RANK=2 PMI_SIZE=two", "PMI_SIZE=two: not" },
    { "SLURM_PROCID=7 SLURM_NTASKS=7 " STEP, "SLURM_PROCID=7: not a whole number from 0 to 6" },
    { "SLURM_PROCID=7 SLURM_NTASKS=9 SLURM_STEP_NUM_TASKS=7 " STEP, "SLURM_PROCID=7: not" },
    /* invalid addresses */
    { "RANK=1 WORLD_SIZE=4 MASTER_PORT=0", "MASTER_PORT=0: not a whole number from 1 to 65535" },
    { "RANK=1 WORLD_SIZE=4 MASTER_PORT=65536", "MASTER_PORT=65536: not" },
    { "RANK=1 WORLD_SIZE=4 MASTER_PORT=http", "MASTER_PORT=http: not" },
    { "RANK=1 WORLD_SIZE=4 MASTER_ADDR= MASTER_PORT=1", "MASTER_ADDR=: not the name" },
    { "RANK=1 WORLD_SIZE=4 MASTER_ADDR=fd00::1",
        "MASTER_ADDR=fd00::1: not the name or IPv4 address of a machine" },
    { "RANK=1 WORLD_SIZE=4 MASTER_ADDR=a;b", "MASTER_ADDR=a;b: not the name" },
    { "RANK=1 WORLD_SIZE=4 "
      "MASTER_ADDR=0123456789012345678901234567890123456789012345678901234567890123456789012345",
        "MASTER_ADDR=012345678901234567890123456789012345...: not the name" },
    { "DT_RANK=1 DT_WORLD_SIZE=4 DT_RENDEZVOUS=", "DT_RENDEZVOUS=: not" },
    { "DT_RANK=1 DT_WORLD_SIZE=4 DT_RENDEZVOUS=:80", "DT_RENDEZVOUS=: not" },
    { "DT_RANK=1 DT_WORLD_SIZE=4 DT_RENDEZVOUS=a:",
        "DT_RENDEZVOUS=a:: not HOST:PORT, as 10.0.0.1:29500" },
    { "DT_RANK=1 DT_WORLD_SIZE=4 DT_RENDEZVOUS=a:0", "DT_RENDEZVOUS=a:0: not HOST:PORT" },
    { "DT_RANK=1 DT_WORLD_SIZE=4 DT_RENDEZVOUS=a:65536", "DT_RENDEZVOUS=a:65536: not HOST:PORT" },
    { "DT_RANK=1 DT_WORLD_SIZE=4 DT_RENDEZVOUS=a:1x", "DT_RENDEZVOUS=a:1x: not HOST:PORT" },
    { "DT_RANK=1 DT_WORLD_SIZE=4 DT_RENDEZVOUS=[::1]:80", "DT_RENDEZVOUS=[::1]:80: not HOST:PORT" },
    { "DT_RENDEZVOUS=a~b", "DT_RENDEZVOUS=a b: not the name" },
    { "DT_RENDEZVOUS=a:100000000000000000000", "not HOST:PORT" },
    { "DT_RENDEZVOUS=0123456789012345678901234567890123456789012345678901234567890123456789:1",
        "not HOST:PORT" },
};

/* SLURM node lists and their first machine; NULL: not a valid list. */
static const char *const lists[][2] = {
    { "n1", "n1" },
    { "n1,n2", "n1" },
    { "node[3-7,9]", "node3" },
    { "node[03-07]", "node03" },
    { "a[7]b", "a7b" },
    { "r[1-2]n[3,5]x,y", "r1n3x" },
    { "login-1.site_2", "login-1.site_2" },
    { "[1-2]", "1" },
    { "", NULL },
    { ",a", NULL },
    { "n[", NULL },
    { "n[]", NULL },
    { "n[3", NULL },
    { "n[3-", NULL },
    { "n[-3]", NULL },
    { "n[a]", NULL },
    { "n[1a]", NULL },
    { "n[1[2]]", NULL },
    { "n]", NULL },
    { "n 1", NULL },
    { "n(1)", NULL },
    { "n\n", NULL },
    { "n[1-2;3]", NULL },
    { "n[00000000000000000000000000000000000000000000000000000000000000000000001]", NULL },
    { "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn", NULL },
};

/* Ranks on machine `node`; 0: the list is invalid or shorter. */
static const struct {
    const char *list;
    int node, count;
} counts[] = {
    { "4", 0, 4 },
    { "4", 1, 0 },
    { "2(x3),1", 0, 2 },
    { "2(x3),1", 2, 2 },
    { "2(x3),1", 3, 1 },
    { "2(x3),1", 4, 0 },
    { "1,2,3", 2, 3 },
    { "8(x100000)", 99999, 8 },
    { "", 0, 0 },
    { "x", 0, 0 },
    { "0", 0, 0 },
    { "2(x", 0, 0 },
    { "2(x3", 0, 0 },
    { "2(x0)", 0, 0 },
    { "2(3)", 1, 0 },
    { "2,", 1, 0 },
    { "-1", 0, 0 },
    { "2;3", 1, 0 },
    { "99999999999", 0, 0 },
    { "2(x99999999999)", 0, 0 },
};

static void check_good(const row *r) {
    dt_launch got;
    memset(&got, 0x55, sizeof got);
    environment(r->words);
    dt_status status = dt_launch_find(&got);
    if (!CHECK_MSG(status == DT_OK, "'%s': %s", r->words, got.text)) return;
    CHECK_MSG(got.rank == r->rank && got.size == r->size, "'%s': rank %d of %d", r->words, got.rank,
        got.size);
    CHECK_MSG(got.local_rank == r->local_rank && got.local_size == r->local_size,
        "'%s': local %d of %d", r->words, got.local_rank, got.local_size);
    CHECK_MSG(strcmp(got.rendezvous, r->rendezvous) == 0, "'%s': rendezvous %s", r->words,
        got.rendezvous);
    CHECK_MSG(strcmp(got.launcher, r->by) == 0, "'%s': by '%s'", r->words, got.launcher);
    CHECK_MSG(strstr(got.text, r->text) && !strchr(got.text, '\n'), "'%s': %s", r->words, got.text);
    CHECK_MSG((strstr(got.text, "ignored") != NULL) == (strstr(r->text, "ignored") != NULL),
        "'%s': %s", r->words, got.text);
}

static void check_bad(const char *words, const char *text) {
    dt_launch got;
    memset(&got, 0x55, sizeof got);
    environment(words);
    dt_status status = dt_launch_find(&got);
    CHECK_MSG(status == DT_ERR_ARG && strstr(got.text, text) && !strchr(got.text, '\n'),
        "'%s': %d %s", words, (int)status, got.text);
    CHECK_MSG(got.rank == 0 && got.size == 1 && got.local_rank == -1 && got.local_size == 0 &&
                  !got.launcher[0] && !got.rendezvous[0],
        "'%s': refused, but rank %d of %d by '%s'", words, got.rank, got.size, got.launcher);
}

static void check_lists(void) {
    char words[512];
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        char host[64] = "";
        int is = dt__launch_first_host(lists[i][0], host, sizeof host);
        CHECK_MSG(lists[i][1] ? is && strcmp(host, lists[i][1]) == 0 : !is, "list %s: %d %s",
            lists[i][0], is, host);
        if (lists[i][1] || strpbrk(lists[i][0], " \n")) continue;
        snprintf(words, sizeof words,
            "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=%s", lists[i][0]);
        check_bad(words, "SLURM_STEP_NODELIST=");
    }
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        int count = dt__launch_node_ranks(counts[i].list, counts[i].node);
        CHECK_MSG(count == counts[i].count, "machine %d of %s: %d ranks", counts[i].node,
            counts[i].list, count);
        if (counts[i].count) continue;
        snprintf(words, sizeof words,
            "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_NODEID=%d "
            "SLURM_STEP_TASKS_PER_NODE=%s",
            counts[i].node, counts[i].list);
        check_bad(words, "SLURM_STEP_TASKS_PER_NODE=");
    }
}

/* Consecutive jobs, and steps of a job, use different ports; all ranks of one step use the same. */
static void check_ports(void) {
    char words[256], last[80] = "";
    dt_launch got;
    int same = 0;
    for (int job = 1000; job < 1100; job++)
        for (int step = 0; step < 2; step++) {
            char first[80];
            for (int rank = 0; rank < 2; rank++) {
                snprintf(words, sizeof words,
                    "SLURM_PROCID=%d SLURM_NTASKS=2 SLURM_JOB_ID=%d SLURM_STEP_ID=%d", rank, job,
                    step);
                environment(words);
                if (!CHECK(dt_launch_find(&got) == DT_OK)) return;
                if (rank == 0) memcpy(first, got.rendezvous, sizeof first);
            }
            CHECK_MSG(
                strcmp(first, got.rendezvous) == 0, "job %d: %s, %s", job, first, got.rendezvous);
            int port = atoi(strchr(first, ':') + 1);
            CHECK_MSG(port >= 20000 && port < 30000, "port %d", port);
            same += strcmp(first, last) == 0;
            memcpy(last, first, sizeof last);
        }
    CHECK_MSG(same == 0, "%d neighbouring jobs or steps have one port", same);
}

int main(void) {
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) check_good(&good[i]);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) check_bad(bad[i][0], bad[i][1]);
    check_lists();
    check_ports();
    CHECK(dt_launch_find(NULL) == DT_ERR_ARG);
    return check_done("test_launch_env");
}
