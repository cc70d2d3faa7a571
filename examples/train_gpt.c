/* train_gpt.c - trains GPT-2, Llama, Mistral, Mixtral, Qwen, Gemma or DeepSeek-V3 on one or many
   ranks - public domain or MIT, at your choice

       cc -O3 train_gpt.c -o train_gpt -lm -lpthread
       ./train_gpt --data input.txt --ranks 8 --zero 1 --steps 200 --log-csv log.csv --generate 200

   The training loop is train() in train.h, and the model is gpt.h. This file is the command-line
   program around them. One table of options defines what the parser accepts and what --help,
   --print-config and the settings block print. The program checks the options before any rank
   starts, runs train() on every rank and prints the results.

   CONTENTS
     1. Options: the table
     2. Writing text
     3. Parser
     4. Configuration file
     5. Help and configuration
     6. From options to a run
     7. Data
     8. Settings block
     9. Output of a run
     10. Dry run
     11. Memory limit
     12. Preparation
     13. Planner
     14. main
*/
#define _GNU_SOURCE
#define DT_IMPLEMENTATION
#include "../dt_zero.h"

#include "gpt.h"
#include "train.h"
#include "tokenizer.h"
#include "encode.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/wait.h>
#ifdef DT_USE_MPI
#include <mpi.h>
#endif

// ==== 1. Options: the table =====================================================================

/* options.h explains the columns. */
#define MEGA (1 << 20)
#define OPTIONS(X) \
    X(H_DATA, "Data and model", HEADING, BUILT, NULL, 0, 0, "", "") \
    X(DATA, "data", TEXT, BUILT, NULL, 0, 0, "FILE|DIR", \
        "bytes, llm.c shards or x.jsonl; a DIR: all files [own sources]") \
    X(DATA_MIX, "data-mix", TEXT, BUILT, NULL, 0, 0, "W,W,..", \
        "mix the files of --data FILE,FILE,.. by these weights") \
    X(TOKENIZER, "tokenizer", TEXT, BUILT, NULL, 0, 0, "FILE|none", \
        "tokenizer.json (or its folder) of --data, --val [of --model]") \
    X(TOKEN_CACHE, "token-cache", TEXT, BUILT, NULL, 0, 0, "DIR", \
        "keep the tokens of --data and --val there, for later runs") \
    X(DOCUMENTS, "documents", SWITCH, BUILT, "off", 0, 0, "on|off", \
        "attention and positions stay inside a document") \
    X(DOCUMENT_END, "document-end", TEXT, BUILT, NULL, 0, 0, "TEXT", \
        "ends a document [end-of-text token; bytes: \\n\\n]") \
    X(VAL, "val", TEXT, BUILT, NULL, 0, 0, "FILE", \
        "validation loss on its first 64 sequences, after the last step") \
    X(EVAL_EVERY, "eval-every", INT, BUILT, "0", 0, 1e9, "N", "... and after every N steps") \
    X(GENERATE, "generate", INT, BUILT, "0", 0, MEGA, "N", \
        "at the end print N sampled bytes or tokens") \
    X(PROMPT, "prompt", TEXT, BUILT, NULL, 0, 0, "TEXT", "... that continue this text") \
    X(TEMPERATURE, "temperature", REAL, BUILT, "0.8", 0, 1000, "X", \
        "... sampled from softmax(logits / X); 0: the likeliest") \
    X(SAMPLE_TOP_K, "sample-top-k", INT, BUILT, "0", 0, 16 * MEGA, "K", \
        "... of the K likeliest; 0: of all") \
    X(TOP_P, "top-p", REAL, BUILT, "1", 1e-9, 1, "X", \
        "... of the likeliest with a total probability of X") \
    X(STOP, "stop", TEXT, BUILT, NULL, 0, 0, "TEXT,..", \
        "... and end before any of these; escapes \\n \\t \\, \\\\") \
    X(MODEL, "model", TEXT, BUILT, NULL, 0, 0, "FILE", \
        "start from safetensors (a file or folder) or an llm.c .bin") \
    X(SHUFFLE, "shuffle", SWITCH, BUILT, "off", 0, 0, "on|off", \
        "shuffle the sequences in every epoch") \
    X(READ_AHEAD, "read-ahead", SWITCH, BUILT, "off", 0, 0, "on|off", \
        "the kernel reads the next step's data while a step runs") \
    X(ARCH, "arch", WORD, BUILT, "gpt2", 0, 0, "gpt2|llama", "architecture") \
    X(LAYERS, "layers", INT, BUILT, "4", 1, GPT_MAX_LAYERS, "L", "layers") \
    X(WIDTH, "width", INT, BUILT, "128", 1, MEGA, "C", "width") \
    X(HEADS, "heads", INT, BUILT, "4", 1, MEGA, "H", "attention heads; divide the width") \
    X(KV_HEADS, "kv-heads", INT, BUILT, NULL, 1, MEGA, "K", \
        "grouped-query attention: heads of keys and values [=heads]") \
    X(FFN, "ffn", INT, BUILT, NULL, 1, 4 * MEGA, "F", \
        "feed-forward width [4 x width; llama 8/3 x, rounded up to 32s]") \
    X(SEQ, "seq", INT, BUILT, "128", 1, MEGA, "T", \
        "tokens per sequence; with --model the file's, at most 1024") \
    X(VOCAB, "vocab", INT, BUILT, "256", 1, 16 * MEGA, "V", \
        "more than any token id; bytes need 256, --tokenizer its size") \
    X(TIE, "tie", SWITCH, BUILT, "on", 0, 0, "on|off", \
        "tied embeddings: one matrix for embedding and head") \
    X(DROPOUT, "dropout", REAL, BUILT, "0", 0, 0.999, "X", \
        "dropout of the embedding and of both branches of a layer") \
    X(LORA, "lora", INT, BUILT, NULL, 1, MEGA, "R", \
        "LoRA: freeze the model and train adapters of rank R") \
    X(LORA_ALPHA, "lora-alpha", REAL, BUILT, NULL, 1e-9, 1e9, "X", \
        "scale of the adapters' output, times R [=lora]") \
    X(LORA_DROPOUT, "lora-dropout", REAL, BUILT, "0", 0, 0.999, "X", \
        "dropout of the adapters' inputs") \
    X(LORA_ON, "lora-on", TEXT, BUILT, NULL, 0, 0, "LIST", \
        "modules q,k,v,o, gate,up,down (llama), fc,proj (gpt2), all [q,v]") \
    X(BASE, "base", WORD, BUILT, NULL, 0, 0, "bf16|int8|nf4", \
        "QLoRA: storage of the layers' frozen matrices [the type]") \
    X(ADAPTER, "adapter", TEXT, BUILT, NULL, 0, 0, "DIR", \
        "start from an adapter of PEFT, with its rank and modules") \
    X(MERGE, "merge", SWITCH, BUILT, "off", 0, 0, "on|off", \
        "--save-model writes the model with the adapters added") \
    X(EXPERTS, "experts", TEXT, BUILT, "dense", 0, 0, "E", \
        "mixture of experts (MoE): E experts replace each MLP") \
    X(TOP_K, "top-k", INT, BUILT, "2", 1, MEGA, "K", "experts per token") \
    X(MOE_EVERY, "moe-every", INT, BUILT, "1", 1, MEGA, "N", \
        "experts in every Nth layer; the other layers are dense") \
    X(SHARED_EXPERTS, "shared-experts", INT, BUILT, "0", 0, 1024, "N", \
        "N more experts that every token uses") \
    X(CAPACITY, "capacity", TEXT, BUILT, "dropless", 0, 0, "F", \
        "expert capacity: F times the mean load of a sequence") \
    X(BALANCE_LOSS, "balance-loss", REAL, BUILT, "0.01", 0, 1e9, "X", \
        "weight of the load-balancing loss") \
    X(Z_LOSS, "z-loss", REAL, BUILT, "0", 0, 1e9, "X", \
        "weight of the loss that keeps router logits small") \
    X(ROUTER_BIAS, "router-bias", REAL, BUILT, "0", 0, 1, "X", \
        "balance experts by a router bias, X per step; 0: off") \
    X(ROUTE, "route", WORD, BUILT, "softmax", 0, 0, "softmax|sigmoid", \
        "scores of experts; sigmoid: DeepSeek-V3's router") \
    X(EXPERT_GROUPS, "expert-groups", TEXT, BUILT, "off", 0, 0, "G:N", \
        "choose experts in the N best of G groups of experts") \
    X(GATE_SCALE, "gate-scale", REAL, BUILT, "1", 0, 1e9, "X", "factor of experts' weights") \
    X(FIRST_DENSE, "first-dense", INT, BUILT, "0", 0, GPT_MAX_LAYERS, "N", \
        "no experts in the first N layers") \
    X(MOE_FFN, "moe-ffn", INT, BUILT, NULL, 1, 4 * MEGA, "F", \
        "feed-forward width of an expert [=ffn]") \
    X(MLA, "mla", TEXT, BUILT, "off", 0, 0, "Q:KV:N:R:V", \
        "latent attention: ranks Q and KV; per head N + rotary R, value V") \
    X(MTP, "mtp", INT, BUILT, "0", 0, GPT_MAX_MTP, "D", \
        "multi-token prediction: D modules, with --mtp-weight") \
    X(MTP_WEIGHT, "mtp-weight", REAL, BUILT, "0.3", 0, 1e9, "X", "weight of their mean loss") \
    X(H_STEP, "Batch and steps", HEADING, BUILT, NULL, 0, 0, "", "") \
    X(BATCH, "batch", INT, BUILT, "16", 1, 16 * MEGA, "B", \
        "sequences per step over all ranks: B = b x a x replicas") \
    X(MICRO_BATCH, "micro-batch", INT, BUILT, NULL, 1, MEGA, "b", \
        "sequences per forward [from --batch]") \
    X(ACCUM, "accum", INT, BUILT, NULL, 1, MEGA, "a", \
        "gradient accumulation: micro-batches per step [from --batch]") \
    X(STEPS, "steps", INT, BUILT, "100", 0, 1e12, "N", \
        "optimizer steps; 0: only --val, --generate and --save-model") \
    X(EPOCHS, "epochs", REAL, BUILT, NULL, 1e-9, 1e9, "E", \
        "instead: as many steps as E times all sequences need") \
    X(STOP_AT, "stop-at", INT, BUILT, NULL, 1, 1e12, "N", \
        "end earlier with the same learning-rate schedule [=steps]") \
    X(LR, "lr", REAL, BUILT, "1e-3", 0, 1e3, "X", "peak learning rate") \
    X(LR_SCHEDULE, "lr-schedule", WORD, BUILT, "cosine", 0, 0, "cosine|linear|constant|wsd", \
        "learning rate after the warmup") \
    X(WARMUP, "warmup", INT, BUILT, "0", 0, 1e12, "N", "steps of linear growth to the peak") \
    X(LR_STEPS, "lr-steps", INT, BUILT, NULL, 1, 1e12, "N", \
        "the step at which the schedule ends [=steps]") \
    X(MIN_LR_RATIO, "min-lr-ratio", REAL, BUILT, "0.1", 0, 1, "X", "lowest learning rate / peak") \
    X(SEED, "seed", INT, BUILT, "1", 1, 9e15, "S", "for initial values, --shuffle and --generate") \
    X(BATCH_RAMP, "batch-ramp", TEXT, BUILT, NULL, 0, 0, "START:INCR:SAMPLES", \
        "grow from START to --batch by INCR, over SAMPLES samples") \
    X(H_OPT, "Optimizer", HEADING, BUILT, NULL, 0, 0, "", "") \
    X(OPTIMIZER, "optimizer", WORD, BUILT, "adamw", 0, 0, "adamw|adam|sgd|onebit-adam|muon", \
        "muon: on matrices of layers; AdamW on the rest") \
    X(WEIGHT_DECAY, "weight-decay", REAL, BUILT, "0", 0, 1e3, "X", \
        "on matrices, not on biases and gains") \
    X(CLIP, "clip", REAL, BUILT, "1", 0, 1e30, "X", "clip the gradient norm to X; 0: off") \
    X(BETA1, "beta1", REAL, BUILT, "0.9", 0, 0.999999, "X", "Adam's first moment") \
    X(BETA2, "beta2", REAL, BUILT, "0.95", 0, 0.999999, "X", "Adam's second moment") \
    X(EPS, "eps", REAL, BUILT, "1e-8", 1e-30, 1, "X", "added to Adam's divisor") \
    X(MOMENTUM, "momentum", REAL, BUILT, "0", 0, 0.999999, "X", \
        "with --optimizer sgd, muon; 0 means 0.95 with muon") \
    X(ADAMW_LR_SCALE, "adamw-lr-scale", REAL, BUILT, "1", 0, 1e3, "X", \
        "with --optimizer muon: AdamW's learning rate / lr") \
    X(EMA, "ema", REAL, BUILT, "0", 0, 0.999999, "X", \
        "validate, export and generate with the weights' EMA of decay X") \
    X(SKIP_LOSS_Z, "skip-loss-z", REAL, BUILT, "0", 0, 1e9, "X", \
        "skip a step whose loss is X deviations over the last 128; 0: off") \
    X(SKIP_NORM_Z, "skip-norm-z", REAL, BUILT, "0", 0, 1e9, "X", "... or whose gradient norm is") \
    X(LABEL_SMOOTHING, "label-smoothing", REAL, BUILT, "0", 0, 0.999, "X", \
        "in training; the printed loss includes it") \
    X(FREEZE_STEPS, "freeze-steps", INT, BUILT, NULL, 1, 1e9, "N", \
        "steps of plain Adam before onebit-adam compresses [steps/4]") \
    X(DTYPE, "dtype", WORD, BUILT, "f32", 0, 0, "f32|bf16|f16|f64", \
        "type of parameters and activations") \
    X(GRAD_DTYPE, "grad-dtype", WORD, BUILT, NULL, 0, 0, "f32|bf16|f16", \
        "bf16, f16 with --dtype of that type: 16-bit sums of gradients [f32]") \
    X(LOSS_SCALE, "loss-scale", TEXT, BUILT, NULL, 0, 0, "dynamic|X", \
        "a step that overflows is repeated [f16: dynamic]") \
    X(LOSS_SCALE_INIT, "loss-scale-init", REAL, BUILT, "65536", 1e-30, 1e30, "X", \
        "the first dynamic loss scale") \
    X(LOSS_SCALE_WINDOW, "loss-scale-window", INT, BUILT, "2000", 1, 1e9, "N", \
        "steps in a row without overflow that double it") \
    X(LOSS_SCALE_HYSTERESIS, "loss-scale-hysteresis", INT, BUILT, "1", 1, 1e6, "N", \
        "overflows that halve it") \
    X(LOSS_SCALE_MIN, "loss-scale-min", REAL, BUILT, "1", 1e-30, 1e30, "X", \
        "the lowest dynamic loss scale") \
    X(H_RANK, "Ranks and layout", HEADING, BUILT, NULL, 0, 0, "", "") \
    X(RANKS, "ranks", INT, BUILT, NULL, 1, 1024, "N", "[the product of the axes given]") \
    X(BACKEND, "backend", WORD, BUILT, "threads", 0, 0, "threads|procs|tcp|mpi|nccl", \
        "how ranks run; under a launcher tcp, on GPUs nccl") \
    X(RANK, "rank", INT, BUILT, NULL, 0, 1023, "R", \
        "rank of this process, with tcp, nccl [from the launcher]") \
    X(RENDEZVOUS, "rendezvous", TEXT, BUILT, NULL, 0, 0, "HOST:PORT", \
        "address on which rank 0 listens, with tcp, nccl") \
    X(TOKEN_FILE, "token-file", TEXT, BUILT, NULL, 0, 0, "FILE", \
        "file with the job's secret, with tcp, nccl, mpi") \
    X(DEVICE, "device", WORD, BUILT, "cpu", 0, 0, "cpu|cuda", \
        "cuda: rank r uses GPU r modulo the number of GPUs") \
    X(TIMEOUT, "timeout", REAL, BUILT, "120", 0.001, 1e6, "S", \
        "seconds that a rank waits for other ranks") \
    X(MAX_RESTARTS, "max-restarts", INT, BUILT, "0", 0, MEGA, "N", \
        "after a failure restart from the newest checkpoint of --save") \
    X(MIN_RANKS, "min-ranks", INT, BUILT, NULL, 1, 1024, "N", \
        "... each time with fewer replicas, at least N ranks") \
    X(DP, "dp", INT, BUILT, NULL, 1, 1024, "N", "data parallel [ranks / all other axes]") \
    X(TP, "tp", INT, BUILT, "1", 1, 1024, "N", "tensor parallel") \
    X(CP, "cp", INT, BUILT, "1", 1, 1024, "N", "context parallel") \
    X(PP, "pp", INT, BUILT, "1", 1, 1024, "N", "pipeline parallel") \
    X(EP, "ep", INT, BUILT, "1", 1, 1024, "N", "expert parallel: replicas that shard the experts") \
    X(EXPERT_TP, "expert-tp", TEXT, BUILT, "off", 0, 0, "off|N", \
        "expert folding: N ranks shard an expert, ep is no factor of ranks") \
    X(SP, "sp", SWITCH, BUILT, "off", 0, 0, "on|off", "sequence parallel: --tp shards tokens too") \
    X(TP_OVERLAP, "tp-overlap", INT, BUILT, "0", 0, 1024, "N", \
        "overlap of --tp traffic and products, in N pieces") \
    X(CP_KIND, "cp-kind", WORD, BUILT, "ring", 0, 0, "ring|zigzag|allgather|ulysses", "with --cp") \
    X(SCHEDULE, "schedule", WORD, BUILT, "1f1b", 0, 0, \
        "naive|afab|1f1b|interleaved|zb|zbv|dualpipe-v|FILE", \
        "pipeline schedule, with --pp; a FILE as of --schedule-text") \
    X(CHUNKS, "chunks", INT, BUILT, NULL, 1, MEGA, "v", \
        "stages per rank, with --schedule interleaved [2]") \
    X(PARTITION, "partition", TEXT, BUILT, "even", 0, 0, "even|cost|LIST", \
        "half layers per stage; cost: by measured time") \
    X(SCHEDULE_SVG, "schedule-svg", TEXT, BUILT, NULL, 0, 0, "FILE", \
        "draw the last step beside its simulation") \
    X(SCHEDULE_TEXT, "schedule-text", TEXT, BUILT, NULL, 0, 0, "FILE", \
        "write the schedule as text, to edit for --schedule FILE") \
    X(ZERO, "zero", WORD, BUILT, "0", 0, 0, "0|1|2|3", \
        "ZeRO stage: shard 1 optimizer state, 2 + gradients, 3 + values") \
    X(ZERO3_KEEP, "zero3-keep", SWITCH, BUILT, "off", 0, 0, "on|off", \
        "gather values once per step, not at each use") \
    X(SHARD_GROUP, "shard-group", INT, BUILT, NULL, 1, 1024, "N", \
        "HSDP: shard over N ranks, replicate over groups [dp x ep x cp]") \
    X(OFFLOAD_OPTIM, "offload-optim", TEXT, BUILT, "none", 0, 0, "none|cpu|DIR", \
        "CPU or disk offload of optimizer state") \
    X(OFFLOAD_PARAMS, "offload-params", TEXT, BUILT, "none", 0, 0, "none|cpu|DIR", \
        "CPU or disk offload of values, with --zero 3") \
    X(MEM_LIMIT, "mem-limit", SIZE, BUILT, NULL, 1, 9e15, "BYTES", \
        "memory limit of a rank; also 300K, 64M, 2G") \
    X(RECOMPUTE, "recompute", TEXT, BUILT, "none", 0, 0, "none|selective|full|full:K", \
        "activation checkpointing, full:K over K layers") \
    X(REDUCE, "reduce", WORD, BUILT, "fixed", 0, 0, "fixed|tree", \
        "tree: the same bits for every dp x accum") \
    X(OVERLAP, "overlap", SWITCH, BUILT, "on", 0, 0, "on|off", \
        "reduce gradients during the backward") \
    X(LINK_LATENCY, "link-latency", REAL, BUILT, "0", 0, 1e6, "MS", \
        "simulate a slow link: delay per operation") \
    X(LINK_BANDWIDTH, "link-bandwidth", REAL, BUILT, "0", 0, 1e9, "MB/S", \
        "simulate a slow link: per rank; 0: no limit") \
    X(H_OUT, "Output", HEADING, BUILT, NULL, 0, 0, "", "") \
    X(SAVE, "save", TEXT, BUILT, NULL, 0, 0, "DIR", \
        "write checkpoint DIR/step-N at the end and at SIGTERM") \
    X(SAVE_EVERY, "save-every", INT, BUILT, NULL, 1, 1e12, "N", "... and after every N steps") \
    X(SAVE_BACKGROUND, "save-background", SWITCH, BUILT, "off", 0, 0, "on|off", \
        "... while the next steps run") \
    X(KEEP, "keep", INT, BUILT, NULL, 1, 1e9, "N", "keep the newest N checkpoints [all]") \
    X(RESUME, "resume", TEXT, BUILT, NULL, 0, 0, "DIR", \
        "resume from the newest checkpoint in DIR, or from DIR") \
    X(SAVE_MODEL, "save-model", TEXT, BUILT, NULL, 0, 0, "DIR", \
        "at the end write safetensors and config; X.bin: llm.c") \
    X(LOG_CSV, "log-csv", TEXT, BUILT, NULL, 0, 0, "FILE", "one row per step") \
    X(TRACE, "trace", TEXT, BUILT, NULL, 0, 0, "FILE", \
        "timeline of every rank, for ui.perfetto.dev") \
    X(REPORT, "report", TEXT, NOT_BUILT, NULL, 0, 0, "FILE", "") \
    X(QUIET, "quiet", FLAG, BUILT, NULL, 0, 0, "", \
        "print nothing but errors and --generate's text") \
    X(PEAK_TFLOPS, "peak-tflops", REAL, BUILT, "0", 0, 1e9, "X", \
        "peak of a rank, for mfu = (6N + 12LCT) tok/s / (ranks X)") \
    X(H_MORE, "More", HEADING, BUILT, NULL, 0, 0, "", "") \
    X(CONFIG, "config", TEXT, BUILT, NULL, 0, 0, "FILE", \
        "options from JSON, with these names or DeepSpeed's keys") \
    X(PRINT_CONFIG, "print-config", FLAG, BUILT, NULL, 0, 0, "", \
        "print all options as JSON and exit") \
    X(DRY_RUN, "dry-run", FLAG, BUILT, NULL, 0, 0, "", \
        "compute nothing; print the layout, traffic and memory") \
    X(LIST_REFUSED, "list-refused", FLAG, BUILT, NULL, 0, 0, "", \
        "print the rules for legal sizes and exit") \
    X(PLAN, "plan", FLAG, BUILT, NULL, 0, 0, "", \
        "rank the layouts of this model and --batch on a cluster; options of a layout fix it") \
    X(CLUSTER, "cluster", TEXT, BUILT, NULL, 0, 0, "KIND:NODESxGPUS|FILE", \
        "... such as h100:16x8, or a JSON file") \
    X(TOKENS, "tokens", TEXT, BUILT, NULL, 0, 0, "N", "... tokens of the training, such as 2T") \
    X(TOP, "top", INT, BUILT, "10", 1, 1000, "N", "... number of layouts") \
    X(PLAN_JSON, "plan-json", TEXT, BUILT, NULL, 0, 0, "FILE", "... written to FILE too") \
    X(PLAN_SVG, "plan-svg", TEXT, NOT_BUILT, NULL, 0, 0, "FILE", "") \
    X(PLAN_ROWS, "plan-rows", TEXT, BUILT, NULL, 0, 0, "FILE", \
        "predict speed and memory of the layouts in a CSV") \
    X(PROFILE, "profile", WORD, BUILT, NULL, 0, 0, "h100-nanotron|a100-megatron", \
        "... of these GPUs and this training system [the first]") \
    X(PLAN_CSV, "plan-csv", TEXT, BUILT, NULL, 0, 0, "FILE", "... and write them to FILE") \
    X(HELP, "help", FLAG, BUILT, NULL, 0, 0, "", "print this help and exit")
#include "options.h"
#include "plan.h"
#include "plan_rows.h"

/* How this process was launched, and the state of its output. rank is the rank of this process with
   --backend mpi, tcp or nccl, and otherwise 0. size is the number of ranks with --backend mpi, and
   otherwise 0. launcher_status is DT_OK unless the launcher's environment variables are wrong.
   summary and device_note are the texts of the lines `launch` and `device` in the printed
   settings. */
static struct {
    int rank, size;
    dt_launch launcher;
    dt_status launcher_status;
    char summary[512], device_note[160];
    double write_timeout_s; /* seconds after which a write to a stalled reader fails */
    int is_quiet;           /* --quiet */
    int *failure_printed;   /* 1: the first failure has been printed */
    /* 1: finish the step, save and end, because SIGTERM arrived or standard output is lost */
    int *stop_requested;
    int *made_step;    /* 1: the run has completed a step since its start or its last restart */
    int *stdout_error; /* errno of a failed write to standard output; 0: no write has failed */
    /* errno of a failed write to standard error; 0: no write has failed. After a failure, later
       lines are dropped, so that they do not wait for a stalled reader. */
    int *stderr_error;
} launched = { .write_timeout_s = 60 };

static void make_flags(void) {
    int *flags = shared_flags(5);
    launched.failure_printed = flags;
    launched.stop_requested = flags + 1;
    launched.made_step = flags + 2;
    launched.stdout_error = flags + 3;
    launched.stderr_error = flags + 4;
}

/* Writes n bytes to fd. Returns 0 on success, else the errno; ETIMEDOUT if the reader reads nothing
   for launched.write_timeout_s seconds. Does not use stdio, because a rank stuck in a write would
   hold the stdio lock, and exit() would wait for the lock. A pipe that poll reports writable
   accepts PIPE_BUF bytes without blocking. Each iteration adds at most one second to the waiting
   time, so a suspension of the process (SIGSTOP) counts as one second at most. */
static int write_all(int fd, const char *bytes, size_t n) {
    const dt_host *host = dt_host_default();
    double waited = 0, before = host->now(host->user);
    while (n > 0) {
        struct pollfd to = { fd, POLLOUT, 0 };
        ssize_t done = poll(&to, 1, 100);
        if (done > 0) done = write(fd, bytes, n < PIPE_BUF ? n : PIPE_BUF);
        if (done < 0 && errno != EINTR && errno != EAGAIN) return errno;
        if (done > 0) bytes += done, n -= (size_t)done;
        double now = host->now(host->user);
        waited = done > 0 ? 0 : waited + fmin(now - before, 1);
        before = now;
        if (waited > launched.write_timeout_s) return ETIMEDOUT;
    }
    return 0;
}

static const char *write_error_text(int error) {
    return error == ETIMEDOUT ? "the reader has read nothing for half of --timeout"
                              : strerror(error);
}

/* The buffer of one line of output. A line that fits is written by one call of write_all. */
typedef struct line {
    /* file descriptor, and the errno of a failed write (0: no write has failed); for fd 1 and 2,
       launched.stdout_error and launched.stderr_error are used instead of `error` */
    int fd, error;
    size_t used;
    char text[PIPE_BUF];
} line;

static void flush_line(line *l) {
    int *error = l->fd == 1   ? launched.stdout_error
                 : l->fd == 2 ? launched.stderr_error
                              : &l->error;
    int failed = get_flag(error) ? 0 : write_all(l->fd, l->text, l->used);
    if (failed) set_flag(error, failed);
    l->used = 0;
}

/* Appends untrusted text, such as a path, the contents of a file or a message of another rank. text
   has n bytes and a terminating NUL. Unprintable bytes are written as \xNN, except the bytes in
   `keep`. If `keep` is NULL, all bytes are copied unchanged. */
static void line_add_text(line *l, const char *text, size_t n, const char *keep) {
    for (size_t i = 0; i < n;) {
        size_t length = dt_printable(text + i);
        if (l->used + 5 > sizeof l->text) flush_line(l);
        if (length == 0 && (!keep || (text[i] && strchr(keep, text[i])))) length = 1;
        if (length > 0)
            memcpy(l->text + l->used, text + i, length);
        else
            snprintf(l->text + l->used, 5, "\\x%02x", (unsigned char)text[i]);
        l->used += length > 0 ? length : 4;
        i += length > 0 ? length : 1;
    }
}

/* Appends formatted text to the line. If fmt ends in a newline, writes the line to its fd. All
   other unprintable bytes become \xNN. */
static __attribute__((format(printf, 2, 0))) void line_vprintf(
    line *l, const char *fmt, va_list args) {
    char text[2 * PIPE_BUF];
    int n = vsnprintf(text, sizeof text, fmt, args);
    size_t length = n < 0 ? 0 : (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;
    int ends = *fmt && fmt[strlen(fmt) - 1] == '\n';
    line_add_text(l, text, length - (ends && (size_t)n == length), "");
    if (!ends) return;
    l->text[l->used++] = '\n';
    flush_line(l);
}

static __attribute__((format(printf, 2, 3))) void line_printf(line *l, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    line_vprintf(l, fmt, args);
    va_end(args);
}

/* Prints formatted text on standard error. */
static __attribute__((format(printf, 1, 2))) void print_error(const char *fmt, ...) {
    line l = { .fd = 2 };
    va_list args;
    va_start(args, fmt);
    line_vprintf(&l, fmt, args);
    va_end(args);
}

// ==== 3. Parser =================================================================================

/* Rank 0 prints errors for all ranks. Every other rank that fails waits one second before it exits,
   because a launcher kills all remaining ranks when one rank exits: rank 0 might be killed before
   it has printed the error. */
static int prints_messages(void) { return launched.rank == 0; }
static void let_rank_0_print_first(void) {
    if (!prints_messages()) sleep(1);
}

/* The state of the reader of --config's JSON file. `path` is the path of the key whose value is
   `node`. `ignored` lists the file's keys that have no meaning in this program, `automatic` the
   keys whose value is DeepSpeed's "auto", so that the option keeps its default. `note` is a text
   for the printed settings. given[id] is 1 if the file sets option id. */
static struct {
    dt_ctx *ctx;
    dt_json *json;
    int node; /* the JSON value that is being read; -1: none */
    char path[160], ignored[1024], automatic[1024], note[320], given[N_OPTIONS];
    char *values[N_OPTIONS]; /* copies of the texts of the values that the file sets */
} config = { .node = -1 };
/* length in bytes of the longest key and of the longest text that --config's file may contain */
enum { CONFIG_KEY = 50, CONFIG_TEXT = 4096 };
static const char *error_without_rank(dt_ctx *ctx);
static dt_ctx *probe_ctx(void);
static void read_config(value *v, const char *path);

/* Refuses a run that cannot start: prints one error line and exits with status 2. */
static __attribute__((noreturn, format(printf, 1, 2))) void refuse(const char *fmt, ...) {
    va_list args;
    line l = { .fd = 2 };
    let_rank_0_print_first();
    line_printf(&l, "error: ");
    if (config.node >= 0) { /* print "file:line:column: key: " before the text */
        dt_json_fail(config.json, config.node, "%s", *config.path ? config.path : "the file");
        line_printf(&l, "%s: ", error_without_rank(config.ctx));
    }
    va_start(args, fmt);
    line_vprintf(&l, fmt, args);
    va_end(args);
    line_printf(&l, "\n");
    exit(2);
}

static const char *kind_of(mode_t mode) {
    if (S_ISREG(mode)) return "a file";
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a FIFO";
    if (S_ISSOCK(mode)) return "a socket";
    return S_ISCHR(mode)   ? "a character device"
           : S_ISBLK(mode) ? "a block device"
                           : "of an unknown kind";
}

/* Refuses an option's path if the file exists but is not of a kind in `legal` (A_FILE, A_DIRECTORY
   or EITHER). Does not open the file, because opening may block or act on a device. Follows links,
   because the user chose the path. Returns 1 if the file exists; otherwise returns 0 and sets
   errno. */
enum { A_FILE = 1, A_DIRECTORY = 2, EITHER = 3 };
static int check_kind(int id, const char *path, int legal) {
    static const char *const names[] = { "", "a file", "a directory", "a file or a directory" };
    struct stat st;
    if (stat(path, &st) != 0) return 0;
    if (!(S_ISREG(st.st_mode) && legal & A_FILE) && !(S_ISDIR(st.st_mode) && legal & A_DIRECTORY))
        refuse("--%s %s: not %s but %s", table[id].name, path, names[legal], kind_of(st.st_mode));
    return 1;
}

/* Returns the notation of an option's value. The words of --backend and --device depend on what the
   program is linked with. */
static const char *notation(int id) {
    static const char *const backends[2][2] = {
        { "threads|procs|tcp;mpi|nccl", "threads|procs|tcp|nccl;mpi" },
        { "threads|procs|tcp|mpi;nccl", "threads|procs|tcp|mpi|nccl" },
    };
    if (id == O_BACKEND)
        return backends[dt_backend_is_built(DT_BACKEND_MPI)][dt_backend_is_built(DT_BACKEND_NCCL)];
    return id == O_DEVICE && !dt_cuda_ready ? "cpu;cuda" : table[id].arg;
}

/* Returns 1 if a value of --schedule is the path of a file: it has a dot or a slash. */
static int is_schedule_file(const char *text) { return strpbrk(text, "./") != NULL; }

static const char *word_of(int id, const char *text) {
    return id == O_SCHEDULE && is_schedule_file(text) ? "FILE" : text;
}

static void parse(value *v, int argc, char **argv) {
    set_defaults(v);
    for (int i = 1; i < argc; i++) { /* read --config first: the command line overrides the file */
        int alone = strcmp(argv[i], "--config") == 0 && i + 1 < argc;
        if (alone || strncmp(argv[i], "--config=", 9) == 0)
            read_config(v, alone ? argv[i + 1] : argv[i] + 9);
    }
    parse_options(v, argc, argv);
}

// ==== 4. Configuration file =====================================================================

/* --config FILE reads a JSON object whose keys are options of this program, as --print-config
   prints them, or DeepSpeed's keys, or both. Options that the file does not set keep their
   defaults, and the command line overrides the file.

   Each row of the table `deepspeed` has a DeepSpeed key (`path`), and `to` says what the key does:
     an option's id   sets the option. If `on` is not NULL, the key's value is a boolean, and `true`
                      sets the option to the text `on`
     IGNORED          nothing, but the printed settings list the key
     BLOCK            the key's value is an object that contains other keys
     other values     see configure_deepspeed */
enum {
    IGNORED = -1,
    BLOCK = -2,
    OPTIMIZER = -3,
    ADAM_W = -4,
    BETAS = -5,
    OFFLOAD = -6,
    SCALE = -7,
    SCHEDULER = -8,
    OFFLOAD_FOLDER = -9,
    GRAD_TYPE = -10,
    SCALE_POWER = -11,
    SCALE_OPTION = -12,
    PIPE_PARTITION = -13,
    PIPE_RECOMPUTE = -14,
    OPTIMIZER_LR = -15,
    WARMUP_FORM = -16
};
typedef struct deepspeed_key {
    const char *path;
    int to;
    const char *on;
} deepspeed_key;
static const deepspeed_key deepspeed[] = {
    { "train_batch_size", O_BATCH, NULL },
    { "train_micro_batch_size_per_gpu", O_MICRO_BATCH, NULL },
    { "gradient_accumulation_steps", O_ACCUM, NULL },
    { "gradient_clipping", O_CLIP, NULL },
    { "gradient_checkpointing", O_RECOMPUTE, "full" },
    { "fp16", BLOCK, NULL },
    { "fp16.enabled", O_DTYPE, "f16" },
    { "fp16.loss_scale", SCALE, NULL },
    { "fp16.initial_scale_power", SCALE_POWER, NULL },
    { "fp16.loss_scale_window", SCALE_OPTION, NULL },
    { "fp16.hysteresis", SCALE_OPTION, NULL },
    { "fp16.min_loss_scale", SCALE_OPTION, NULL },
    { "pipeline", BLOCK, NULL },
    { "pipeline.stages", O_PP, NULL },
    { "pipeline.partition", PIPE_PARTITION, NULL },
    { "pipeline.activation_checkpoint_interval", PIPE_RECOMPUTE, NULL },
    { "bf16", BLOCK, NULL },
    { "bf16.enabled", O_DTYPE, "bf16" },
    { "data_types", BLOCK, NULL },
    { "data_types.grad_accum_dtype", GRAD_TYPE, NULL },
    { "zero_optimization", BLOCK, NULL },
    { "zero_optimization.stage", O_ZERO, NULL },
    { "zero_optimization.overlap_comm", O_OVERLAP, NULL },
    { "zero_optimization.offload_optimizer", BLOCK, NULL },
    { "zero_optimization.offload_optimizer.device", OFFLOAD, NULL },
    { "zero_optimization.offload_optimizer.nvme_path", OFFLOAD_FOLDER, NULL },
    { "zero_optimization.offload_param", BLOCK, NULL },
    { "zero_optimization.offload_param.device", OFFLOAD, NULL },
    { "zero_optimization.offload_param.nvme_path", OFFLOAD_FOLDER, NULL },
    { "optimizer", BLOCK, NULL },
    { "optimizer.type", OPTIMIZER, NULL },
    { "optimizer.params", BLOCK, NULL },
    { "optimizer.params.lr", OPTIMIZER_LR, NULL },
    { "optimizer.params.betas", BETAS, NULL },
    { "optimizer.params.eps", O_EPS, NULL },
    { "optimizer.params.weight_decay", O_WEIGHT_DECAY, NULL },
    { "optimizer.params.momentum", O_MOMENTUM, NULL },
    { "optimizer.params.freeze_step", O_FREEZE_STEPS, NULL },
    { "optimizer.params.adam_w_mode", ADAM_W, NULL },
    { "scheduler", BLOCK, NULL },
    { "scheduler.type", SCHEDULER, NULL },
    { "scheduler.params", BLOCK, NULL },
    { "scheduler.params.warmup_max_lr", O_LR, NULL },
    { "scheduler.params.warmup_type", WARMUP_FORM, NULL },
    { "scheduler.params.warmup_min_lr", WARMUP_FORM, NULL },
    { "scheduler.params.warmup_min_ratio", WARMUP_FORM, NULL },
    { "scheduler.params.warmup_num_steps", O_WARMUP, NULL },
    { "scheduler.params.total_num_steps", O_LR_STEPS, NULL },
    { "scheduler.params.cos_min_ratio", O_MIN_LR_RATIO, NULL },
#define IGNORED_KEY(path) \
    { path, IGNORED, NULL }
    IGNORED_KEY("steps_per_print"),
    IGNORED_KEY("wall_clock_breakdown"),
    IGNORED_KEY("dump_state"),
    IGNORED_KEY("memory_breakdown"),
    IGNORED_KEY("prescale_gradients"),
    IGNORED_KEY("gradient_predivide_factor"),
    IGNORED_KEY("sparse_gradients"),
    IGNORED_KEY("communication_data_type"),
    IGNORED_KEY("zero_allow_untested_optimizer"),
    IGNORED_KEY("activation_checkpointing"),
    IGNORED_KEY("flops_profiler"),
    IGNORED_KEY("comms_logger"),
    IGNORED_KEY("tensorboard"),
    IGNORED_KEY("wandb"),
    IGNORED_KEY("csv_monitor"),
    IGNORED_KEY("aio"),
    IGNORED_KEY("checkpoint"),
    IGNORED_KEY("amp"),
    IGNORED_KEY("fp16.auto_cast"),
    IGNORED_KEY("fp16.consecutive_hysteresis"),
    IGNORED_KEY("bf16.immediate_grad_update"),
    IGNORED_KEY("bf16.check_grad_overflow"),
    IGNORED_KEY("pipeline.seed_layers"),
    IGNORED_KEY("pipeline.pipe_partitioned"),
    IGNORED_KEY("pipeline.grad_partitioned"),
    IGNORED_KEY("zero_optimization.allgather_partitions"),
    IGNORED_KEY("zero_optimization.allgather_bucket_size"),
    IGNORED_KEY("zero_optimization.reduce_scatter"),
    IGNORED_KEY("zero_optimization.reduce_bucket_size"),
    IGNORED_KEY("zero_optimization.contiguous_gradients"),
    IGNORED_KEY("zero_optimization.round_robin_gradients"),
    IGNORED_KEY("zero_optimization.sub_group_size"),
    IGNORED_KEY("zero_optimization.stage3_max_live_parameters"),
    IGNORED_KEY("zero_optimization.stage3_max_reuse_distance"),
    IGNORED_KEY("zero_optimization.stage3_prefetch_bucket_size"),
    IGNORED_KEY("zero_optimization.stage3_param_persistence_threshold"),
    IGNORED_KEY("zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    IGNORED_KEY("zero_optimization.offload_optimizer.pin_memory"),
    IGNORED_KEY("zero_optimization.offload_param.pin_memory"),
    IGNORED_KEY("zero_optimization.offload_optimizer.buffer_count"),
    IGNORED_KEY("zero_optimization.offload_optimizer.fast_init"),
    IGNORED_KEY("zero_optimization.offload_param.buffer_count"),
    IGNORED_KEY("zero_optimization.offload_param.buffer_size"),
    IGNORED_KEY("zero_optimization.offload_param.max_in_cpu"),
    IGNORED_KEY("optimizer.params.cuda_aware"),
    IGNORED_KEY("optimizer.params.comm_backend_name"),
    IGNORED_KEY("optimizer.params.torch_adam"),
    IGNORED_KEY("optimizer.params.bias_correction"),
#undef IGNORED_KEY
};
enum { N_DEEPSPEED_KEYS = sizeof deepspeed / sizeof deepspeed[0] };

/* Sets option `id` to text, which the file contains at config.path. Refuses an option that the file
   sets twice. */
static void configure(value *v, int id, const char *text) {
    if (config.given[id]) refuse("--%s is given twice in this file", table[id].name);
    config.given[id] = 1;
    config.values[id] = strdup(text);
    if (!config.values[id]) refuse("out of memory");
    set(&v[id], id, config.values[id], GIVEN_IN_FILE);
}

/* Writes the shortest text that is read back as x: 3e-4 stays 0.0003. */
static void number_text(char *text, size_t bytes, double x) {
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, bytes, "%.*g", digits, x);
        if (strtod(text, NULL) == x) return;
    }
}

/* Returns the text of a JSON string, or NULL if the value is no string. */
static const char *config_string_or_null(int node) {
    size_t length = 0;
    const char *text = dt_json_string(config.json, node, &length);
    if (text && strlen(text) != length) refuse("a NUL in a text");
    if (length > CONFIG_TEXT)
        refuse("a text of %zu bytes; at most %d are allowed", length, CONFIG_TEXT);
    return text;
}

/* Returns a JSON value as the text that a user would write on the command line; NULL for an array,
   an object or null. `buffer` receives the text of a number. */
static const char *config_text(int node, char *buffer, size_t bytes) {
    double x;
    int64_t integer;
    int yes;
    const char *text = config_string_or_null(node);
    if (text) return text;
    if (dt_json_int(config.json, node, &integer))
        snprintf(buffer, bytes, "%lld", (long long)integer);
    else if (dt_json_number(config.json, node, &x))
        number_text(buffer, bytes, x);
    else if (dt_json_bool(config.json, node, &yes))
        return yes ? "on" : "off";
    else
        return NULL;
    return buffer;
}

/* Sets an option to a JSON value. Refuses a JSON value whose type does not fit the option's kind. A
   null changes nothing. */
static void configure_as_is(value *v, int id, int node) {
    dt_json_kind kind = dt_json_kind_of(config.json, node);
    char buffer[40];
    const char *text = config_text(node, buffer, sizeof buffer);
    int what = table[id].kind, number = what == INT || what == REAL || what == SIZE;
    if (kind == DT_JSON_NULL) return;
    if (number && kind != DT_JSON_NUMBER && what != SIZE) refuse("a number is needed");
    if ((what == SWITCH || what == FLAG) && kind != DT_JSON_BOOL) refuse("true or false is needed");
    if (!text || ((what == WORD || what == TEXT) && kind == DT_JSON_BOOL))
        refuse("a text is needed");
    if (what == FLAG && strcmp(text, "off") == 0) return;
    configure(v, id, text);
}

static const char *config_string(int node) {
    const char *text = config_string_or_null(node);
    if (!text) refuse("a text is needed");
    return text;
}

/* Looks up a JSON string in `words` and returns the element of `values` with the same index.
   Refuses a string that is not in `words`. */
static const char *config_word(
    int node, const char *const *words, const char *const *values, int n) {
    const char *text = config_string(node);
    char legal[200] = "";
    for (int i = 0; i < n; i++) {
        if (strcmp(text, words[i]) == 0) return values[i];
        snprintf(
            legal + strlen(legal), sizeof legal - strlen(legal), "%s%s", i ? "|" : "", words[i]);
    }
    refuse("\"%s\": the legal values are %s", text, legal);
}

/* Sets options from the keys of fp16's dynamic loss scale, which count only if fp16 is enabled, and
   from those of the block "pipeline". */
static void configure_scale_or_pipeline(value *v, int to, int node, int parent) {
    static const char *const partitions[] = { "best", "uniform" }, *const is[] = { "cost", "even" };
    char text[40];
    int yes = 0;
    int64_t n = 0;
    if (to == PIPE_PARTITION) {
        configure(v, O_PARTITION, config_word(node, partitions, is, 2));
        return;
    }
    if (to != SCALE_OPTION && (!dt_json_int(config.json, node, &n) || n < 0 || n > 1000))
        refuse("a whole number from 0 to 1000 is needed");
    snprintf(text, sizeof text, "full:%lld", (long long)n);
    if (to == PIPE_RECOMPUTE && n > 0) configure(v, O_RECOMPUTE, text);
    if (to == PIPE_RECOMPUTE ||
        !dt_json_bool(config.json, dt_json_find(config.json, parent, "enabled"), &yes) || !yes)
        return;
    snprintf(text, sizeof text, "%.17g", pow(2, (double)n));
    if (to == SCALE_POWER)
        configure(v, O_LOSS_SCALE_INIT, text);
    else
        configure_as_is(v,
            strcmp(config.path, "fp16.loss_scale_window") == 0 ? O_LOSS_SCALE_WINDOW
            : strcmp(config.path, "fp16.hysteresis") == 0      ? O_LOSS_SCALE_HYSTERESIS
                                                               : O_LOSS_SCALE_MIN,
            node);
}

/* Returns 1 if a key of DeepSpeed has the value "auto". */
static int is_automatic(int node) {
    const char *text = dt_json_string(config.json, node, NULL);
    return text && strcmp(text, "auto") == 0;
}

static void append_key(char *list, size_t bytes, const char *path) {
    snprintf(strchr(list, 0), bytes - strlen(list), " %s", path);
}

/* Sets --lr from the optimizer's lr, unless the scheduler has a warmup_max_lr, which counts in
   DeepSpeed, too. */
static void configure_optimizer_lr(value *v, int node) {
    int params = dt_json_find(config.json, dt_json_find(config.json, 0, "scheduler"), "params");
    double peak = 0, lr = 0;
    if (!dt_json_number(config.json, dt_json_find(config.json, params, "warmup_max_lr"), &peak)) {
        configure_as_is(v, O_LR, node);
        return;
    }
    if (!dt_json_number(config.json, node, &lr)) refuse("a number is needed");
    if (lr != peak)
        snprintf(strchr(config.note, 0), sizeof config.note - strlen(config.note),
            "   the scheduler's warmup_max_lr %g counts, not the optimizer's lr %g", peak, lr);
}

/* Checks the keys of the form of the warmup, which grows linearly from 0. */
static void check_warmup_form(int node) {
    static const char *const types[] = { "linear", "log" };
    double x = 0;
    if (strcmp(config.path, "scheduler.params.warmup_type") == 0) {
        if (strcmp(config_word(node, types, types, 2), "log") == 0)
            refuse("\"log\": the warmup of this program is linear; use \"linear\"");
    } else if (!dt_json_number(config.json, node, &x) || x != 0)
        refuse("only 0 is possible: the warmup begins at lr / warmup_num_steps");
}

static void configure_betas(value *v, int node) {
    if (dt_json_kind_of(config.json, node) != DT_JSON_ARRAY ||
        dt_json_count(config.json, node) != 2)
        refuse("two numbers are needed");
    for (int i = 0; i < 2; i++) {
        config.node = dt_json_at(config.json, node, i);
        configure_as_is(v, i ? O_BETA2 : O_BETA1, config.node);
    }
}

/* Sets options from a DeepSpeed key that does not correspond to one option. `to` is the field of
   the key's row in `deepspeed`, `node` is the key's value and `parent` is the object that contains
   the key. DeepSpeed's Adam is AdamW unless adam_w_mode is false. */
static void configure_deepspeed(value *v, int to, int node, int parent) {
    if (to <= SCALE_POWER && to >= PIPE_RECOMPUTE) {
        configure_scale_or_pipeline(v, to, node, parent);
        return;
    }
    static const char *const optimizers[] = { "Adam", "AdamW", "SGD", "OneBitAdam" };
    static const char *const schedulers[] = { "WarmupLR", "WarmupDecayLR", "WarmupCosineLR" };
    static const char *const devices[] = { "none", "cpu", "nvme" };
    double x;
    int yes;
    if (to == OPTIMIZER) {
        static const char *const is[] = { "adamw", "adamw", "sgd", "onebit-adam" };
        const char *type = config_word(node, optimizers, is, 4);
        int params = dt_json_find(config.json, parent, "params");
        int mode = dt_json_find(config.json, params, "adam_w_mode");
        int l2 = dt_json_bool(config.json, mode, &yes) && !yes &&
                 strcmp(config_string(node), "Adam") == 0;
        configure(v, O_OPTIMIZER, l2 ? "adam" : type);
    } else if (to == GRAD_TYPE) {
        static const char *const types[] = { "fp32", "bf16", "fp16" };
        static const char *const is[] = { "f32", "bf16", "f16" };
        if (dt_json_kind_of(config.json, node) != DT_JSON_NULL)
            configure(v, O_GRAD_DTYPE, config_word(node, types, is, 3));
    } else if (to == OPTIMIZER_LR) {
        configure_optimizer_lr(v, node);
    } else if (to == WARMUP_FORM) {
        check_warmup_form(node);
    } else if (to == ADAM_W) {
        if (!dt_json_bool(config.json, node, &yes)) refuse("true or false is needed");
    } else if (to == BETAS) {
        configure_betas(v, node);
    } else if (to == OFFLOAD) {
        int nvme = dt_json_find(config.json, parent, "nvme_path");
        const char *folder = nvme >= 0 ? config_string(nvme) : "";
        const char *const is[] = { "none", "cpu", folder };
        const char *device = config_word(node, devices, is, 3);
        if (!*device) refuse("\"nvme\" needs nvme_path, a folder");
        configure(v, strstr(config.path, "param.") ? O_OFFLOAD_PARAMS : O_OFFLOAD_OPTIM, device);
    } else if (to == SCALE) {
        if (!dt_json_number(config.json, node, &x)) refuse("a number is needed");
        if (!dt_json_bool(config.json, dt_json_find(config.json, parent, "enabled"), &yes) || !yes)
            return;
        if (x == 0)
            configure(v, O_LOSS_SCALE, "dynamic");
        else
            configure_as_is(v, O_LOSS_SCALE, node);
    } else {
        static const char *const is[] = { "constant", "linear", "cosine" };
        const char *kind = config_word(node, schedulers, is, 3);
        configure(v, O_LR_SCHEDULE, kind);
        if (dt_json_find(config.json, dt_json_find(config.json, parent, "params"), "warmup_type") <
            0)
            snprintf(strchr(config.note, 0), sizeof config.note - strlen(config.note),
                "   warmup: linear (DeepSpeed's default is log)");
        if (strcmp(kind, "linear") == 0) configure(v, O_MIN_LR_RATIO, "0");
    }
}

static __attribute__((noreturn)) void refuse_key(const char *path) {
    const char *nearest = "";
    int min_distance = 1 + (int)strlen(path) / 3;
    for (int i = 0; i < N_OPTIONS; i++)
        if (is_option(i) && edit_distance(path, table[i].name) <= min_distance)
            nearest = table[i].name, min_distance = edit_distance(path, nearest) - 1;
    for (int i = 0; i < N_DEEPSPEED_KEYS; i++)
        if (edit_distance(path, deepspeed[i].path) <= min_distance)
            nearest = deepspeed[i].path, min_distance = edit_distance(path, nearest) - 1;
    refuse("unknown key%s%s", *nearest ? "; the nearest is " : "", nearest);
}

/* Returns the key of `node`. Sets config.node to `node`, and config.path to `prefix` followed by
   the key, because error texts contain the path. Refuses a key longer than CONFIG_KEY; that error's
   path contains only the beginning of the key. */
static const char *config_enter(int node, const char *prefix) {
    size_t bytes = 0, shown = 0;
    const char *key = dt_json_key(config.json, node, &bytes);
    for (size_t i = 0; i <= bytes && i <= CONFIG_KEY; i++)
        if ((key[i] & 0xc0) != 0x80) shown = i; /* do not split a UTF-8 character */
    snprintf(config.path, sizeof config.path, "%s%.*s%s", prefix, (int)shown, key,
        shown < bytes ? ".." : "");
    config.node = node;
    if (strlen(key) < bytes) refuse("a NUL in a key");
    if (shown < bytes) refuse("unknown key: it has %zu bytes, the longest %d", bytes, CONFIG_KEY);
    if (strchr(key, '.')) refuse("unknown key: nest objects instead of writing a dot");
    return key;
}

/* Returns 1 if nvme_path of this object, an offload_optimizer or offload_param, is used. */
static int offloads_to_folder(int object) {
    const char *device =
        dt_json_string(config.json, dt_json_find(config.json, object, "device"), NULL);
    return device && strcmp(device, "nvme") == 0;
}

/* Sets the options given by the members of a JSON object. `prefix` is the path of the object and a
   dot; it is "" for the file's outermost object. */
static void configure_block(value *v, int object, const char *prefix) {
    if (dt_json_kind_of(config.json, object) != DT_JSON_OBJECT) refuse("an object is needed");
    for (int i = 0; i < dt_json_count(config.json, object); i++) {
        int node = dt_json_at(config.json, object, i), at = 0, yes = 0;
        char path[sizeof config.path];
        const char *key = config_enter(node, prefix);
        strcpy(path, config.path);
        /* the key "optimizer" is DeepSpeed's if its value is an object, else --optimizer */
        int block = dt_json_kind_of(config.json, node) == DT_JSON_OBJECT;
        while (at < N_DEEPSPEED_KEYS && strcmp(deepspeed[at].path, path) != 0) at++;
        int id =
            *prefix || (block && at < N_DEEPSPEED_KEYS) ? N_OPTIONS : find_option(key, strlen(key));
        if (id == O_CONFIG && dt_json_kind_of(config.json, node) != DT_JSON_NULL)
            refuse("a file cannot name another file");
        if (id < N_OPTIONS)
            configure_as_is(v, id, node);
        else if (at == N_DEEPSPEED_KEYS)
            refuse_key(path);
        else if (deepspeed[at].to == IGNORED ||
                 (deepspeed[at].to == OFFLOAD_FOLDER && !offloads_to_folder(object)))
            append_key(config.ignored, sizeof config.ignored, path);
        else if (deepspeed[at].to != BLOCK && is_automatic(node))
            append_key(config.automatic, sizeof config.automatic, path);
        else if (deepspeed[at].to == BLOCK) {
            strcat(path, ".");
            configure_block(v, node, path);
        } else if (deepspeed[at].on) {
            if (!dt_json_bool(config.json, node, &yes)) refuse("true or false is needed");
            if (yes) configure(v, deepspeed[at].to, deepspeed[at].on);
        } else if (deepspeed[at].to >= 0)
            configure_as_is(v, deepspeed[at].to, node);
        else if (deepspeed[at].to != OFFLOAD_FOLDER) /* configure_deepspeed reads it with device */
            configure_deepspeed(v, deepspeed[at].to, node, object);
    }
    config.node = -1;
}

static void read_config(value *v, const char *path) {
    size_t bytes = 0;
    dt_ctx *ctx = probe_ctx();
    check_kind(O_CONFIG, path, A_FILE);
    char *text = dt_file_read(ctx, path, 1 << 20, &bytes);
    config.json = text ? dt_json_parse(ctx, path, text, bytes) : NULL;
    if (dt_error(ctx) != DT_OK) refuse("--config: %s", error_without_rank(ctx));
    config.ctx = ctx;
    config.node = 0;
    configure_block(v, 0, "");
    config.node = -1;
    dt_json_free(config.json);
    dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
    dt_ctx_free(ctx);
}

// ==== 5. Help and configuration =================================================================

/* Prints the names of the options that are not available in this build, in lines of at most 100
   characters. */
static void print_not_built(void) {
    line out = { .fd = 1 };
    line_printf(&out, "\n");
    line_printf(&out, "Not in this build:");
    for (int i = 0; i < N_OPTIONS; i++) {
        if (table[i].availability != NOT_BUILT) continue;
        if (out.used + strlen(table[i].name) + 3 > 100)
            line_printf(&out, "\n"), line_printf(&out, " ");
        line_printf(&out, " --%s", table[i].name);
    }
    line_printf(&out, "\n");
}

static void print_lines(const char *const *lines, size_t n) {
    line out = { .fd = 1 };
    for (size_t i = 0; i < n; i++) line_printf(&out, "%s\n", lines[i]);
}
#define PRINT_LINES(lines) print_lines(lines, sizeof(lines) / sizeof *(lines))

/* What --help prints after the options. */
static const char *const help_foot[] = { "",
    "--data FILE,FILE,.. --data-mix W,W,..: after k sequences of the run, the file with weight "
    "w "
    "of all W has had",
    "k w/W of them, rounded up or down. Each file is read in its own order and repeats. One "
    "epoch "
    "is the sequences",
    "of all files. A file can be a folder, too.", "",
    "x.jsonl is instruction data, one example per line: {\"prompt\": text, \"answer\": text} "
    "or "
    "{\"messages\":",
    "[{\"role\": text, \"content\": text}, ..]} in ChatML. An example is one sequence: it is "
    "cut "
    "off after --seq",
    "tokens, or padded. Only the answer, or what the assistant says, and its end token have "
    "labels. An example",
    "whose answer begins after --seq tokens is left out, and counted in the settings.", "",
    "--documents on: a document ends with the tokenizer's <|endoftext|> or <|end_of_text|> or, "
    "in "
    "bytes, with two",
    "newlines; --document-end is another token or other bytes. The end has no label. Documents "
    "continue over files.",
    "bits per byte: the validation loss of all labels, in bits, divided by the bytes of their "
    "text.",
    "", "mfu: N counts the parameters in matrix products: not wpe, and wte only if it is the head.",
    "Recompute is not counted. X is in TFLOP/s.", "",
    "Environment: DT_RANK and DT_WORLD_SIZE, or the variables of torchrun, srun or mpirun, "
    "give a process",
    "its rank. DT_RENDEZVOUS, DT_TOKEN_FILE and DT_TOKEN apply if --rendezvous and "
    "--token-file are not given.",
    "DT_CHECK=1 compares the calls of all ranks over tcp and mpi in every step, not only in "
    "the first 100.",
    "DT_FAULT=KIND:rank=R:seq=N[:s=SECONDS] injects a fault at rank R's Nth operation; KIND "
    "is kill, stop,",
    "exit, spin, delay, drop, flip or nan. kill -USR1 prints where each rank is.", "",
    "Control bytes in paths and files are printed as \\xNN; those in generated text only on a "
    "terminal. A run fails",
    "if standard output is on a full disk, or if its reader has exited or stalls for half of",
    "--timeout; with --save it first finishes the step and saves.", "",
    "Of an option that is given twice the last value counts; two paths are an error.", "",
    "Exit status: 0 done, 1 the run failed, 2 the command line asks for something impossible, "
    "143 ended by",
    "SIGTERM; with --save the program first finishes the step and saves." };

static void print_help(void) {
    static const char *const head[] = { "train_gpt: trains a GPT-2 or a Llama on one or many "
                                        "ranks. Options, with their defaults in brackets;",
        "--no-NAME turns an on|off option off:" };
    line out = { .fd = 1 };
    PRINT_LINES(head);
    for (int i = 0; i < N_OPTIONS; i++) {
        const option *o = &table[i];
        const char *arg = notation(i);
        char left[96], words[64];
        if (!is_option(i)) line_printf(&out, "\n"), line_printf(&out, "%s\n", o->name);
        if (!is_option(i) || o->availability == NOT_BUILT) continue;
        snprintf(words, sizeof words, "%.*s", o->kind == WORD ? (int)strcspn(arg, ";") : 63, arg);
        snprintf(left, sizeof left, "--%s %s", o->name, words);
        line_printf(&out, "  %-36s%s%s", left, *o->help ? " " : "", o->help);
        if (o->default_text) line_printf(&out, " [%s]", o->default_text);
        const char *later = o->kind == WORD ? strchr(arg, ';') : NULL;
        if (later) line_printf(&out, " (not in this build: %s)", later + 1);
        line_printf(&out, "\n");
    }
    print_not_built();
    PRINT_LINES(help_foot);
}

/* Writes an option's value as JSON to the stream `to`. `json` is dt's JSON writer. Also escapes DEL
   and the C1 control characters, which JSON allows but terminals interpret. */
static void print_value(FILE *to, dt_json_out *json, const value *v, int id) {
    const option *o = &table[id];
    json->used = 0;
    if (o->kind == SWITCH || o->kind == FLAG)
        dt_json_put_bool(json, NULL, v->number != 0);
    else if (!v->text || id == O_CONFIG)
        dt_json_put_string(json, NULL, NULL);
    else if (o->kind == INT || o->kind == SIZE)
        dt_json_put_int(json, NULL, (int64_t)v->number);
    else if (o->kind == REAL)
        dt_json_put_number(json, NULL, v->number);
    else if (id == O_ZERO)
        dt_json_put_int(json, NULL, (int64_t)v->number);
    else
        dt_json_put_string(json, NULL, v->text);
    if (dt_error(json->ctx) != DT_OK) refuse("--%s: %s", o->name, error_without_rank(json->ctx));
    for (const char *at = json->text; *at; at++) {
        if ((unsigned char)*at == 0xc2 && (unsigned char)at[1] < 0xa0)
            at++;
        else if (*at != 127) {
            putc(*at, to);
            continue;
        }
        fprintf(to, "\\u%04x", (unsigned char)*at);
    }
}

/* The tokenizer of --tokenizer or of the folder of --model, which is open for the whole run; `tok`
   is NULL without one. Only rank 0 uses it after the ranks have started. */
static struct {
    dt_ctx *ctx;
    tok *tok;
    int32_t *bytes; /* (vocabulary of the model): bytes of text of each token; NULL without one */
    char path[4096];
    /* why the tokenizer in the folder of --model cannot be used; else empty */
    char unusable[512];
} tokenizer;

/* Writes what a checkpoint says of the data (see check_sources): digests of the tokenizer and of the
   beginning of each source. */
static void print_sources(FILE *to, const train_files *data) {
    fprintf(to, ",\n  \"tokenizer-digest\": \"");
    if (tokenizer.tok)
        fprintf(to, "%016llx", (unsigned long long)encode_tokenizer_digest(tokenizer.tok));
    fprintf(to, "\",\n  \"sources\": [");
    for (const train_files *f = data; f; f = f->next) {
        int64_t bytes = ENCODE_DIGEST_BYTES;
        uint64_t digest = encode_source_digest(f, &bytes);
        fprintf(to, "%s\n    { \"tokens\": %lld, \"bytes\": %lld, \"digest\": \"%016llx\" }",
            f == data ? "" : ",", (long long)f->tokens, (long long)bytes,
            (unsigned long long)digest);
    }
    fprintf(to, "\n  ]");
}

/* Returns the text of a JSON object with the values of all options except the flags; --quiet is the
   only flag in it. With `data`, the object also describes these data, for a checkpoint. The caller
   frees the text. */
static char *config_json(const value *v, const train_files *data) {
    char *text = NULL;
    size_t bytes;
    FILE *to = open_memstream(&text, &bytes);
    dt_json_out json = { probe_ctx(), NULL, 0, 0 };
    if (!to) refuse("out of memory");
    for (int i = 0, n = 0; i < N_OPTIONS; i++) {
        if (!is_option(i) || (table[i].kind == FLAG && i != O_QUIET)) continue;
        fprintf(to, "%s  \"%s\": ", n++ ? ",\n" : "{\n", table[i].name);
        print_value(to, &json, &v[i], i);
    }
    if (data && data->count) print_sources(to, data);
    fputs("\n}\n", to);
    if (fclose(to) != 0) refuse("out of memory");
    dt_json_out_free(&json);
    dt_ctx_free(json.ctx);
    return text;
}

static void print_refused(void) {
    static const char *const first[] = {
        "Sizes are refused by these rules, before any rank starts:",
        "  heads divides width                          each head is width/heads wide",
        "  kv-heads divides heads                       each key/value head serves heads/kv-heads "
        "query heads",
        "  dp x pp x cp x tp x ep = ranks               with expert-tp: dp x pp x cp x tp = ranks",
        "  ep x expert-tp divides dp x cp x tp          expert folding: the experts divide the "
        "ranks "
        "of a stage anew",
        "  tp divides seq/cp with expert-tp             each rank dispatches tokens of its own",
        "  ep divides experts, top-k <= experts         a rank holds complete experts; tp shards "
        "each expert",
        "  G of expert-groups divides experts           the N groups have at least top-k experts",
        "  V <= N + R of mla, R even                    attention has one size of keys and values",
        "  kv-heads = heads with mla; arch llama        also with mtp",
        "  pp x chunks <= 2 layers + 2                  a stage is a range of half layers, "
        "embedding and head",
        "  chunks = 1 unless schedule is interleaved    interleaved needs pp >= 2; zbv and "
        "dualpipe-v have 2",
        "  partition has pp x chunks numbers            their sum is 2 layers",
        "  tp divides heads                             a rank holds complete heads; ffn and vocab "
        "need not divide",
        "  tp divides kv-heads, or kv-heads divides tp  with more ranks than kv heads, ranks hold "
        "copies",
        "  cp divides seq; 2 cp divides it with zigzag  every rank holds the same number of tokens",
        "  cp divides heads/tp with ulysses             and divides kv-heads/tp or is a multiple "
        "of it",
        "  tp divides seq/cp with sp                    tp also shards a rank's tokens",
        "  shard-group divides replicas x cp            with zero 1 to 3; zero3-keep is for zero 3",
        "  batch = micro-batch x accum x replicas       replicas = dp x ep, with expert-tp dp; two "
        "give the third, three must agree",
        "  micro-batch x replicas divides START, INCR   of batch-ramp; INCR divides batch - START",
        "  width/heads even, with --arch llama          the rotary embedding rotates pairs of "
        "elements",
        "  vocab >= 256, or > every token id            bytes are tokens; shards and tokenizers "
        "have ids",
        "  seq + 1 <= tokens of --data, and of --val    one sequence and the label of its last "
        "token",
    };
    static const char *const rest[] = {
        "  given sizes equal those of --model           seq may be smaller",
        "  --model without --experts                    the file says which experts it has",
        "  text of --data needs vocab >= 256            a --model with less needs shards of its "
        "own "
        "tokens, or a --tokenizer",
        "  --optimizer onebit-adam: zero 0, reduce fixed, offload-optim none; only it has "
        "freeze-steps",
        "  --optimizer muon: offload-optim, offload-params none",
        "  offload-params needs zero 3                  with less every rank holds all values",
        "  offload-optim, offload-params: one folder    unless one of them is cpu or none",
        "  shard-group needs zero 1 to 3                with zero 0 nothing is sharded",
        "  --device cuda: no dtype f64, not procs       GPU kernels compute in f32; a fork has no "
        "GPU",
        "  --resume: the options of the saved run       but steps may grow, and the layout may "
        "change",
        "  stop-at <= steps",
        "  save-every, keep, max-restarts need save     the folder holds no checkpoints of another "
        "run",
        "  min-ranks <= ranks, with max-restarts        for threads or procs; launchers restart "
        "their own ranks",
    };
    line out = { .fd = 1 };
    PRINT_LINES(first);
    line_printf(&out, "  sequences <= %d, with --shuffle on    sequences = (tokens - 1) / seq\n",
        DT_SAMPLER_MAX_SHUFFLED);
    PRINT_LINES(rest);
}

// ==== 6. From options to a run ==================================================================

static int int_of(const value *v, int id) { return (int)v[id].number; }
static int64_t long_of(const value *v, int id) { return (int64_t)v[id].number; }

/* Returns the largest divisor of n that is at most `max`. */
static int64_t largest_divisor(int64_t n, int64_t max) {
    int64_t d = max < n ? max : n;
    while (d > 1 && n % d != 0) d--;
    return d < 1 ? 1 : d;
}

/* Returns the smallest divisor of n that is at least `min`, or n if min > n. */
static int64_t smallest_divisor(int64_t n, int64_t min) {
    while (min < n && n % min != 0) min++;
    return min < n ? min : n;
}

/* Reads --recompute: one of three words, or full:K, where K is the number of layers that are
   recomputed together. */
static void resolve_recompute(const char *text, gpt_config *c) {
    /* in the order of the GPT_RECOMPUTE_* constants */
    static const char *const words[] = { "none", "selective", "full" };
    int best = 0, min_distance = 99;
    char word[16];
    snprintf(word, sizeof word, "%.*s", (int)strcspn(text, ":"), text);
    for (int i = 0; i < 3; i++) {
        int distance = edit_distance(word, words[i]);
        if (distance < min_distance) best = i, min_distance = distance;
    }
    c->recompute = best;
    if (min_distance == 0 && !strchr(text, ':')) return;
    const char *digits = strchr(text, ':') ? strchr(text, ':') + 1 : "";
    double every = 0;
    size_t n = decimal(digits, 0, &every);
    c->recompute_every = (int)fmax(1, fmin(every, c->layers));
    if (min_distance == 0 && best == GPT_RECOMPUTE_FULL && n && !digits[n] &&
        c->recompute_every == every)
        return;
    if (*digits && best == GPT_RECOMPUTE_FULL)
        refuse("--recompute %s: K of full:K is a whole number from 1 to the %d --layers; use "
               "--recompute full:%d",
            text, c->layers, c->recompute_every);
    refuse("--recompute %s: the legal values are none|selective|full|full:K; use --recompute %s",
        text, words[best]);
}

/* A log callback that prints all messages except errors. The code that uses this callback prints
   the first failure itself, after the run or after the check of a file. With --quiet it does not
   report stragglers, which only cost time; other notices say that something was lost or skipped. */
static void log_without_errors(void *user, int level, int rank, const char *text) {
    (void)user;
    if (launched.is_quiet && strstr(text, "is a straggler")) return;
    if (level != DT_LOG_ERROR) dt_host_default()->log(dt_host_default()->user, level, rank, text);
}

/* A log callback that prints errors at once, and not only after dt_run has returned. A stuck or
   stopped rank may delay the end of dt_run, and when a rank dies, an MPI launcher may kill the
   other ranks within milliseconds. */
static void log_first_error(void *user, int level, int rank, const char *text) {
    if (level != DT_LOG_ERROR) {
        log_without_errors(user, level, rank, text);
        return;
    }
    print_error("error: %s\n", text);
    set_flag(launched.failure_printed, 1);
}

/* Returns a context for reading files before any rank starts. The caller frees the context. */
static dt_ctx *probe_ctx(void) {
    dt_host host = *dt_host_default();
    host.log = log_without_errors;
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .kernels = dt_kernels_cpu(), .host = &host });
    if (!ctx) refuse("out of memory");
    return ctx;
}

/* Returns the context's error text without the prefix "rank 0: ", because no rank has started. */
static const char *error_without_rank(dt_ctx *ctx) {
    const char *text = dt_error_text(ctx);
    return strncmp(text, "rank 0: ", 8) == 0 ? text + 8 : text;
}

/* Sets an option to a size that the file of --model contains. Refuses the run if the user has given
   a different size. */
static void size_from_file(value *v, int id, int64_t size) {
    if (v[id].from >= GIVEN && long_of(v, id) != size)
        refuse("--%s %s: the model in %s has %lld; leave --%s out", table[id].name, v[id].text,
            v[O_MODEL].text, (long long)size, table[id].name);
    if (v[id].from < GIVEN) compute(&v[id], size);
}

static void word_from_file(value *v, int id, const char *word) {
    if (v[id].from >= GIVEN && strcmp(v[id].text, word) != 0)
        refuse("--%s %s: the model in %s has %s; leave --%s out", table[id].name, v[id].text,
            v[O_MODEL].text, word, table[id].name);
    if (v[id].from < GIVEN) set(&v[id], id, word, COMPUTED);
}

/* Returns the model's configuration from the file of --model, and sets the options of the model to
   match. Only --seq may differ: it may be smaller than the file's number of positions. */
static gpt_config model_of_file(value *v) {
    dt_ctx *ctx = probe_ctx();
    check_kind(O_MODEL, v[O_MODEL].text, EITHER);
    gpt_config c = gpt_config_from(ctx, v[O_MODEL].text);
    if (dt_error(ctx) != DT_OK) refuse("--model: %s", error_without_rank(ctx));
    dt_ctx_free(ctx);
    const int ids[] = { O_LAYERS, O_WIDTH, O_HEADS, O_KV_HEADS, O_FFN, O_VOCAB };
    const int64_t sizes[] = { c.layers, c.width, c.heads, c.kv_heads, c.ffn, c.vocab };
    for (int i = 0; i < 6; i++) size_from_file(v, ids[i], sizes[i]);
    word_from_file(v, O_ARCH, c.arch == GPT_LLAMA ? "llama" : "gpt2");
    word_from_file(v, O_TIE, c.tied ? "on" : "off");
    if (v[O_SEQ].from < GIVEN) compute(&v[O_SEQ], c.seq < 1024 ? c.seq : 1024);
    if (int_of(v, O_SEQ) > c.seq)
        refuse("--seq %s: the model in %s has %d positions; use --seq %d or less", v[O_SEQ].text,
            v[O_MODEL].text, c.seq, c.seq);
    return c;
}

static gpt_config model_of_options(value *v) {
    int width = int_of(v, O_WIDTH), heads = int_of(v, O_HEADS), llama = v[O_ARCH].number != 0;
    if (!v[O_KV_HEADS].text) compute(&v[O_KV_HEADS], heads);
    if (!v[O_FFN].text)
        compute(&v[O_FFN], llama ? ((int64_t)width * 8 / 3 + 31) / 32 * 32 : 4 * (int64_t)width);
    int kv_heads = int_of(v, O_KV_HEADS);
    if (width % heads != 0)
        refuse("--heads %d does not divide --width %d; use --heads %d or --width %lld", heads,
            width, (int)largest_divisor(width, heads), ((long long)width / heads + 1) * heads);
    if (heads % kv_heads != 0)
        refuse("--kv-heads %d does not divide --heads %d; use --kv-heads %d", kv_heads, heads,
            (int)largest_divisor(heads, kv_heads));
    if (llama && width / heads % 2 != 0)
        refuse("--arch llama: the rotary embedding rotates pairs, but --width %d / --heads %d = %d "
               "is odd; "
               "use --width %d",
            width, heads, width / heads, (width / heads + 1) * heads);
    return (gpt_config){ .layers = int_of(v, O_LAYERS),
        .width = width,
        .heads = heads,
        .kv_heads = kv_heads,
        .ffn = int_of(v, O_FFN),
        .seq = int_of(v, O_SEQ),
        .vocab = int_of(v, O_VOCAB),
        .tied = v[O_TIE].number != 0,
        .arch = llama ? GPT_LLAMA : GPT_GPT2 };
}

/* Returns the value of an option that is `word` or a number: 0 if it is `word`, else the number.
   The number must be greater than 0 and at most `max`, and whole if is_integer is 1. */
static double number_or_word(const value *v, int id, const char *word, double max, int is_integer) {
    double x = 0;
    size_t n = decimal(v[id].text, !is_integer, &x);
    if (strcmp(v[id].text, word) == 0) return 0;
    if (!n || v[id].text[n] || !(x > 0 && x <= max))
        refuse("--%s %s: %s, or a %snumber up to %g", table[id].name, v[id].text, word,
            is_integer ? "whole " : "", max);
    return x;
}

/* Reads n whole numbers that colons separate. Returns 1 if `text` is nothing else. */
static int colon_numbers(const char *text, int *out, int n) {
    for (int i = 0; i < n; i++) {
        double x = 0;
        size_t length = decimal(text, 0, &x);
        if (!length || !(x >= 0 && x <= MEGA) || text[length] != (i + 1 < n ? ':' : 0)) return 0;
        out[i] = (int)x;
        text += length + 1;
    }
    return 1;
}

static void resolve_expert_groups(const char *text, gpt_config *c) {
    int n[2] = { 0 };
    if (strcmp(text, "off") == 0) return;
    if (!colon_numbers(text, n, 2) || n[0] < 1 || n[1] < 1 || n[1] > n[0])
        refuse("--expert-groups %s: G:N, the N best of G groups, as in --expert-groups 4:2", text);
    if (c->experts % n[0] != 0)
        refuse("--expert-groups %s: %d groups do not divide --experts %d; use %d:%d", text, n[0],
            c->experts, (int)largest_divisor(c->experts, n[0]), 1);
    if (c->top_k > n[1] * (c->experts / n[0]))
        refuse("--expert-groups %s: %d groups of %d experts have fewer than --top-k %d; use %d:%d",
            text, n[1], c->experts / n[0], c->top_k, n[0],
            (c->top_k * n[0] + c->experts - 1) / c->experts);
    c->expert_groups = n[0];
    c->top_groups = n[1];
}

/* Sets an option to what the file of --model says. Refuses the run if the user has given another
   value. */
__attribute__((format(printf, 3, 4))) static void text_from_file(
    value *v, int id, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(v[id].buffer, sizeof v[id].buffer, fmt, args);
    va_end(args);
    if (v[id].from >= GIVEN && strcmp(v[id].text, v[id].buffer) != 0)
        refuse("--%s %s: the file of --model says it; leave --%s out", table[id].name, v[id].text,
            table[id].name);
    if (v[id].from >= GIVEN) return;
    v[id].text = v[id].buffer;
    v[id].from = COMPUTED;
}

/* Sets the options of a mixture to those of the model in the file of --model. */
static void experts_from_file(value *v, const gpt_config *c) {
    char text[24];
    snprintf(text, sizeof text, "%d", c->experts);
    const char *has = c->experts ? text : "dense";
    if (v[O_EXPERTS].from >= GIVEN && strcmp(v[O_EXPERTS].text, has) != 0)
        refuse("--experts %s: the model in %s has %s; leave --experts out", v[O_EXPERTS].text,
            v[O_MODEL].text, has);
    if (!c->experts) return;
    if (v[O_EXPERTS].from < GIVEN) compute(&v[O_EXPERTS], c->experts);
    size_from_file(v, O_TOP_K, c->top_k);
    size_from_file(v, O_MOE_EVERY, c->moe_every ? c->moe_every : 1);
    size_from_file(v, O_SHARED_EXPERTS, c->shared_experts);
    size_from_file(v, O_FIRST_DENSE, c->first_dense);
    size_from_file(v, O_MOE_FFN, c->moe_ffn ? c->moe_ffn : c->ffn);
    word_from_file(v, O_ROUTE, c->route == DT_ROUTE_SIGMOID ? "sigmoid" : "softmax");
    if (c->expert_groups)
        text_from_file(v, O_EXPERT_GROUPS, "%d:%d", c->expert_groups, c->top_groups);
    text_from_file(v, O_GATE_SCALE, "%g", c->gate_scale > 0 ? c->gate_scale : 1);
}

/* Checks the MoE options and copies them to the model's configuration. In a dense model (without
   --experts) they have no effect. */
static void resolve_experts(value *v, gpt_config *c) {
    if (v[O_MODEL].text)
        experts_from_file(v, c);
    else
        c->experts = (int)number_or_word(v, O_EXPERTS, "dense", MEGA, 1);
    c->capacity = number_or_word(v, O_CAPACITY, "dropless", 1e9, 0);
    c->balance = v[O_BALANCE_LOSS].number;
    c->z = v[O_Z_LOSS].number;
    c->router_bias = v[O_ROUTER_BIAS].number;
    if (v[O_MODEL].text || c->experts == 0) return;
    if (c->experts < int_of(v, O_TOP_K) && v[O_TOP_K].from >= GIVEN)
        refuse("--top-k %d of --experts %d; use --top-k %d", int_of(v, O_TOP_K), c->experts,
            c->experts);
    if (c->experts < int_of(v, O_TOP_K)) compute(&v[O_TOP_K], c->experts);
    c->top_k = int_of(v, O_TOP_K);
    c->moe_every = int_of(v, O_MOE_EVERY);
    c->shared_experts = int_of(v, O_SHARED_EXPERTS);
    c->route = int_of(v, O_ROUTE);
    c->gate_scale = v[O_GATE_SCALE].number;
    c->first_dense = int_of(v, O_FIRST_DENSE);
    if (!v[O_MOE_FFN].text) compute(&v[O_MOE_FFN], c->ffn);
    c->moe_ffn = int_of(v, O_MOE_FFN);
    resolve_expert_groups(v[O_EXPERT_GROUPS].text, c);
}

/* Reads --mla, and sets --mtp. */
static void resolve_deepseek(value *v, gpt_config *c) {
    int n[5] = { 0 }, given = v[O_MLA].from >= GIVEN && strcmp(v[O_MLA].text, "off") != 0;
    c->mtp_weight = v[O_MTP_WEIGHT].number;
    if (v[O_MODEL].text) {
        size_from_file(v, O_MTP, c->mtp);
        if (c->mla.kv_rank || given)
            text_from_file(v, O_MLA, "%d:%d:%d:%d:%d", c->mla.q_rank, c->mla.kv_rank,
                c->mla.nope_dim, c->mla.rope_dim, c->mla.value_dim);
        return;
    }
    c->mtp = int_of(v, O_MTP);
    if ((given || c->mtp) && c->arch != GPT_LLAMA)
        refuse("--%s needs --arch llama", given ? "mla" : "mtp");
    if (c->layers + c->mtp > GPT_MAX_LAYERS)
        refuse("--mtp %d and --layers %d: together at most %d", c->mtp, c->layers, GPT_MAX_LAYERS);
    if (!given) return;
    if (!colon_numbers(v[O_MLA].text, n, 5) || n[1] < 1 || n[2] < 1 || n[3] < 2 || n[3] % 2 ||
        n[4] < 1 || n[4] > n[2] + n[3])
        refuse(
            "--mla %s: five numbers Q:KV:N:R:V, Q 0 or the rank of queries, the rank KV, R even, V "
            "at most N + R; as in --mla 48:32:16:8:16",
            v[O_MLA].text);
    if (c->kv_heads != c->heads)
        refuse("--mla: every head has its own keys; --kv-heads %d must be the %d --heads",
            c->kv_heads, c->heads);
    c->mla = (gpt_mla){ n[1], n[0], n[2], n[3], n[4] };
}

static int same_file(const char *path, const struct stat *other) {
    struct stat st;
    return stat(path, &st) == 0 && st.st_dev == other->st_dev && st.st_ino == other->st_ino;
}

static int has_ending(const char *path, const char *ending) {
    size_t n = strlen(path), end = strlen(ending);
    return n > end && strcmp(path + n - end, ending) == 0;
}

/* Writes the path of the tokenizer.json in the folder of --model to `path`. Returns 1 if this file
   exists. llm.c's models (.bin) have none. */
static int model_tokenizer(const value *v, char *path, size_t bytes) {
    const char *model = v[O_MODEL].text, *slash = model ? strrchr(model, '/') : NULL;
    struct stat st;
    if (!model || has_ending(model, ".bin") || stat(model, &st) != 0) return 0;
    if (S_ISDIR(st.st_mode))
        snprintf(path, bytes, "%.4000s/tokenizer.json", model);
    else
        snprintf(path, bytes, "%.*stokenizer.json", slash ? (int)(slash - model) + 1 : 0, model);
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

/* The model's own tokenizer cannot be used. This is an error only if there is text to encode, so
   find_source reports it. */
static void drop_tokenizer(value *v, const char *why) {
    snprintf(tokenizer.unusable, sizeof tokenizer.unusable, "%s", why);
    tok_close(tokenizer.tok);
    dt_ctx_free(tokenizer.ctx);
    tokenizer.tok = NULL;
    v[O_TOKENIZER] = (value){ .from = DEFAULT };
}

/* Opens the tokenizer. Its size is the default of --vocab. */
static void open_tokenizer(value *v) {
    const char *path = v[O_TOKENIZER].text;
    struct stat st;
    if (path && strcmp(path, "none") == 0) return;
    if (path && check_kind(O_TOKENIZER, path, EITHER) && stat(path, &st) == 0 &&
        S_ISDIR(st.st_mode)) {
        snprintf(tokenizer.path, sizeof tokenizer.path, "%.4000s/tokenizer.json", path);
        v[O_TOKENIZER].text = tokenizer.path;
    } else if (!path && model_tokenizer(v, tokenizer.path, sizeof tokenizer.path))
        set(&v[O_TOKENIZER], O_TOKENIZER, tokenizer.path, COMPUTED);
    if (!v[O_TOKENIZER].text) return;
    tokenizer.ctx = probe_ctx();
    tokenizer.tok = tok_open(tokenizer.ctx, v[O_TOKENIZER].text);
    if (!tokenizer.tok && path) refuse("--tokenizer: %s", error_without_rank(tokenizer.ctx));
    if (!tokenizer.tok)
        drop_tokenizer(v, error_without_rank(tokenizer.ctx));
    else if (!v[O_MODEL].text && v[O_VOCAB].from < GIVEN)
        compute(&v[O_VOCAB], tok_vocab(tokenizer.tok));
}

static void close_tokenizer(void) {
    if (!tokenizer.tok) return;
    tok_close(tokenizer.tok);
    dt_ctx_free(tokenizer.ctx);
    free(tokenizer.bytes);
    tokenizer.tok = NULL;
}

/* Refuses a tokenizer that has more tokens than the model. Otherwise counts the bytes of each
   token. */
static void check_tokenizer(value *v, int vocab) {
    int ids = tokenizer.tok ? tok_vocab(tokenizer.tok) : 0;
    if (tokenizer.tok && ids <= vocab) {
        tokenizer.bytes = (int32_t *)calloc((size_t)vocab, sizeof *tokenizer.bytes);
        if (!tokenizer.bytes) refuse("out of memory");
        for (int32_t i = 0; i < ids; i++) tokenizer.bytes[i] = encode_token_bytes(tokenizer.tok, i);
    }
    if (ids > vocab && v[O_TOKENIZER].from == COMPUTED) {
        char why[512];
        snprintf(why, sizeof why, "%.400s has %d token ids, but the model has a vocabulary of %d",
            v[O_TOKENIZER].text, ids, vocab);
        drop_tokenizer(v, why);
        return;
    }
    if (ids > vocab && v[O_MODEL].text)
        refuse("--tokenizer %s has %d token ids, but the model in %s has a vocabulary of %d",
            v[O_TOKENIZER].text, ids, v[O_MODEL].text, vocab);
    if (ids > vocab)
        refuse("--tokenizer %s has %d token ids, but --vocab is %d; use --vocab %d",
            v[O_TOKENIZER].text, ids, vocab, ids);
}

/* Returns the bits of the modules in the list of --lora-on. */
static unsigned lora_modules(const value *v, const gpt_config *c) {
    const char *list = v[O_LORA_ON].text;
    unsigned modules = 0, all = gpt_lora_modules(*c);
    for (size_t n; *list; list += n + (list[n] == ',')) {
        char legal[80] = "";
        unsigned bit = 0;
        n = strcspn(list, ",");
        for (int i = 0; i < GPT_LORA_MODULES; i++) {
            const char *name =
                i == GPT_LORA_DOWN && c->arch == GPT_GPT2 ? "proj" : gpt_lora_names[i].option;
            if (!(all >> i & 1)) continue;
            if (strlen(name) == n && strncmp(name, list, n) == 0) bit = 1u << i;
            snprintf(legal + strlen(legal), sizeof legal - strlen(legal), "%s,", name);
        }
        if (n == 3 && strncmp(list, "all", n) == 0) bit = all;
        if (!bit)
            refuse("--lora-on %s: '%.*s' is no module of this model; its modules are %sall",
                v[O_LORA_ON].text, (int)n, list, legal);
        modules |= bit;
    }
    return modules;
}

/* Takes the rank, alpha and modules from the adapter in the folder of --adapter. */
static void lora_of_file(value *v, gpt_config *c) {
    dt_ctx *ctx = probe_ctx();
    const char *path = v[O_ADAPTER].text;
    check_kind(O_ADAPTER, path, A_DIRECTORY);
    c->lora = gpt_lora_from(ctx, path, c->arch);
    if (dt_error(ctx) != DT_OK) refuse("--adapter: %s", error_without_rank(ctx));
    dt_ctx_free(ctx);
    if (v[O_LORA].text && v[O_LORA].number != c->lora.rank)
        refuse("--lora %s: the adapter in %s has rank %d; leave --lora out", v[O_LORA].text, path,
            c->lora.rank);
    if (v[O_LORA_ALPHA].text && v[O_LORA_ALPHA].number != c->lora.alpha)
        refuse("--lora-alpha %s: the adapter in %s has alpha %g; leave --lora-alpha out",
            v[O_LORA_ALPHA].text, path, c->lora.alpha);
    if (v[O_LORA_ON].text && lora_modules(v, c) != c->lora.modules)
        refuse("--lora-on %s: the adapter in %s has other modules; leave --lora-on out",
            v[O_LORA_ON].text, path);
    compute(&v[O_LORA], c->lora.rank);
}

/* Checks the options of LoRA and copies them to the model's configuration. */
static void resolve_lora(value *v, gpt_config *c) {
    if (v[O_ADAPTER].text) lora_of_file(v, c);
    if (!v[O_LORA].text) return;
    if (c->mla.kv_rank)
        refuse(
            "--lora %s: modules of latent attention (--mla) cannot have adapters", v[O_LORA].text);
    if (!v[O_LORA_ON].text) set(&v[O_LORA_ON], O_LORA_ON, "q,v", COMPUTED);
    if (!v[O_ADAPTER].text) {
        c->lora.rank = int_of(v, O_LORA);
        c->lora.alpha = v[O_LORA_ALPHA].text ? v[O_LORA_ALPHA].number : c->lora.rank;
        c->lora.modules = lora_modules(v, c);
    }
    c->lora.dropout = v[O_LORA_DROPOUT].number;
    if (v[O_BASE].text) c->base = (dt_quant)(DT_QUANT_BF16 + int_of(v, O_BASE));
    if (c->base == DT_QUANT_BF16 && c->dtype == DT_BF16) c->base = DT_QUANT_NONE;
    if (c->base > DT_QUANT_BF16 && (c->width % 64 || c->ffn % 64))
        refuse("--base %s: blocks of 64 elements do not divide --width %d and --ffn %d",
            v[O_BASE].text, c->width, c->ffn);
    if (v[O_MERGE].number && c->base)
        refuse("--merge on with --base %s: the stored weights cannot hold the sum; save the "
               "adapter, and merge it without --base: --adapter DIR --merge on",
            v[O_BASE].text);
    if (v[O_MERGE].number && !v[O_SAVE_MODEL].text) refuse("--merge on needs --save-model DIR");
}

/* Unless the file of --model names them, takes the tokens that begin and end a text from the
   tokenizer: those of GPT-2 and of tokenizers that dt trains, or those of Llama 3. */
static void set_text_tokens(gpt_config *c) {
    const tok *t = tokenizer.tok;
    if (!t || c->bos_token || c->eos_token) return;
    c->bos_token = c->eos_token = 1 + tok_id(t, "<|endoftext|>");
    if (c->eos_token) return;
    c->bos_token = 1 + tok_id(t, "<|begin_of_text|>");
    c->eos_token = 1 + tok_id(t, "<|end_of_text|>");
}

static gpt_config resolve_model(value *v) {
    static const dt_dtype dtypes[] = { DT_F32, DT_BF16, DT_F16, DT_F64 };
    open_tokenizer(v);
    gpt_config c = v[O_MODEL].text ? model_of_file(v) : model_of_options(v);
    check_tokenizer(v, c.vocab);
    set_text_tokens(&c);
    c.dtype = dtypes[int_of(v, O_DTYPE)];
    c.dropout = v[O_DROPOUT].number;
    c.smoothing = v[O_LABEL_SMOOTHING].number;
    resolve_recompute(v[O_RECOMPUTE].text, &c);
    resolve_experts(v, &c);
    resolve_deepseek(v, &c);
    resolve_lora(v, &c);
    return c;
}

static int is_nccl(const value *v) { return strcmp(v[O_BACKEND].text, "nccl") == 0; }
static int is_cuda(const value *v) { return strcmp(v[O_DEVICE].text, "cuda") == 0; }

/* Returns 1 if the backend is tcp or nccl: with both, each rank is started as a separate process,
   and the ranks connect by TCP. */
static int is_tcp(const value *v) { return strcmp(v[O_BACKEND].text, "tcp") == 0 || is_nccl(v); }

/* Checks --device. If --device is cuda and there is no GPU, refuses --backend nccl; with other
   backends prints a note and sets --device to cpu. */
static void resolve_device(value *v) {
    if (is_nccl(v) && v[O_DEVICE].from < GIVEN) set(&v[O_DEVICE], O_DEVICE, "cuda", COMPUTED);
    if (is_nccl(v) && !is_cuda(v)) refuse("--backend nccl needs --device cuda");
    if (is_cuda(v) && strcmp(v[O_BACKEND].text, "procs") == 0)
        refuse("--device cuda --backend procs: a forked process cannot use its parent's GPU "
               "context; use threads, or start the ranks with examples/launch");
    if (is_cuda(v) && strcmp(v[O_DTYPE].text, "f64") == 0)
        refuse("--device cuda --dtype f64: the GPU kernels support f32, bf16 and f16; use "
               "--device cpu for f64");
    char *why = launched.device_note;
    if (!dt_cuda_ready) return;
    if (v[O_DEVICE].from == DEFAULT)
        strcpy(why, "the CPU, because --device is not given; --device cuda uses the GPU");
    if (!is_cuda(v) || dt_cuda_ready(why, sizeof launched.device_note) == DT_OK) return;
    if (is_nccl(v))
        refuse("--backend nccl%s: no CUDA device (%s)",
            v[O_BACKEND].from >= GIVEN ? "" : ", which ranks of a launcher use on GPUs", why);
    print_error("no CUDA device (%s): running on the CPU\n", why);
    *why = 0;
    set(&v[O_DEVICE], O_DEVICE, "cpu", COMPUTED);
}

/* Returns the kernel table of --device. */
static const dt_kernels *kernels_of(const value *v) {
    return is_cuda(v) ? dt_kernels_cuda() : dt_kernels_cpu();
}

/* Finds the launcher that started this process, and chooses the backend unless the user has given
   --backend, --rank or --rendezvous. If the launcher started several processes, the backend is nccl
   if --device is cuda and the program is linked with NCCL. Otherwise it is mpi if the launcher is
   one of MPI's and the program is built with MPI, and tcp in all other cases. */
static void find_launch(value *v) {
    const dt_launch *launcher = &launched.launcher;
    const char *backend = "tcp";
    launched.launcher_status = dt_launch_find(&launched.launcher);
    if (v[O_BACKEND].from >= GIVEN || v[O_RANK].text || v[O_RENDEZVOUS].text) return;
    if (launched.launcher_status) refuse("%s", launcher->text);
#ifdef DT_USE_MPI
    if (strcmp(launcher->launcher, "Open MPI") == 0 || strcmp(launcher->launcher, "PMI") == 0)
        backend = "mpi";
#endif
    if (is_cuda(v) && dt_backend_is_built(DT_BACKEND_NCCL)) backend = "nccl";
    if (launcher->size > 1) set(&v[O_BACKEND], O_BACKEND, backend, FROM_ENVIRONMENT);
}

/* Checks the file of --token-file and passes its path to dt_run, in DT_TOKEN_FILE. The job's secret
   token is in a file, because every user of a machine can see the command lines of all processes.
   dt_run reads the file, and erases the token from memory after all ranks are connected. This
   function erases its copy of the token too. */
static void check_token(const char *path) {
    char token[257];
    const size_t capacity = sizeof token;
    struct stat about;
    int there = check_kind(O_TOKEN_FILE, path, A_FILE);
    int fd = there ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0 || fstat(fd, &about) != 0) refuse("--token-file %s: %s", path, strerror(errno));
    if (about.st_mode & (S_IRWXG | S_IRWXO))
        refuse("--token-file %s: others may read or change it (mode %03o); chmod 600 %s", path,
            (unsigned)(about.st_mode & 0777), path);
    ssize_t got = read(fd, token, capacity);
    close(fd);
    if (got < 0) refuse("--token-file %s: %s", path, strerror(errno));
    size_t length = (size_t)got; /* ignore trailing white space, as dt_run does */
    while (length > 0 && strchr(" \t\r\n", token[length - 1])) length--;
    if (length < 16 || length == capacity || memchr(token, 0, length))
        refuse("--token-file %s: it must hold 16 to %zu characters", path, capacity - 1);
    for (volatile char *at = token; at < token + capacity; at++)
        *at = 0; /* volatile, because a compiler may remove a memset of memory that is not read */
    setenv("DT_TOKEN_FILE", path, 1);
}

/* Determines --rank, --ranks and --rendezvous for the backends tcp and nccl. The values that the
   user has not given come from the launcher. */
static void resolve_tcp(value *v) {
    const dt_launch *launcher = &launched.launcher;
    int told = launcher->launcher[0] && !v[O_RANK].text;
    if (launched.launcher_status && !(v[O_RANK].text && v[O_RANKS].text))
        refuse("%s", launcher->text);
    if (told && v[O_RANKS].text && int_of(v, O_RANKS) != launcher->size)
        refuse("--ranks %s: %s started %d processes; leave --ranks out", v[O_RANKS].text,
            launcher->launcher, launcher->size);
    if (launcher->launcher[0] && !v[O_RANKS].text)
        set_number(&v[O_RANKS], launcher->size, FROM_ENVIRONMENT);
    if (told) set_number(&v[O_RANK], launcher->rank, FROM_ENVIRONMENT);
    const char *backend = v[O_BACKEND].text;
    if (!v[O_RANKS].text)
        refuse("--backend %s needs --ranks N, or a launcher that sets it: %s", backend,
            launcher->text);
    if (!v[O_RANK].text)
        refuse(
            "--backend %s needs --rank R, or a launcher that sets it: %s", backend, launcher->text);
    if (v[O_RANKS].number > table[O_RANKS].hi)
        refuse("%s ranks; at most %.0f are allowed", v[O_RANKS].text, table[O_RANKS].hi);
    if (int_of(v, O_RANK) >= int_of(v, O_RANKS))
        refuse("--rank %s of --ranks %s: the last rank is %d", v[O_RANK].text, v[O_RANKS].text,
            int_of(v, O_RANKS) - 1);
    launched.rank = int_of(v, O_RANK);
    const char *given = v[O_RENDEZVOUS].text;
    if (told && !given && !launcher->rendezvous[0])
        refuse("%s started ranks on several machines, and the address of rank 0 is unknown: use "
               "--rendezvous HOST:PORT, or set DT_RENDEZVOUS",
            launcher->launcher);
    if (!given && launcher->rendezvous[0])
        set(&v[O_RENDEZVOUS], O_RENDEZVOUS, launcher->rendezvous, FROM_ENVIRONMENT);
    if (told)
        snprintf(launched.summary, sizeof launched.summary, "%s%s%s", launcher->text,
            given ? "; instead --rendezvous " : "", given ? given : "");
    else
        snprintf(launched.summary, sizeof launched.summary,
            "rank %d of %d by --rank; rendezvous %s", launched.rank, int_of(v, O_RANKS),
            v[O_RENDEZVOUS].text ? v[O_RENDEZVOUS].text : "127.0.0.1:29500");
}

/* Called if the backend is threads or procs, which start all ranks from one process. Refuses the
   run if a launcher has started several processes, because each process would train alone and all
   would write the same log. Also refuses the options for ranks that are started separately. */
static void refuse_launcher(const value *v) {
    const dt_launch *launcher = &launched.launcher;
    if (launcher->size > 1)
        refuse("--backend %s: this is %s; start each process with --backend tcp (on GPUs nccl), or "
               "start one process with --ranks",
            v[O_BACKEND].text, launcher->text);
    if (v[O_RANK].text) refuse("--rank %s needs --backend tcp", v[O_RANK].text);
    if (v[O_RENDEZVOUS].text) refuse("--rendezvous %s needs --backend tcp", v[O_RENDEZVOUS].text);
    if (v[O_TOKEN_FILE].text)
        refuse("--token-file %s needs --backend tcp or mpi", v[O_TOKEN_FILE].text);
}

/* Sets --ranks to the number of processes that MPI has started. Refuses the run if the launcher's
   environment variables give another number, because the launcher and the program then use
   different MPI libraries. */
static void resolve_mpi(value *v) {
    const dt_launch *launcher = &launched.launcher;
    if (launcher->size > 1 && launched.size != launcher->size)
        refuse("MPI started %d process%s, but %s says: %s; is the program built with another MPI? "
               "--backend tcp needs "
               "no MPI",
            launched.size, launched.size == 1 ? "" : "es", launcher->launcher, launcher->text);
    if (v[O_RANKS].text && int_of(v, O_RANKS) != launched.size)
        refuse("--ranks %s: MPI started %d processes; leave --ranks out", v[O_RANKS].text,
            launched.size);
    if (v[O_RANK].text || v[O_RENDEZVOUS].text)
        refuse("--%s needs --backend tcp", v[O_RANK].text ? "rank" : "rendezvous");
    compute(&v[O_RANKS], launched.size);
    snprintf(launched.summary, sizeof launched.summary, "rank %d of %d by MPI%s%s", launched.rank,
        launched.size, launcher->launcher[0] ? ", started by " : "", launcher->launcher);
}

/* Returns the number of replicas: ranks of dp and, if it is an axis of its own, of ep. */
static int replicas_of(dt_mesh_desc mesh) { return mesh.dp * (mesh.expert_tp ? 1 : mesh.ep); }

static dt_mesh_desc resolve_mesh(value *v) {
    char why[256];
    dt_mesh_desc sizes = { int_of(v, O_DP), int_of(v, O_TP), int_of(v, O_CP), int_of(v, O_PP),
        int_of(v, O_EP), (int)number_or_word(v, O_EXPERT_TP, "off", 1024, 1),
        int_of(v, O_TP_OVERLAP) };
    memcpy(launched.summary, launched.launcher.text, sizeof launched.launcher.text);
    resolve_device(v);
    if (is_tcp(v))
        resolve_tcp(v);
    else if (launched.size)
        resolve_mpi(v);
    else
        refuse_launcher(v);
    if (!v[O_RANKS].text)
        compute(&v[O_RANKS], (int64_t)(sizes.dp ? sizes.dp : 1) * sizes.tp * sizes.cp * sizes.pp *
                                 (sizes.expert_tp ? 1 : sizes.ep));
    if (dt_mesh_resolve(&sizes, int_of(v, O_RANKS), why, sizeof why) != DT_OK) refuse("%s", why);
    if (!v[O_DP].text) compute(&v[O_DP], sizes.dp);
    return sizes;
}

/* Computes --batch (B), --micro-batch (b) and --accum (a), for which B = b * a * R with R replicas.
   If two of the three options are given, computes the third. If all three are given, checks
   them. */
static void resolve_batch(value *v, int replicas, int pp) {
    int64_t B = long_of(v, O_BATCH), b = long_of(v, O_MICRO_BATCH), a = long_of(v, O_ACCUM),
            R = replicas;
    const char *is_default = v[O_BATCH].from >= GIVEN ? "" : " (its default)";
    if (b && a && v[O_BATCH].from >= GIVEN && B != b * a * R)
        refuse("--batch %lld is not --micro-batch %lld x --accum %lld x %lld replicas; use --batch "
               "%lld, or leave one "
               "of the three out",
            (long long)B, (long long)b, (long long)a, (long long)R, (long long)(b * a * R));
    if (b && a && v[O_BATCH].from < GIVEN) compute(&v[O_BATCH], B = b * a * R);
    if (B > table[O_BATCH].hi)
        refuse(
            "a batch of %lld sequences; at most %.0f are allowed", (long long)B, table[O_BATCH].hi);
    int64_t divisor = (b ? b : 1) * (a ? a : 1) * R;
    if (B % divisor != 0 && (b || a))
        refuse("--batch %lld%s is not a multiple of %s %lld x %lld replicas; use --batch %lld",
            (long long)B, is_default, b ? "--micro-batch" : "--accum", (long long)(b ? b : a),
            (long long)R, (long long)(B / divisor + 1) * divisor);
    if (B % divisor != 0)
        refuse("--batch %lld%s does not divide over %lld replicas; use --batch %lld", (long long)B,
            is_default, (long long)R, (long long)(B / divisor + 1) * divisor);
    /* a pipeline of pp ranks needs at least pp micro-batches to keep all its ranks busy */
    if (!a && !b && pp > 1) a = smallest_divisor(B / R, pp);
    if (a)
        compute(&v[O_ACCUM], a);
    else
        compute(&v[O_ACCUM], b ? B / (b * R) : 1);
    if (!b) compute(&v[O_MICRO_BATCH], B / (long_of(v, O_ACCUM) * R));
}

static int64_t gcd(int64_t a, int64_t b) {
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

#define RAMP_MAX 1e15 /* every integer up to this value is exact as a double */

/* Returns the three numbers of --batch-ramp, START:INCR:SAMPLES; all are 0 if the option is not
   given. If it is given without --micro-batch and --accum, sets --micro-batch to the largest b such
   that b * replicas divides START, INCR and --batch, or to 1 if there is no such b. */
static dt_batch_ramp parse_ramp(value *v, int replicas) {
    const char *text = v[O_BATCH_RAMP].text;
    dt_batch_ramp ramp = { 0, 0, 0, 0 };
    int64_t *parts[3] = { &ramp.start, &ramp.incr, &ramp.samples };
    if (!text) return ramp;
    for (int i = 0; i < 3; i++) {
        double x = 0;
        size_t n = decimal(text, 0, &x);
        if (!n || text[n] != (i < 2 ? ':' : 0) || !(x >= 1 && x <= RAMP_MAX))
            refuse("--batch-ramp %s: not START:INCR:SAMPLES, three whole numbers from 1 to %.12g",
                v[O_BATCH_RAMP].text, RAMP_MAX);
        *parts[i] = (int64_t)x;
        text += n + 1;
    }
    int64_t all = gcd(gcd(ramp.start, ramp.incr), long_of(v, O_BATCH));
    if (!v[O_MICRO_BATCH].text && !v[O_ACCUM].text)
        compute(&v[O_MICRO_BATCH],
            all % replicas == 0 && all <= table[O_MICRO_BATCH].hi ? all / replicas : 1);
    return ramp;
}

static void check_ramp(const value *v, dt_batch_ramp *ramp, int replicas) {
    char why[400];
    ramp->batch = long_of(v, O_BATCH);
    if (dt_batch_ramp_check(*ramp, long_of(v, O_MICRO_BATCH) * replicas, why, sizeof why) == DT_OK)
        return;
    refuse("--batch-ramp with --batch %lld, --micro-batch %lld and %d replicas: %s",
        (long long)ramp->batch, (long long)long_of(v, O_MICRO_BATCH), replicas, why);
}

/* Returns x, or a tiny number if x is 0. In dt_zero_desc, 0 means the default, so a 0 that the user
   has given is passed as the tiny number. */
static double tiny_if_zero(double x) { return x == 0 ? 1e-300 : x; }

/* Checks the options of 1-bit Adam. 1-bit Adam exchanges compressed momentum instead of gradients,
   so it works neither with ZeRO nor with --reduce tree. */
static void resolve_onebit(value *v) {
    if (strcmp(v[O_OPTIMIZER].text, "onebit-adam") != 0) return;
    if (int_of(v, O_ZERO) != 0)
        refuse("--optimizer onebit-adam: each rank needs the complete optimizer state; use --zero "
               "0, not %s",
            v[O_ZERO].text);
    if (int_of(v, O_REDUCE) != 0)
        refuse("--optimizer onebit-adam does not sum gradients after --freeze-steps; use --reduce "
               "fixed");
    if (!v[O_FREEZE_STEPS].text) compute(&v[O_FREEZE_STEPS], (long_of(v, O_STEPS) + 3) / 4);
}

/* Returns the value of --grad-dtype as dt_zero_desc.grad_dtype. */
static dt_dtype resolve_grad_dtype(const value *v) {
    static const dt_dtype types[] = { DT_F32, DT_BF16, DT_F16 };
    const char *text = v[O_GRAD_DTYPE].text, *model = v[O_DTYPE].text;
    const char *optimizer = v[O_OPTIMIZER].text;
    if (!text) return DT_F32;
    if (strcmp(text, "f32") == 0) {
        if (strcmp(model, "f64") == 0)
            refuse("--grad-dtype f32: gradients of --dtype f64 are f64; leave --grad-dtype out");
        return DT_F32;
    }
    if (strcmp(text, model) != 0)
        refuse("--grad-dtype %s is for parameters of this type, and --dtype is %s; use --dtype %s, "
               "or leave --grad-dtype out",
            text, model, text);
    if (strcmp(optimizer, "muon") == 0 || strcmp(optimizer, "onebit-adam") == 0)
        refuse("--grad-dtype %s is not for --optimizer %s; use adamw, adam or sgd, or leave "
               "--grad-dtype out",
            text, optimizer);
    return types[int_of(v, O_GRAD_DTYPE)];
}

static dt_zero_desc resolve_optimizer(value *v) {
    static const int kinds[] = { DT_ADAMW, DT_ADAM, DT_SGD, DT_ONEBIT_ADAM, DT_MUON };
    resolve_onebit(v);
    return (dt_zero_desc){ .stage = int_of(v, O_ZERO),
        .optimizer = kinds[int_of(v, O_OPTIMIZER)],
        .beta1 = tiny_if_zero(v[O_BETA1].number),
        .beta2 = tiny_if_zero(v[O_BETA2].number),
        .eps = v[O_EPS].number,
        .momentum = v[O_MOMENTUM].number,
        .freeze_steps = int_of(v, O_FREEZE_STEPS),
        .weight_decay = v[O_WEIGHT_DECAY].number,
        .clip = v[O_CLIP].number,
        .grad_dtype = resolve_grad_dtype(v),
        .ema_decay = v[O_EMA].number,
        .skip_loss_z = v[O_SKIP_LOSS_Z].number,
        .skip_norm_z = v[O_SKIP_NORM_Z].number,
        .tree = int_of(v, O_REDUCE),
        .no_overlap = !int_of(v, O_OVERLAP) };
}

/* Checks the options of loss scaling, ZeRO-3's gathering, HSDP and offloading, and copies their
   values to *z. */
static void resolve_zero(value *v, dt_mesh_desc mesh, dt_zero_desc *z) {
    int ranks = replicas_of(mesh) * mesh.cp, group = int_of(v, O_SHARD_GROUP);
    size_t n = 0;
    if (!v[O_LOSS_SCALE].text && strcmp(v[O_DTYPE].text, "f16") == 0)
        set(&v[O_LOSS_SCALE], O_LOSS_SCALE, "dynamic", COMPUTED);
    const char *text = v[O_LOSS_SCALE].text;
    int dynamic = text && strcmp(text, "dynamic") == 0;
    z->scale = (dt_scale_desc){ .init = v[O_LOSS_SCALE_INIT].number,
        .interval = int_of(v, O_LOSS_SCALE_WINDOW),
        .hysteresis = int_of(v, O_LOSS_SCALE_HYSTERESIS),
        .min_scale = v[O_LOSS_SCALE_MIN].number };
    if (dynamic && z->scale.min_scale > z->scale.init)
        refuse("--loss-scale-min %s is above --loss-scale-init %s", v[O_LOSS_SCALE_MIN].text,
            v[O_LOSS_SCALE_INIT].text);
    for (int i = O_LOSS_SCALE_INIT; i <= O_LOSS_SCALE_MIN && !dynamic; i++)
        if (v[i].from == GIVEN)
            refuse("--%s %s is for --loss-scale dynamic", table[i].name, v[i].text);
    if (dynamic)
        z->loss_scale = DT_SCALE_DYNAMIC;
    else if (text)
        n = decimal(text, 1, &z->loss_scale);
    if (text && !dynamic && (!n || text[n] || !(z->loss_scale > 0)))
        refuse("--loss-scale %s: not dynamic, nor a number above 0", text);
    z->keep_gathered = v[O_ZERO3_KEEP].number != 0;
    if (z->keep_gathered && z->stage < 3)
        refuse(
            "--zero3-keep on needs --zero 3: with --zero %d values are never gathered", z->stage);
    z->shard_group = group;
    if (group && z->stage == 0)
        refuse("--shard-group %d needs --zero 1, 2 or 3: with --zero 0 nothing is sharded", group);
    const char *optim = v[O_OFFLOAD_OPTIM].text, *params = v[O_OFFLOAD_PARAMS].text;
    z->offload_optim = strcmp(optim, "none") == 0 ? NULL : optim;
    z->offload_params = strcmp(params, "none") == 0 ? NULL : params;
    const char *targets[] = { z->offload_optim, z->offload_params };
    for (int i = 0; i < 2; i++) {
        int folder = targets[i] && strcmp(targets[i], "cpu") != 0 && !v[O_DRY_RUN].number;
        if (folder && !check_kind(i ? O_OFFLOAD_PARAMS : O_OFFLOAD_OPTIM, targets[i], A_DIRECTORY))
            refuse("--offload-%s %s: this folder does not exist; create it, or use cpu or none",
                i ? "params" : "optim", targets[i]);
    }
    if (z->offload_params && z->stage < 3)
        refuse("--offload-params %s needs --zero 3: with --zero %d every rank holds all values",
            params, z->stage);
    if (z->offload_optim && z->optimizer == DT_ONEBIT_ADAM)
        refuse("--optimizer onebit-adam exchanges its state, so the state cannot be offloaded; use "
               "--offload-optim none");
    if ((z->offload_optim || z->offload_params) && z->optimizer == DT_MUON)
        refuse("--optimizer muon orthogonalizes whole matrices where the parameters are; use "
               "--offload-optim none and --offload-params none");
    if (z->offload_optim && z->offload_params && strcmp(optim, params) != 0 &&
        strcmp(optim, "cpu") != 0 && strcmp(params, "cpu") != 0)
        refuse("--offload-optim %s and --offload-params %s: both must be the same folder", optim,
            params);
    if (group && ranks % group != 0)
        refuse("--shard-group %d does not divide the %d ranks of the data group (dp %d x cp %d); "
               "use --shard-group %d",
            group, ranks, replicas_of(mesh), mesh.cp, (int)largest_divisor(ranks, group));
}

/* Refuses axis sizes that cannot shard the model's heads, tokens or experts evenly. Also sets the
   model's sp and cp_kind. */
static void resolve_sharding(const value *v, dt_mesh_desc mesh, gpt_config *m) {
    char why[300];
    int64_t tokens = int_of(v, O_SEQ) / mesh.cp;
    m->sp = v[O_SP].number != 0;
    m->cp_kind = int_of(v, O_CP_KIND);
    if (m->heads % mesh.tp != 0)
        refuse("--tp %d does not divide --heads %d; use --tp %d", mesh.tp, m->heads,
            (int)largest_divisor(m->heads, mesh.tp));
    if (m->kv_heads % mesh.tp != 0 && mesh.tp % m->kv_heads != 0)
        refuse("--tp %d and --kv-heads %d: one must divide the other; use --tp %d", mesh.tp,
            m->kv_heads, (int)largest_divisor(m->kv_heads, mesh.tp));
    int keys = m->kv_heads < mesh.tp ? 1 : m->kv_heads / mesh.tp;
    if (dt_cp_check(m->cp_kind, int_of(v, O_SEQ), mesh.cp, m->heads / mesh.tp, keys, why,
            sizeof why) != DT_OK)
        refuse("%s", why);
    if (m->sp && tokens % mesh.tp != 0)
        refuse("--sp on shards the %lld tokens of a rank (--seq %d over --cp %d) over --tp %d, "
               "which does not divide them; use --seq %lld",
            (long long)tokens, int_of(v, O_SEQ), mesh.cp, mesh.tp,
            (long long)((tokens / mesh.tp + 1) * mesh.tp * mesh.cp));
    if (mesh.expert_tp && !m->experts)
        refuse("--expert-tp %d is for mixtures of experts; use --experts E", mesh.expert_tp);
    if (mesh.expert_tp && tokens % mesh.tp != 0)
        refuse("--expert-tp: each rank of --tp %d dispatches a part of the %lld tokens of a rank "
               "(--seq %d over --cp %d), and %d does not divide them; use --seq %lld",
            mesh.tp, (long long)tokens, int_of(v, O_SEQ), mesh.cp, mesh.tp,
            (long long)((tokens / mesh.tp + 1) * mesh.tp * mesh.cp));
    if (m->experts % mesh.ep != 0)
        refuse("--ep %d does not divide --experts %d; use --ep %d", mesh.ep, m->experts,
            (int)largest_divisor(m->experts, mesh.ep));
    if (m->base > DT_QUANT_BF16 && (m->width % (64 * mesh.tp) || m->ffn % (64 * mesh.tp)))
        refuse(
            "--base %s --tp %d: a row of --width %d or --ffn %d has no whole number of blocks of "
            "64 on each rank",
            v[O_BASE].text, mesh.tp, m->width, m->ffn);
    if (v[O_SAVE_MODEL].text && !gpt_has_files(m, why, sizeof why))
        refuse("--save-model: %s; or use --save, whose checkpoints hold any model", why);
}

/* Reads a --partition that is a list: the number of half layers of each stage. A half layer is the
   attention or the MLP of a layer. The first stage also has the embedding, and the last stage also
   has the head. */
static void parse_partition(const value *v, train_config *c, int stages) {
    const char *at = v[O_PARTITION].text, *list = at;
    int64_t sum = 0, halves = 2 * c->model.layers;
    int n = 0;
    for (; *at; n++) {
        double count = 0;
        int ends = n == 0 || n == stages - 1; /* the first and last stage may have 0 half layers */
        const char *end = at + decimal(at, 0, &count);
        if (end == at || (*end && *end != ',') || (*end == ',' && !end[1]) || count < !ends ||
            count > (double)halves)
            refuse("--partition %s: even, cost, or the half layers of each of %d stages, as in "
                   "3,5: at least 1 for "
                   "each but the first and the last",
                list, stages);
        sum += (int64_t)count;
        if (n < stages) c->stage_begin[n + 1] = (int)(1 + sum + (n == stages - 1));
        at = *end ? end + 1 : end;
    }
    if (n != stages || sum != halves)
        refuse("--partition %s: %d numbers with the sum %lld; --pp %d x --chunks %d stages and "
               "--layers %d need %d "
               "numbers with the sum %lld",
            list, n, (long long)sum, c->mesh.pp, c->chunks, c->model.layers, stages,
            (long long)halves);
}

/* The index of the last action of a rank that adds to the gradients of a chunk. */
static int last_weights(const dt_schedule *s, int rank, int stage) {
    int last = -1;
    for (int i = 0; i < dt_schedule_count(s, rank); i++) {
        const dt_action *a = &dt_schedule_actions(s, rank)[i];
        if (a->stage == stage && (a->phase == DT_BACKWARD || a->phase == DT_BACKWARD_WEIGHT))
            last = i;
    }
    return last;
}

/* Reads the schedule of --schedule FILE. Sets --chunks and, unless two of the batch options are
   given, --accum to the file's numbers. Called a second time, after --accum is known, with
   `check`: refuses a file for another number of micro-batches. */
static void read_schedule(value *v, train_config *c, int check) {
    dt_ctx *ctx = probe_ctx();
    int pp = c->mesh.pp;
    if (pp == 1) refuse("--schedule %s is for a pipeline; use --pp 2 or more", c->schedule_file);
    dt_schedule *s = dt_schedule_read(ctx, c->schedule_file,
        (dt_schedule_desc){
            .ranks = pp, .chunks = int_of(v, O_CHUNKS), .micros = check ? int_of(v, O_ACCUM) : 0 });
    if (dt_error(ctx) != DT_OK) refuse("--schedule %s", error_without_rank(ctx));
    int last = dt_schedule_stages(s) - 1, rank = dt_schedule_rank_of(s, 0);
    if (c->model.tied && last > 0 && dt_schedule_rank_of(s, last) == rank &&
        last_weights(s, rank, last) > last_weights(s, rank, 0))
        refuse("--schedule %s: rank %d has the first and the last stage, which share the tied "
               "embedding, so the gradients of stage %d must end before those of stage 0; or use "
               "--tie off",
            c->schedule_file, rank, last);
    if (!v[O_CHUNKS].text) compute(&v[O_CHUNKS], dt_schedule_chunks(s));
    if (!v[O_ACCUM].text && (!v[O_MICRO_BATCH].text || v[O_BATCH].from < GIVEN))
        compute(&v[O_ACCUM], dt_schedule_micros(s));
    if (c->ramp.samples)
        refuse("--schedule %s has a fixed number of micro-batches, and --batch-ramp changes it",
            c->schedule_file);
    dt_ctx_free(ctx);
}

/* Chooses the pipeline schedule and the number of stages of a rank, before the batch. */
static void resolve_schedule(value *v, train_config *c) {
    static const int kinds[] = { DT_SCHEDULE_NAIVE, DT_SCHEDULE_AFAB, DT_SCHEDULE_1F1B,
        DT_SCHEDULE_INTERLEAVED, DT_SCHEDULE_ZB, DT_SCHEDULE_ZBV, DT_SCHEDULE_DUALPIPE_V };
    int kind = int_of(v, O_SCHEDULE);
    int is_file = kind == (int)(sizeof kinds / sizeof *kinds), v_kind = !is_file && kind > 4,
        in_v = v_kind && c->mesh.pp > 1;
    c->schedule = is_file || (v_kind && !in_v) ? DT_SCHEDULE_1F1B : kinds[kind];
    c->schedule_file = is_file ? v[O_SCHEDULE].text : NULL;
    if (is_file) read_schedule(v, c, 0);
    int interleaved = c->schedule == DT_SCHEDULE_INTERLEAVED && c->mesh.pp > 1;
    if (!v[O_CHUNKS].text) compute(&v[O_CHUNKS], interleaved || in_v ? 2 : 1);
    c->chunks = int_of(v, O_CHUNKS);
    if (c->chunks > 1 && c->mesh.pp == 1)
        refuse("--chunks %d divides a rank's layers into stages; use --pp 2 or more", c->chunks);
    if (c->chunks != 2 && in_v)
        refuse("--chunks %d: schedule %s gives each rank two stages, the sides of a V; use "
               "--chunks 2",
            c->chunks, v[O_SCHEDULE].text);
    if (c->chunks > 1 && !interleaved && !in_v && !is_file)
        refuse("--chunks %d: schedule %s gives each rank one stage; use --schedule interleaved",
            c->chunks, v[O_SCHEDULE].text);
}

/* Chooses the number of stages and the items of each stage. An item is the embedding, half a layer
   or the head (see gpt_config.stage_begin). */
static void resolve_pipeline(value *v, train_config *c) {
    int items = 2 * c->model.layers + 2, stages;
    char why[300];
    if (c->schedule_file) read_schedule(v, c, 1);
    if ((int64_t)c->mesh.pp * c->chunks > items)
        refuse("--pp %d x --chunks %d are more stages than the %d pieces of a model of %d layers: "
               "embedding, "
               "attentions, MLPs, head; use --pp %d",
            c->mesh.pp, c->chunks, items, c->model.layers, items / c->chunks);
    stages = c->mesh.pp * c->chunks;
    c->partition_by_cost = strcmp(v[O_PARTITION].text, "cost") == 0 && stages > 1;
    if (strcmp(v[O_PARTITION].text, "even") != 0 && strcmp(v[O_PARTITION].text, "cost") != 0) {
        parse_partition(v, c, stages);
        return;
    }
    double same[2 * GPT_MAX_LAYERS + 2];
    for (int i = 0; i < items; i++) same[i] = 1;
    if (dt_partition_stages(same, items, stages, c->stage_begin, why, sizeof why) != DT_OK)
        refuse("%s", why);
}

/* Checks the options of checkpoints and restarts, and copies their values to *c. */
static void resolve_checkpoints(const value *v, train_config *c) {
    if (v[O_MAX_RESTARTS].number > 0 && (launched.size || is_tcp(v)))
        refuse("--max-restarts %s is for --backend threads and procs: let the launcher of these "
               "ranks restart them, with --resume",
            v[O_MAX_RESTARTS].text);
    if (v[O_MIN_RANKS].text && v[O_MAX_RESTARTS].number == 0)
        refuse("--min-ranks %s limits the ranks of a restart; use it with --max-restarts N",
            v[O_MIN_RANKS].text);
    if (v[O_MIN_RANKS].number > v[O_RANKS].number)
        refuse("--min-ranks %s of --ranks %s; use --min-ranks %s or less", v[O_MIN_RANKS].text,
            v[O_RANKS].text, v[O_RANKS].text);
    if ((v[O_SAVE].text && !*v[O_SAVE].text) || (v[O_RESUME].text && !*v[O_RESUME].text))
        refuse("--%s: a folder is needed", v[O_SAVE].text && !*v[O_SAVE].text ? "save" : "resume");
    c->save = v[O_SAVE].text;
    c->save_every = long_of(v, O_SAVE_EVERY);
    c->keep = int_of(v, O_KEEP);
    c->background = v[O_SAVE_BACKGROUND].number != 0;
    c->resume = v[O_RESUME].text;
    c->export_to = v[O_SAVE_MODEL].text;
}

/* Options that have an effect only with another option. `words` are the values of the other option
   with which they have one; NULL: any value but its default. */
static const struct {
    int option, needs;
    const char *words, *text;
} needed_options[] = {
#define NEEDS(id, other, words, text) \
    { O_##id, O_##other, words, text }
    NEEDS(LORA_ALPHA, LORA, NULL, "--lora R or --adapter DIR"),
    NEEDS(LORA_DROPOUT, LORA, NULL, "--lora R or --adapter DIR"),
    NEEDS(LORA_ON, LORA, NULL, "--lora R or --adapter DIR"),
    NEEDS(BASE, LORA, NULL, "--lora R or --adapter DIR"),
    NEEDS(MERGE, LORA, NULL, "--lora R or --adapter DIR"),
    NEEDS(TOP_K, EXPERTS, NULL, "--experts E; --sample-top-k is for --generate"),
    NEEDS(MOE_EVERY, EXPERTS, NULL, "--experts E"),
    NEEDS(SHARED_EXPERTS, EXPERTS, NULL, "--experts E"),
    NEEDS(CAPACITY, EXPERTS, NULL, "--experts E"),
    NEEDS(BALANCE_LOSS, EXPERTS, NULL, "--experts E"),
    NEEDS(Z_LOSS, EXPERTS, NULL, "--experts E"),
    NEEDS(ROUTER_BIAS, EXPERTS, NULL, "--experts E"),
    NEEDS(ROUTE, EXPERTS, NULL, "--experts E"),
    NEEDS(EXPERT_GROUPS, EXPERTS, NULL, "--experts E"),
    NEEDS(GATE_SCALE, EXPERTS, NULL, "--experts E"),
    NEEDS(FIRST_DENSE, EXPERTS, NULL, "--experts E"),
    NEEDS(MOE_FFN, EXPERTS, NULL, "--experts E"),
    NEEDS(MTP_WEIGHT, MTP, NULL, "--mtp D"),
    NEEDS(SP, TP, NULL, "--tp N"),
    NEEDS(TP_OVERLAP, TP, NULL, "--tp N"),
    NEEDS(CP_KIND, CP, NULL, "--cp N"),
    NEEDS(SCHEDULE, PP, NULL, "--pp N"),
    NEEDS(PARTITION, PP, NULL, "--pp N"),
    NEEDS(MOMENTUM, OPTIMIZER, "sgd|muon", "--optimizer sgd or muon"),
    NEEDS(ADAMW_LR_SCALE, OPTIMIZER, "muon", "--optimizer muon"),
    NEEDS(FREEZE_STEPS, OPTIMIZER, "onebit-adam", "--optimizer onebit-adam"),
    NEEDS(PROMPT, GENERATE, NULL, "--generate N"),
    NEEDS(TEMPERATURE, GENERATE, NULL, "--generate N"),
    NEEDS(SAMPLE_TOP_K, GENERATE, NULL, "--generate N"),
    NEEDS(TOP_P, GENERATE, NULL, "--generate N"),
    NEEDS(STOP, GENERATE, NULL, "--generate N"),
    NEEDS(DOCUMENT_END, DOCUMENTS, "on", "--documents on"),
    NEEDS(EVAL_EVERY, VAL, NULL, "--val FILE"),
    NEEDS(SAVE_EVERY, SAVE, NULL, "--save DIR"),
    NEEDS(SAVE_BACKGROUND, SAVE, NULL, "--save DIR"),
    NEEDS(KEEP, SAVE, NULL, "--save DIR"),
    NEEDS(MAX_RESTARTS, SAVE, NULL, "--save DIR"),
#undef NEEDS
};

/* Returns 1 if an option has its default value, in any notation. */
static int has_default(const value *v, int id) {
    const option *o = &table[id];
    double x = 0;
    if (!v[id].text || !o->default_text) return !v[id].text;
    if (o->kind == INT || o->kind == REAL || o->kind == SIZE)
        return decimal(o->default_text, o->kind == REAL, &x) && x == v[id].number;
    return strcmp(v[id].text, o->default_text) == 0;
}

/* Refuses options that would have no effect because the option that they need is missing. Accepts
   default values, which a file of --print-config gives. Accepts --pp 1 --schedule zb, too, where the
   needed option is given, so that a script can run --pp 1, 2, 4. */
static void check_needed_options(const value *v) {
    for (size_t i = 0; i < sizeof needed_options / sizeof *needed_options; i++) {
        int id = needed_options[i].option, needs = needed_options[i].needs, n;
        const char *words = needed_options[i].words;
        if (v[id].from < GIVEN || has_default(v, id)) continue;
        int met = words ? word_index(words, v[needs].text, &n) >= 0
                        : v[needs].from >= GIVEN || !has_default(v, needs);
        if (!met)
            refuse("--%s %s needs %s%s%s", table[id].name, v[id].text, needed_options[i].text,
                words ? ", not " : "", words ? v[needs].text : "");
    }
}

/* Checks the options of a run without steps, which trains nothing. */
static void check_no_steps(const value *v) {
    static const int unused[] = { O_DRY_RUN, O_MEM_LIMIT, O_SAVE, O_TRACE, O_SCHEDULE_SVG,
        O_LOG_CSV };
    if (!v[O_MODEL].text && !v[O_RESUME].text)
        refuse("--steps 0 trains nothing: it needs --model or --resume");
    if (!v[O_VAL].text && !v[O_GENERATE].number && !v[O_SAVE_MODEL].text)
        refuse("--steps 0 has nothing to do without --val, --generate or --save-model");
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++)
        if (v[unused[i]].from >= GIVEN)
            refuse(
                "--%s is for a run with steps; with --steps 0 leave it out", table[unused[i]].name);
}

static void resolve_epochs(value *v, train_config *c);

static train_config resolve(value *v) {
    static const int schedules[] = { DT_LR_COSINE, DT_LR_LINEAR, DT_LR_CONSTANT, DT_LR_WSD };
    train_config c = {
        .model = resolve_model(v), .mesh = resolve_mesh(v), .zero = resolve_optimizer(v)
    };
    check_needed_options(v);
    resolve_sharding(v, c.mesh, &c.model);
    resolve_zero(v, c.mesh, &c.zero);
    c.ramp = parse_ramp(v, replicas_of(c.mesh));
    resolve_schedule(v, &c);
    resolve_batch(v, replicas_of(c.mesh), c.mesh.pp);
    resolve_pipeline(v, &c);
    check_ramp(v, &c.ramp, replicas_of(c.mesh));
    resolve_epochs(v, &c);
    c.svg = v[O_SCHEDULE_SVG].text;
    if (c.svg && c.mesh.pp == 1) refuse("--schedule-svg draws a pipeline; use --pp 2 or more");
    if (v[O_SCHEDULE_TEXT].text && c.mesh.pp == 1)
        refuse("--schedule-text writes a pipeline's schedule; use --pp 2 or more");
    if (long_of(v, O_STEPS) == 0) check_no_steps(v);
    if (!v[O_STOP_AT].text) compute(&v[O_STOP_AT], long_of(v, O_STEPS));
    if (!v[O_LR_STEPS].text) compute(&v[O_LR_STEPS], long_of(v, O_STEPS));
    if (v[O_STOP_AT].number > v[O_STEPS].number)
        refuse("--stop-at %lld is greater than --steps %lld; use --stop-at %lld or less",
            (long long)v[O_STOP_AT].number, (long long)v[O_STEPS].number,
            (long long)v[O_STEPS].number);
    c.lr = (dt_lr_desc){ v[O_LR].number, schedules[int_of(v, O_LR_SCHEDULE)], long_of(v, O_WARMUP),
        long_of(v, O_LR_STEPS), v[O_MIN_LR_RATIO].number, 0 };
    c.adamw_lr_scale = tiny_if_zero(v[O_ADAMW_LR_SCALE].number);
    c.weights = v[O_MODEL].text;
    c.adapter = v[O_ADAPTER].text;
    c.merge = v[O_MERGE].number != 0;
    c.trace = v[O_TRACE].text;
    c.seq = int_of(v, O_SEQ);
    c.micro_batch = int_of(v, O_MICRO_BATCH);
    c.accum = int_of(v, O_ACCUM);
    c.stop_at = long_of(v, O_STOP_AT);
    c.eval_every = long_of(v, O_EVAL_EVERY);
    c.shuffle = v[O_SHUFFLE].number != 0;
    c.read_ahead = v[O_READ_AHEAD].number != 0;
    resolve_checkpoints(v, &c);
    return c;
}

// ==== 7. Data ===================================================================================

/* Refuses a file that cannot be read. Returns 1 if the file begins with the magic number of llm.c's
   token shards, else 0. */
static int check_file(int id, const char *path) {
    unsigned char head[4] = { 0 };
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t got = fd < 0 ? -1 : read(fd, head, sizeof head);
    if (got < 0) refuse("--%s %s: %s", table[id].name, path, strerror(errno));
    close(fd);
    uint32_t magic =
        head[0] | (uint32_t)head[1] << 8 | (uint32_t)head[2] << 16 | (uint32_t)head[3] << 24;
    return got == (ssize_t)sizeof head && (magic == 20240520 || magic == 20240801);
}

/* Returns the number of sequences of a source. */
static int64_t sequences_of(const value *v, const train_files *files) {
    int64_t T = long_of(v, O_SEQ);
    return (files->tokens - 1) / (files->examples ? 2 * T : T);
}

/* Returns the sums over the sources of a data set. */
static int64_t all_sequences(const value *v, const train_files *f) {
    int64_t sum = 0;
    for (; f; f = f->next) sum += sequences_of(v, f);
    return sum;
}
static int64_t all_tokens(const train_files *f) {
    int64_t sum = 0;
    for (; f; f = f->next) sum += f->tokens;
    return sum;
}

/* Sets files->tokens to the number of tokens in the files, which are token shards. Reads the first
   `most` sequences in the order in which training reads them, and refuses a token id that is not
   below --vocab. */
static void check_tokens(
    const value *v, int id, const char *path, train_files *files, int64_t most) {
    dt_ctx *ctx = probe_ctx();
    int T = int_of(v, O_SEQ) * (files->examples ? 2 : 1), largest = 0;
    dt_text *text = data_open_text(ctx, files, 1);
    int32_t *ids = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, 2 * sizeof *ids * (size_t)T, "ids");
    files->tokens = dt_text_tokens(text);
    if (files->tokens > T) {
        dt_text_close(text);
        text = data_open_text(ctx, files, int_of(v, O_SEQ));
        int64_t S = dt_text_sequences(text);
        /* More sequences than the limit cannot be shuffled. find_source refuses such a run, but
           only after this check, so this check reads the sequences in file order. */
        int shuffle = id == O_DATA && v[O_SHUFFLE].number && S <= DT_SAMPLER_MAX_SHUFFLED;
        dt_sampler *order = dt_sampler_make(ctx, (dt_sampler_desc){ .samples = S,
                                                     .replicas = 1,
                                                     .seed = (uint64_t)v[O_SEED].number,
                                                     .shuffle = shuffle });
        for (int64_t s = 0; s < most && s < S; s++) {
            if (dt_text_read(text, dt_sampler_next(order), ids, ids + T) != DT_OK) break;
            if (files->examples) /* labels + 1 */
                for (int i = T / 2; i < T; i++) ids[i]--;
            for (int i = 0; i < (files->examples ? T : 2 * T); i++)
                largest = ids[i] > largest ? ids[i] : largest;
        }
    }
    dt_free(ctx, DT_MEM_HOST, ids, 2 * sizeof *ids * (size_t)T);
    if (dt_error(ctx) != DT_OK) refuse("--%s: %s", table[id].name, error_without_rank(ctx));
    dt_ctx_free(ctx);
    if (largest >= int_of(v, O_VOCAB) && v[O_MODEL].text)
        refuse("--%s %s holds token %d, but the model in %s has a vocabulary of %d: the data must "
               "be tokens of this model",
            table[id].name, path, largest, v[O_MODEL].text, int_of(v, O_VOCAB));
    if (largest >= int_of(v, O_VOCAB))
        refuse("--%s %s holds token %d, but --vocab is %d; use --vocab %d", table[id].name, path,
            largest, int_of(v, O_VOCAB), largest + 1);
}

/* Encodes text with --tokenizer, and instruction data with it or as bytes, into one shard. */
static void encode_source(const value *v, int id, train_files *files) {
    encoding e = { .ctx = tokenizer.tok ? tokenizer.ctx : probe_ctx(),
        .tok = tokenizer.tok,
        .tokenizer = v[O_TOKENIZER].text,
        .cache = v[O_TOKEN_CACHE].text,
        .seq = int_of(v, O_SEQ),
        .timeout_s = v[O_TIMEOUT].number };
    if (encode_files(&e, files) != DT_OK)
        refuse("--%s: %s", table[id].name, error_without_rank(e.ctx));
    if (!tokenizer.tok) dt_ctx_free(e.ctx);
}

/* Refuses a source that the run cannot read: ids outside the vocabulary, too few tokens, too many
   sequences. */
static void check_source(
    const value *v, int id, const char *path, train_files *files, int64_t most) {
    const char *name = table[id].name, *unit = files->shards ? "tokens" : "bytes";
    int64_t seq = int_of(v, O_SEQ);
    if (files->shards) check_tokens(v, id, path, files, most);
    if (!files->shards && int_of(v, O_VOCAB) < 256 && v[O_MODEL].text)
        refuse("--%s %s is text, whose bytes are tokens 0 to 255, but the model in %s has a "
               "vocabulary of %d; use llm.c shards of this model's tokens",
            name, path, v[O_MODEL].text, int_of(v, O_VOCAB));
    if (!files->shards && int_of(v, O_VOCAB) < 256)
        refuse("--vocab %d: the data is bytes 0 to 255; use --vocab 256", int_of(v, O_VOCAB));
    if (files->tokens < 2)
        refuse(
            "--%s %s: %lld %s; at least 2 are needed", name, path, (long long)files->tokens, unit);
    if (files->tokens < seq + 1)
        refuse("--%s %s: %lld %s, but one sequence needs %lld (--seq %lld and the label of its "
               "last token); use "
               "--seq %lld or less",
            name, path, (long long)files->tokens, unit, (long long)seq + 1, (long long)seq,
            (long long)files->tokens - 1);
    if (id == O_DATA && v[O_SHUFFLE].number && sequences_of(v, files) > DT_SAMPLER_MAX_SHUFFLED)
        refuse("--shuffle on: %s has %lld sequences of --seq %lld; at most %d can be shuffled; use "
               "--seq %lld or more",
            path, (long long)sequences_of(v, files), (long long)seq, DT_SAMPLER_MAX_SHUFFLED,
            (long long)((files->tokens - 1) / (DT_SAMPLER_MAX_SHUFFLED + 1) + 1));
}

/* Finds the files of one source of --data or --val and checks them. `path` is NULL for the
   project's own sources. `most` is an upper limit of the number of sequences that the run reads. */
static void find_source(
    const value *v, int id, const char *path, train_files *files, int64_t most) {
    const char *name = table[id].name;
    struct stat st;
    int examples = 0;
    if (!path) {
        if (!train_files_find_sources(files))
            refuse("no --%s given, and the project's sources are neither in . nor in the "
                   "parent of the program's folder; use --%s FILE",
                name, name);
        path = "(the project's sources)";
    } else {
        if (!check_kind(id, path, EITHER) || stat(path, &st) != 0)
            refuse("--%s %s: %s%s", name, path, strerror(errno),
                id == O_DATA && !v[O_DATA_MIX].text && strchr(path, ',')
                    ? "; a list of files needs --data-mix W,W,.."
                    : "");
        if (S_ISREG(st.st_mode)) {
            if (train_files_add(files, path, (int64_t)st.st_size) != 0)
                refuse("--%s %s: out of memory", name, path);
        } else if (train_files_add_dir(files, path, NULL) != 0)
            refuse("--%s %s: %s", name, path, strerror(errno));
    }
    if (files->count == 0) refuse("--%s %s: the directory holds no files", name, path);
    for (int i = 0; i < files->count; i++) {
        if (has_ending(files->path[i], ".safetensors"))
            refuse("--%s: %s has weights, not text: --model reads them", name, files->path[i]);
        files->shards |= check_file(id, files->path[i]);
        examples += encode_is_jsonl(files->path[i]);
    }
    if (examples && (examples < files->count || files->shards))
        refuse("--%s %s: %d of %d files are .jsonl; instruction data and text need --data-mix",
            name, path, examples, files->count);
    if (!files->shards && *tokenizer.unusable)
        refuse("--%s %s is text, and the tokenizer of --model %s cannot encode it: %s; use llm.c "
               "shards of the model's tokens, or --tokenizer FILE, or --tokenizer none for bytes",
            name, path, v[O_MODEL].text, tokenizer.unusable);
    files->examples = examples > 0;
    files->tokens = files->bytes;
    if ((tokenizer.tok || examples) && !files->shards) encode_source(v, id, files);
    check_source(v, id, path, files, most);
}

/* Reads the weights of --data-mix into weights[], as integers without a common divisor, and returns
   their number. */
static int parse_weights(const char *text, int64_t weights[DATA_SOURCES]) {
    int n = 0;
    int64_t sum = 0, divisor = 0;
    for (const char *at = text; at; n++) {
        double x = 0;
        size_t length = decimal(at, 1, &x);
        if (!length || (at[length] && at[length] != ',') || n == DATA_SOURCES || !(x >= 1e-6) ||
            x > 1e9 || fabs(x * 1e6 - floor(x * 1e6 + 0.5)) > 1e-3)
            refuse("--data-mix %s: not W,W,..: at most %d numbers from 0.000001 to 1e9 with at "
                   "most 6 decimals",
                text, DATA_SOURCES);
        weights[n] = (int64_t)floor(x * 1e6 + 0.5);
        divisor = gcd(divisor, weights[n]);
        at = at[length] ? at + length + 1 : NULL;
    }
    for (int i = 0; i < n; i++) sum += weights[i] /= divisor;
    if (sum > DATA_PERIOD)
        refuse("--data-mix %s: the weights have the ratio of whole numbers with a sum of %lld; at "
               "most %d is allowed: round them",
            text, (long long)sum, DATA_PERIOD);
    return n;
}

/* Finds the sources of --data or --val: one, or with --data-mix those in the list of --data. */
static void find_text(const value *v, int id, train_files *files, int64_t most) {
    const char *mix = id == O_DATA ? v[O_DATA_MIX].text : NULL, *at = v[id].text;
    int64_t weights[DATA_SOURCES];
    int n = mix ? parse_weights(mix, weights) : 1;
    if (!mix) {
        find_source(v, id, at, files, most);
        return;
    }
    if (!at) refuse("--data-mix %s needs --data FILE,FILE,..", mix);
    for (int i = 0; at; i++) {
        char path[4096];
        size_t length = strcspn(at, ",");
        if (i == n || (i < n - 1 && !at[length]))
            refuse("--data %s: --data-mix %s has %d weights; separate as many files by commas",
                v[id].text, mix, n);
        snprintf(path, sizeof path, "%.*s", (int)(length < 4095 ? length : 4095), at);
        if (i > 0) {
            files->next = (train_files *)calloc(1, sizeof *files);
            if (!files->next) refuse("out of memory");
            files = files->next;
        }
        find_source(v, id, path, files, most);
        files->weight = weights[i];
        at = at[length] ? at + length + 1 : NULL;
    }
}

/* Copies an option's text to `out`, at most `room` - 1 bytes. Replaces the escapes \n, \t, \\ and
   \, by what they stand for. If `list` is set, ends at a comma. Returns the rest of the text after
   the comma, or NULL if there is none. */
static const char *unescape(int id, const char *text, int list, char *out, size_t room) {
    size_t n = 0;
    const char *at = text;
    for (; *at && !(list && *at == ','); at++) {
        char c = *at;
        if (c == '\\') {
            c = *++at == 'n' ? '\n' : *at == 't' ? '\t' : *at;
            if (!*at || !strchr("nt\\,", *at))
                refuse("--%s %s: the escapes are \\n, \\t, \\, and \\\\", table[id].name, text);
        }
        if (n + 1 >= room)
            refuse("--%s %s: at most %zu bytes are allowed", table[id].name, text, room - 1);
        out[n++] = c;
    }
    out[n] = 0;
    if (n == 0) refuse("--%s %s: an empty text", table[id].name, text);
    return *at ? at + 1 : NULL;
}

enum { MAX_STOPS = 64, STOP_BYTES = 256 };

/* Returns 1 if the text of the run's tokens is not known: without a tokenizer the data has token
   shards or, in a run without data, the model has other tokens than bytes. */
static int has_ids(const train_config *c) {
    const train_files *f = c->data.count ? &c->data : &c->val;
    if (tokenizer.tok) return 0;
    if (!f->count) return c->model.vocab != 256;
    for (; f; f = f->next)
        if (f->shards && !f->examples) return 1;
    return 0;
}

/* Checks the options of --generate. Returns the tokens of --prompt, and sets *n to their number, if
   there is a tokenizer; else returns NULL. */
static int32_t *resolve_generation(const value *v, const train_config *c, int64_t *n) {
    const char *prompt = v[O_PROMPT].text, *stop = v[O_STOP].text;
    char text[STOP_BYTES];
    int stops = 0;
    if ((prompt || stop) && has_ids(c))
        refuse("--%s %s: the text of the model's tokens is not known; use --tokenizer FILE",
            prompt ? "prompt" : "stop", prompt ? prompt : stop);
    for (const char *at = stop; at; stops++) {
        if (stops == MAX_STOPS) refuse("--stop: at most %d texts are allowed", MAX_STOPS);
        at = unescape(O_STOP, at, 1, text, sizeof text);
    }
    if (!prompt || !tokenizer.tok) return NULL;
    const int32_t *ids = tok_encode(tokenizer.tok, prompt, strlen(prompt),
        (tok_encode_desc){ .add_special = 1, .has_more = 1 }, n);
    int32_t *copy = ids ? (int32_t *)malloc((size_t)*n * sizeof *copy + 1) : NULL;
    if (!copy) refuse("--prompt: %s", ids ? "out of memory" : error_without_rank(tokenizer.ctx));
    memcpy(copy, ids, (size_t)*n * sizeof *copy);
    return copy;
}

/* Sets the tokens that end a document: of text that is encoded one token, of bytes the bytes of
   --document-end, of token shards without a tokenizer the id --document-end. */
static void resolve_documents(const value *v, train_config *c) {
    char text[DATA_END + 1];
    const char *given = v[O_DOCUMENT_END].text;
    data_end *end = &c->documents;
    if (!v[O_DOCUMENTS].number) return;
    if (given) unescape(O_DOCUMENT_END, given, 0, text, sizeof text);
    if (tokenizer.tok) {
        int32_t id = given ? tok_id(tokenizer.tok, text) : encode_end_id(tokenizer.tok);
        if (id < 0)
            refuse(
                "--document-end %s: --tokenizer %s has no such token", given, v[O_TOKENIZER].text);
        *end = (data_end){ 1, { id } };
        return;
    }
    for (const train_files *f = &c->data; f; f = f->next) {
        double id = 0;
        size_t n = given ? decimal(given, 0, &id) : 0;
        if (!f->shards || f->examples) continue;
        if (!n || given[n] || id >= v[O_VOCAB].number)
            refuse(
                "--documents on: token shards need --document-end ID, an id below --vocab %s, or "
                "a --tokenizer",
                v[O_VOCAB].text);
        *end = (data_end){ 1, { (int32_t)id } };
        return;
    }
    if (!given) strcpy(text, "\n\n");
    for (end->n = 0; text[end->n]; end->n++) end->id[end->n] = (unsigned char)text[end->n];
}

/* Returns 1 if a document ends in the first DOCUMENT_SEARCH tokens of --data. */
enum { DOCUMENT_SEARCH = MEGA };
static int finds_document_end(const value *v, const train_config *c) {
    int64_t T = long_of(v, O_SEQ), read = 0;
    size_t bytes = 4 * (size_t)T * sizeof(int32_t);
    dt_ctx *ctx = probe_ctx();
    int32_t *ids = (int32_t *)dt_alloc(ctx, DT_MEM_HOST, bytes, "documents");
    int found = 0;
    for (const train_files *f = &c->data; f && ids && !found; f = f->next) {
        dt_text *text = f->examples ? NULL : data_open_text(ctx, f, T);
        for (int64_t s = 0; s < dt_text_sequences(text) && read < DOCUMENT_SEARCH && !found; s++) {
            if (dt_text_read(text, s, ids, ids + T) != DT_OK) break;
            data_split_documents(&c->documents, T, ids, ids + T, ids + 2 * T, ids + 3 * T);
            for (int64_t t = 0; t < T; t++) found |= ids[T + t] < 0;
            read += T;
        }
        dt_text_close(text);
    }
    dt_free(ctx, DT_MEM_HOST, ids, bytes);
    dt_ctx_free(ctx);
    return found || read == 0;
}

/* Finds and checks --data and --val. */
static void find_data(const value *v, train_config *c, int64_t most) {
    if (v[O_TOKEN_CACHE].text && !check_kind(O_TOKEN_CACHE, v[O_TOKEN_CACHE].text, A_DIRECTORY) &&
        mkdir(v[O_TOKEN_CACHE].text, 0777) != 0 && errno != EEXIST)
        refuse("--token-cache %s: %s", v[O_TOKEN_CACHE].text, strerror(errno));
    if (v[O_DATA].text || long_of(v, O_STEPS) > 0) find_text(v, O_DATA, &c->data, most);
    if (v[O_VAL].text) find_text(v, O_VAL, &c->val, TRAIN_EVAL_SEQUENCES);
    c->token_bytes = tokenizer.bytes;
    resolve_documents(v, c);
}

/* With --epochs, finds the data and computes --steps: the first step after which at least E times
   all sequences were read. */
static void resolve_epochs(value *v, train_config *c) {
    int64_t low = 1, high = (int64_t)table[O_STEPS].hi;
    if (!v[O_EPOCHS].text) return;
    find_data(v, c, INT64_MAX);
    double need = ceil(v[O_EPOCHS].number * (double)all_sequences(v, &c->data) - 1e-9);
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if ((double)dt_batch_ramp_consumed(c->ramp, middle + 1) >= need)
            high = middle;
        else
            low = middle + 1;
    }
    if (v[O_STEPS].from >= GIVEN && long_of(v, O_STEPS) != low)
        refuse("--epochs %s is %lld steps, but --steps is %s; leave one of them out",
            v[O_EPOCHS].text, (long long)low, v[O_STEPS].text);
    compute(&v[O_STEPS], low);
}

/* Checks that the run will be able to make a file or folder at `path`. Creates nothing. */
static void check_parent(int id, const char *path) {
    int end = (int)strlen(path);
    char folder[4096];
    while (end > 1 && path[end - 1] == '/') end--; /* of a folder's path */
    while (end > 0 && path[end - 1] != '/') end--;
    int length = snprintf(folder, sizeof folder, "%.*s", end ? end : 1, end ? path : ".");
    if (length >= (int)sizeof folder)
        refuse("--%s %.80s...: the path is too long", table[id].name, path);
    /* the folder must be writable, because the run writes a new file and then renames it to path */
    if (access(folder, W_OK | X_OK) != 0)
        refuse("--%s %s: %s", table[id].name, path, strerror(errno));
}

/* Checks that the run will be able to write a file at `path` after the last step. */
static void check_writable(int id, const char *path) {
    check_kind(id, path, A_FILE);
    check_parent(id, path);
}

/* An output file of the run, and the option that sets its path. */
typedef struct output {
    int option;
    char path[4096];
} output;
enum { MAX_OUTPUTS = 10 };

static int is_llmc(const char *path) { return has_ending(path, ".bin"); }

/* Writes the path of the copy of the tokenizer that --save-model makes. Returns 0 if it makes none:
   without a tokenizer, or if the tokenizer is in that folder. */
static int tokenizer_copy(const value *v, char *path, size_t bytes) {
    const char *model = v[O_SAVE_MODEL].text;
    struct stat st;
    if (!model || is_llmc(model) || !tokenizer.tok) return 0;
    snprintf(path, bytes, "%.4000s/tokenizer.json", model);
    return stat(path, &st) != 0 || !same_file(v[O_TOKENIZER].text, &st);
}

static int find_outputs(const value *v, output out[MAX_OUTPUTS]) {
    static const int named[] = { O_LOG_CSV, O_TRACE, O_SCHEDULE_SVG, O_SCHEDULE_TEXT };
    static const char *const saved[] = { "/model.safetensors", "/model.safetensors.index.json",
        "/config.json", "/adapter_model.safetensors", "/adapter_config.json" };
    const char *model = v[O_SAVE_MODEL].text;
    int n = 0;
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (v[named[i]].text) {
            out[n].option = named[i];
            snprintf(out[n++].path, sizeof out->path, "%s", v[named[i]].text);
        }
    for (int i = 0; model && i < (is_llmc(model) ? 1 : 5); i++) {
        out[n].option = O_SAVE_MODEL;
        snprintf(out[n++].path, sizeof out->path, "%s%s", model, is_llmc(model) ? "" : saved[i]);
    }
    if (tokenizer_copy(v, out[n].path, sizeof out->path)) out[n++].option = O_SAVE_MODEL;
    return n;
}

static void refuse_overwrite(
    const output *out, const struct stat *there, int reader, const char *path) {
    if (path && same_file(path, there))
        refuse("--%s would overwrite %s, which --%s reads; use another name",
            table[out->option].name, out->path, table[reader].name);
}

/* Refuses an output file that is also an input file or another output file. `models` contains the
   files of --model. */
static void check_overwrites(const value *v, const train_config *c, const train_files *models) {
    const train_files *in[3] = { &c->data, &c->val, models };
    const int ids[3] = { O_DATA, O_VAL, O_MODEL };
    output out[MAX_OUTPUTS];
    int n = find_outputs(v, out);
    for (int o = 0; o < n; o++) {
        struct stat st;
        int exists = stat(out[o].path, &st) == 0, device = exists && !S_ISREG(st.st_mode);
        for (int k = 0; k < 3 && exists; k++)
            for (const train_files *f = in[k]; f; f = f->next)
                for (int i = 0; i < f->count; i++)
                    refuse_overwrite(&out[o], &st, ids[k], f->path[i]);
        if (exists) refuse_overwrite(&out[o], &st, O_CONFIG, v[O_CONFIG].text);
        if (exists) refuse_overwrite(&out[o], &st, O_TOKEN_FILE, v[O_TOKEN_FILE].text);
        if (exists) refuse_overwrite(&out[o], &st, O_TOKENIZER, v[O_TOKENIZER].text);
        if (exists) refuse_overwrite(&out[o], &st, O_SCHEDULE, c->schedule_file);
        for (int k = 0; k < o && !device; k++)
            if (strcmp(out[k].path, out[o].path) == 0 || (exists && same_file(out[k].path, &st)))
                refuse("--%s and --%s would both write %s; use another name",
                    table[out[k].option].name, table[out[o].option].name, out[o].path);
    }
}

/* Refuses a --save folder that contains checkpoints of another run, because a later --resume would
   take these checkpoints for checkpoints of this run. */
static void check_save(const value *v) {
    const char *save = v[O_SAVE].text, *resume = v[O_RESUME].text;
    char path[4096], newest[64];
    struct stat at;
    if (!save) return;
    if (!check_kind(O_SAVE, save, A_DIRECTORY)) {
        check_parent(O_SAVE, save);
        return;
    }
    if (access(save, W_OK | X_OK) != 0) refuse("--save %s: %s", save, strerror(errno));
    int64_t there = dt_checkpoint_newest(dt_io_default(), save, newest, sizeof newest);
    if (there < -1) refuse("--save %s: %s", save, strerror(errno));
    if (there < 0) return;
    for (int up = 0; resume && up < 2; up++) { /* --resume may be DIR or DIR/step-N */
        if (snprintf(path, sizeof path, "%s%s", resume, up ? "/.." : "") >= (int)sizeof path)
            continue;
        if (stat(path, &at) != 0 || !same_file(save, &at)) continue;
        if (!up || snprintf(path, sizeof path, "%s/%s", save, newest) >= (int)sizeof path) return;
        if (stat(resume, &at) == 0 && same_file(path, &at)) return;
        refuse(
            "--save %s has %s, which is newer than --resume %s: use another folder, or remove it",
            save, newest, resume);
    }
    refuse("--save %s has %s already: continue from it with --resume %s, or use another folder",
        save, newest, save);
}

/* Checks that every output file can be written and that none overwrites an input file. */
static void check_outputs(const value *v, const train_config *c) {
    static const char *const endings[] = { ".safetensors", ".json", ".bin", NULL };
    const char *model = v[O_MODEL].text, *folder = v[O_SAVE_MODEL].text;
    char path[4096];
    train_files models = { 0 };
    struct stat st;
    if (model && stat(model, &st) == 0) {
        const char *slash = strrchr(model, '/');
        snprintf(
            path, sizeof path, "%.*s", slash ? (int)(slash - model) + 1 : 1, slash ? model : ".");
        train_files_add_dir(&models, S_ISDIR(st.st_mode) ? model : path, endings);
        if (!S_ISDIR(st.st_mode)) train_files_add(&models, model, 0);
    }
    if (v[O_ADAPTER].text) train_files_add_dir(&models, v[O_ADAPTER].text, endings);
    check_overwrites(v, c, &models);
    train_files_free(&models);
    if (!v[O_DRY_RUN].number) check_save(v);
    if (!folder) return;
    for (int i = 0; c->model.lora.rank && !c->merge && i < GPT_LORA_MODULES; i++)
        if (c->model.lora.modules >> i & 1 && !gpt_lora_file_name(c->model.arch, i))
            refuse(
                "--save-model: PEFT's files have no adapter of GPT-2's %s alone; use --merge on, "
                "or --lora-on o,fc,proj",
                gpt_lora_names[i].option);
    if (is_llmc(folder) && c->model.lora.rank && !c->merge)
        refuse("--save-model %s: an adapter needs a folder; or use --merge on", folder);
    if (is_llmc(folder)) {
        const gpt m = { .config = c->model };
        if (!gpt_llmc(&m).version)
            refuse("--save-model %s: llm.c's models are tied GPT-2 with --ffn 4 x --width, in "
                   "f32 or bf16; use a folder, for safetensors",
                folder);
        check_writable(O_SAVE_MODEL, folder);
        return;
    }
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        refuse("--save-model %s: %s", folder, strerror(errno));
    check_kind(O_SAVE_MODEL, folder, A_DIRECTORY);
    if (access(folder, W_OK | X_OK) != 0) refuse("--save-model %s: %s", folder, strerror(errno));
}

// ==== 8. Settings block =========================================================================

/* Prints the number of layers of each stage, for example "embedding, 0.5 + 3.5, head": the first of
   two stages has the embedding and half a layer, the second has 3.5 layers and the head. Then
   simulates the schedule and prints its bubble fraction. */
static void print_stages(const train_config *c) {
    int stages = c->mesh.pp * c->chunks, items = 2 * c->model.layers + 2;
    line out = { .fd = 1 };
    line_printf(&out, "stages  ");
    for (int s = 0; s < stages && !c->partition_by_cost; s++) {
        int halves =
            c->stage_begin[s + 1] - c->stage_begin[s] - (s == 0) - (c->stage_begin[s + 1] == items);
        line_printf(&out, "%s%s%g%s", s ? " + " : "", s == 0 ? "embedding, " : "", halves / 2.0,
            s == stages - 1 ? ", head" : "");
    }
    line_printf(&out, "%s\n",
        c->partition_by_cost ? "divided by the measured times of half layers, embedding and head"
                             : "   (layers)");
    dt_ctx *ctx = probe_ctx();
    double v = c->chunks;
    dt_schedule *schedule = train_schedule(ctx, c, c->mesh.pp, c->accum);
    size_t bytes = (size_t)dt_schedule_offset(schedule, c->mesh.pp) * sizeof(dt_span);
    dt_span *spans = (dt_span *)dt_alloc(ctx, DT_MEM_HOST, bytes, "a simulation");
    if (spans && dt_schedule_simulate(schedule, (dt_schedule_costs){ 1 / v, 1 / v, 1 / v, NULL, 0 },
                     spans) == DT_OK) {
        dt_schedule_bubble b = dt_schedule_bubble_of(schedule, spans, -1);
        line_printf(&out,
            "bubble  %s: %.1f%% of ideal, %.1f%% of total, if all stages are equal and a backward "
            "takes two forwards\n",
            dt_schedule_name(schedule), 100 * b.idle_per_work, 100 * b.idle_per_makespan);
    }
    if (dt_error(ctx) != DT_OK) refuse("%s", error_without_rank(ctx));
    dt_free(ctx, DT_MEM_HOST, spans, bytes);
    dt_ctx_free(ctx);
}

/* Prints a line for each source of the data. */
static void print_data(const value *v, const train_files *f) {
    static const char *const cached[] = { "", "   tokens from the cache", "   tokens to the cache",
        "   tokens to the cache, whose shard was damaged or stale" };
    line out = { .fd = 1 };
    int mix = f->next != NULL;
    for (; f && f->count; f = f->next) {
        const char *unit = f->shards ? "tokens" : "bytes";
        line_printf(&out, "data    %s   %d file%s   ",
            mix              ? f->path[0]
            : v[O_DATA].text ? v[O_DATA].text
                             : "the project's own sources",
            f->count, f->count == 1 ? "" : "s");
        if (f->examples)
            line_printf(&out, "%lld examples   %lld cut off after --seq %s",
                (long long)sequences_of(v, f), (long long)f->truncated, v[O_SEQ].text);
        else
            line_printf(&out, "%lld %s   %lld sequences", (long long)f->tokens, unit,
                (long long)sequences_of(v, f));
        if (mix) line_printf(&out, "   weight %lld", (long long)f->weight);
        line_printf(&out, "%s\n", cached[f->cached]);
        if (f->skipped)
            line_printf(&out,
                "notice  %d example%s skipped, because the answer begins after --seq %s tokens; "
                "the "
                "first is %s line %d\n",
                f->skipped, f->skipped == 1 ? " is" : "s are", v[O_SEQ].text,
                f->path[f->skipped_file], f->skipped_line);
    }
}

/* Writes the schedule as text. */
static void write_schedule(const train_config *c, const char *path) {
    dt_ctx *ctx = probe_ctx();
    dt_schedule *s = train_schedule(ctx, c, c->mesh.pp, c->accum);
    if (dt_schedule_write(ctx, path, s) != DT_OK)
        refuse("--schedule-text %s", error_without_rank(ctx));
    dt_ctx_free(ctx);
}

/* Prints which tokenizer is used, and whether it is that of the model. */
static void print_tokenizer(const value *v, const gpt_config *m) {
    const char *path = v[O_TOKENIZER].text;
    char own[4096];
    struct stat st;
    line out = { .fd = 1 };
    if (!tokenizer.tok) return;
    int ids = tok_vocab(tokenizer.tok), has = model_tokenizer(v, own, sizeof own);
    int is_own = has && stat(path, &st) == 0 && same_file(own, &st);
    line_printf(&out, "tokens  %s   %d ids", path, ids);
    if (ids < m->vocab) line_printf(&out, " of the %d of the model", m->vocab);
    if (v[O_MODEL].text && !is_own && (has || ids < m->vocab))
        line_printf(&out, "; this is not the file in the model's folder%s",
            has ? "" : ", which has none: is it the tokenizer of this model?");
    line_printf(&out, "%s\n", is_own ? "   from the model's folder" : "");
}

static void print_settings(const value *v, const train_config *c) {
    static const char *const sources[] = { "", "=", "$", "*", "+" };
    const gpt_config *m = &c->model;
    int column = 0;
    line out = { .fd = 1 };
    line_printf(&out, "dt %d.%d.%d   %s %s   %s ranks   mesh dp%d", DT_VERSION / 1000,
        DT_VERSION / 100 % 10, DT_VERSION % 100, v[O_DEVICE].text, v[O_BACKEND].text,
        v[O_RANKS].text, c->mesh.dp);
    if (c->mesh.cp > 1) line_printf(&out, " x cp%d %s", c->mesh.cp, v[O_CP_KIND].text);
    if (c->mesh.tp > 1) line_printf(&out, " x tp%d%s", c->mesh.tp, m->sp ? " with sp" : "");
    if (c->mesh.ep > 1 && !c->mesh.expert_tp) line_printf(&out, " x ep%d", c->mesh.ep);
    if (c->mesh.pp > 1) line_printf(&out, " x pp%d %s", c->mesh.pp, v[O_SCHEDULE].text);
    if (c->chunks > 1) line_printf(&out, " of %d chunks", c->chunks);
    if (c->mesh.expert_tp)
        line_printf(&out, "   experts ep%d x tp%d", c->mesh.ep, c->mesh.expert_tp);
    line_printf(&out, "   zero %s", v[O_ZERO].text);
    if (c->zero.shard_group) line_printf(&out, " in groups of %d", c->zero.shard_group);
    line_printf(&out, "\n");
    line_printf(&out, "launch  %s\n", launched.summary);
    if (*launched.device_note) line_printf(&out, "device  %s\n", launched.device_note);
    if (v[O_CONFIG].text)
        line_printf(&out, "config  %s%s%s%s%s%s\n", v[O_CONFIG].text, config.note,
            *config.automatic ? "   auto keys, left as they are:" : "", config.automatic,
            *config.ignored ? "   ignored keys:" : "", config.ignored);
    line_printf(&out, "model   %s   %d layers   %d wide   %d heads   %.2f M parameters   %s\n",
        v[O_ARCH].text, m->layers, m->width, m->heads, (double)gpt_param_count(*m) / 1e6,
        v[O_DTYPE].text);
    if (c->mesh.pp > 1) print_stages(c);
    line_printf(&out, "batch   %s = micro-batch %d x accum %d x replicas %d   %lld tokens\n",
        v[O_BATCH].text, c->micro_batch, c->accum, replicas_of(c->mesh),
        (long long)long_of(v, O_BATCH) * c->seq);
    print_tokenizer(v, m);
    print_data(v, &c->data);
    if (c->documents.n && !finds_document_end(v, c))
        line_printf(&out,
            "notice  --documents on: no document ends in the first %d tokens of --data, so "
            "each sequence is one document; see --document-end\n",
            DOCUMENT_SEARCH);
    line_printf(&out, "options * given, + by --config, $ by the environment, = computed, others "
                      "default\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        const option *o = &table[i];
        if (!is_option(i) || o->availability == NOT_BUILT || o->kind == FLAG || !v[i].text)
            continue;
        char entry[64];
        snprintf(entry, sizeof entry, "%s %s%s", o->name, v[i].text, sources[v[i].from]);
        if (column++ % 4 == 3)
            line_printf(&out, "  %s\n", entry);
        else
            line_printf(&out, "  %-27s", entry);
    }
    if (column % 4) line_printf(&out, "\n");
    line_printf(&out, "\n");
}

// ==== 9. Output of a run ========================================================================

/* The options of a run, and the state that rank 0 needs for its output. */
typedef struct job {
    const value *v;
    train_config config;
    int csv; /* file descriptor of --log-csv; -1: none */
    /* 1 if csv is standard output or not a regular file, so that it is never read or truncated;
       else 0 */
    int csv_is_stream;
    double ms, tokens; /* milliseconds and tokens of all steps after the first */
    int64_t steps;     /* number of steps that this run has completed */
    int64_t outliers;  /* number of these steps that changed nothing (--skip-loss-z) */
    int attempt;       /* number of restarts before this attempt */
    int32_t *prompt;   /* with --tokenizer: the tokens of --prompt */
    int64_t prompt_tokens;
} job;

#define CSV_COLUMNS \
    "step,loss,grad_norm,lr,ms,tokens_per_s,mem_params,mem_grads,mem_optim,mem_acts," \
    "mem_comm,mem_peak,bytes_dp,bytes_tp,bytes_cp,bytes_pp,bytes_ep,val_loss,mfu," \
    "batch,bubble,balance_loss,z_loss,dropped,val_perplexity,val_bits_per_byte,epochs"

static const char *csv_header(const train_config *c) {
    return c->model.mtp ? CSV_COLUMNS ",mtp_loss" : CSV_COLUMNS;
}

/* Returns the model FLOPs utilization: the model's FLOPs per second, without recompute, divided by
   the sum of all ranks' peaks. Returns 0 if --peak-tflops is not given. */
static double mfu(const job *j, const train_row *row) {
    gpt_config c = j->config.model;
    double peak = j->v[O_PEAK_TFLOPS].number * 1e12 * j->v[O_RANKS].number;
    c.seq = j->config.seq;
    return peak > 0 ? gpt_flops_per_token(c) * row->tokens_per_s / peak : 0;
}

static void csv_failed(dt_ctx *ctx, const job *j, int error) {
    dt_fail(ctx, DT_ERR_IO, "--log-csv %s: %s", j->v[O_LOG_CSV].text, write_error_text(error));
}

static void csv_row(dt_ctx *ctx, const job *j, const train_row *row) {
    line out = { .fd = j->csv };
    line_printf(&out, "%lld,%.17g,%.17g,%.17g,%.3f,%.1f", (long long)row->step, row->loss,
        row->grad_norm, row->lr, row->ms, row->tokens_per_s);
    for (int m = 0; m < TRAIN_MEMS; m++) line_printf(&out, ",%.0f", row->mem[m]);
    for (int a = 0; a < DT_AXES; a++) line_printf(&out, ",%.0f", row->bytes[a]);
    line_printf(&out, ","); /* val_loss and mfu stay empty if they were not measured */
    if (isfinite(row->val_loss)) line_printf(&out, "%.17g", row->val_loss);
    line_printf(&out, ",");
    if (mfu(j, row) > 0) line_printf(&out, "%.6g", mfu(j, row));
    line_printf(&out, ",%lld,%.6g,%.17g,%.17g,%.17g,", (long long)row->batch, row->bubble,
        row->balance, row->z, row->dropped);
    if (isfinite(row->val_loss)) line_printf(&out, "%.17g", exp(row->val_loss));
    line_printf(&out, ",");
    if (isfinite(row->val_bits)) line_printf(&out, "%.17g", row->val_bits);
    int i = 0; /* the epochs of each source, separated by semicolons */
    for (const train_files *f = &j->config.data; f; f = f->next, i++)
        line_printf(&out, "%s%.10g", i ? ";" : ",", row->epochs[i]);
    if (j->config.model.mtp) line_printf(&out, ",%.17g", row->mtp);
    line_printf(&out, "\n");
    if (out.error) csv_failed(ctx, j, out.error);
}

/* Appends a time in seconds as minutes:seconds or, from one hour on, hours:minutes:seconds. */
static void line_print_time(line *out, double seconds) {
    long long s = (long long)(seconds + 0.5);
    if (s >= 3600)
        line_printf(out, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else
        line_printf(out, "%lld:%02lld", s / 60, s % 60);
}

/* If a write to standard output has failed, ends the run. With --save the run first saves, as after
   SIGTERM. */
static void check_stdout(dt_ctx *ctx, const job *j) {
    if (!get_flag(launched.stdout_error)) return;
    if (j->config.stop)
        set_flag(launched.stop_requested, 1);
    else
        dt_fail(ctx, DT_ERR_IO, "standard output: %s",
            write_error_text(get_flag(launched.stdout_error)));
}

/* Returns the number of the epoch, from 1, in which the last sequence of a step is: an epoch has
   the sequences of all sources. */
static int64_t epoch_of(const job *j, const train_row *row) {
    double read = 0; /* sequences read */
    int i = 0;
    for (const train_files *f = &j->config.data; f; f = f->next)
        read += row->epochs[i++] * (double)sequences_of(j->v, f);
    int64_t n = (int64_t)(read + 0.5), all = all_sequences(j->v, &j->config.data);
    return n > 0 ? (n - 1) / all + 1 : 1;
}

/* Prints a validation. */
static void on_eval(dt_ctx *ctx, const train_row *row, void *user) {
    const job *j = (const job *)user;
    line out = { .fd = 1 };
    if (j->v[O_QUIET].number) return;
    line_printf(&out, "eval %4lld/%s | val loss %.6f | perplexity %.4f", (long long)row->step,
        j->v[O_STEPS].text, row->val_loss, exp(row->val_loss));
    if (isfinite(row->val_bits)) line_printf(&out, " | bits per byte %.6f", row->val_bits);
    line_printf(&out, " on at most %d sequences\n", TRAIN_EVAL_SEQUENCES);
    check_stdout(ctx, j);
}

static void on_step(dt_ctx *ctx, const train_row *row, void *user) {
    job *j = (job *)user;
    int64_t left = j->config.stop_at - row->step, before = j->steps++;
    line out = { .fd = 1 };
    set_flag(launched.made_step, 1);
    if (before > 0) j->ms += row->ms, j->tokens += (double)row->batch * j->config.seq;
    j->outliers += row->outlier != DT_OUTLIER_NONE;
    if (j->csv >= 0) csv_row(ctx, j, row);
    if (j->v[O_QUIET].number) return;
    if (j->v[O_EPOCHS].text) line_printf(&out, "Epoch %lld ", (long long)epoch_of(j, row));
    line_printf(&out, "%s %4lld/%s | loss %.6f | norm %.4f | lr %.2e | %.1f ms | %.0f tok/s",
        j->v[O_EPOCHS].text ? "Step" : "step", (long long)row->step, j->v[O_STEPS].text, row->loss,
        row->grad_norm, row->lr, row->ms, row->tokens_per_s);
    if (mfu(j, row) > 0) line_printf(&out, " | mfu %.1f%%", 100 * mfu(j, row));
    line_printf(&out, " | comm %.0f%% | bubble %.0f%% | mem %.1f MiB | eta ", 100 * row->comm,
        100 * row->bubble, row->mem[TRAIN_PEAK] / 1048576);
    line_print_time(&out, (double)left * (before > 0 ? j->ms / (double)before : row->ms) / 1000);
    if (row->outlier != DT_OUTLIER_NONE)
        line_printf(&out, " | skipped: %s z-score %.2f (%lld so far)",
            row->outlier == DT_OUTLIER_LOSS ? "loss" : "norm", row->outlier_z,
            (long long)j->outliers);
    line_printf(&out, "\n");
    if (isfinite(row->val_loss)) on_eval(ctx, row, user);
    check_stdout(ctx, j);
}

/* The text that is generated. Every rank keeps it, to find the texts of --stop, and rank 0 prints
   it: as text with --tokenizer, as ids if the data is token shards, else as bytes. */
typedef struct generated {
    dt_ctx *ctx;
    int is_ids, prints, is_first;
    char *text; /* the text so far, of which `printed` bytes are printed */
    size_t bytes, capacity, printed;
    int stops; /* texts of --stop */
    char stop[MAX_STOPS][STOP_BYTES];
} generated;

/* Returns the offset of the first text of --stop in the text, or its length if there is none. */
static size_t find_stop(const generated *g) {
    size_t first = g->bytes;
    for (int i = 0; i < g->stops; i++) {
        const char *at = (const char *)memmem(
            g->text + g->printed, g->bytes - g->printed, g->stop[i], strlen(g->stop[i]));
        if (at && (size_t)(at - g->text) < first) first = (size_t)(at - g->text);
    }
    return first;
}

/* Returns how many bytes at the end of the text must wait: they may be the beginning of a text of
   --stop, or of a UTF-8 character. */
static size_t held_bytes(const generated *g) {
    size_t held = tok_incomplete((const unsigned char *)g->text, g->bytes);
    for (int i = 0; i < g->stops; i++)
        for (size_t n = strlen(g->stop[i]) - 1; n > held; n--)
            if (n <= g->bytes - g->printed && memcmp(g->text + g->bytes - n, g->stop[i], n) == 0)
                held = n;
    return held;
}

/* Prints the text up to `end`. On a terminal, control bytes are printed as \xNN; in a file or a
   pipe they are unchanged. */
static void print_generated(generated *g, size_t end) {
    line out = { .fd = 1 };
    if (g->prints && end > g->printed)
        line_add_text(&out, g->text + g->printed, end - g->printed, isatty(1) ? "\n\t" : NULL);
    if (out.used) flush_line(&out);
    g->printed = end > g->printed ? end : g->printed;
}

/* Receives each token (see gpt_sampling.stop). */
static int on_token(const int32_t *ids, int n, void *user) {
    generated *g = (generated *)user;
    const tok *t = tokenizer.tok;
    char byte = (char)ids[n - 1], number[24];
    const char *more = &byte;
    size_t bytes = 1;
    if (t) { /* a vocabulary may have gaps */
        const tok_token *k = tok_is_token(t, ids[n - 1]) ? &t->token[ids[n - 1]] : NULL;
        more = k ? (const char *)t->text + k->offset : NULL;
        bytes = k ? k->bytes : 0;
    } else if (g->is_ids) {
        bytes = (size_t)snprintf(number, sizeof number, "%s%d", g->is_first ? "" : " ", ids[n - 1]);
        more = number;
    }
    g->is_first = 0;
    if (g->bytes + bytes + 1 > g->capacity) {
        size_t capacity = 2 * (g->bytes + bytes) + 256;
        char *text = (char *)realloc(g->text, capacity);
        if (!text) return dt_fail(g->ctx, DT_ERR_MEM, "--generate: %zu bytes", capacity), 1;
        g->text = text;
        g->capacity = capacity;
    }
    if (bytes) memcpy(g->text + g->bytes, more, bytes);
    g->bytes += bytes;
    size_t stop = find_stop(g);
    if (stop < g->bytes) {
        print_generated(g, stop);
        g->bytes = stop;
        return 1;
    }
    print_generated(g, g->bytes - held_bytes(g));
    return 0;
}

/* Returns the tokens of --prompt, with space for `more` further ones, and sets *n to their number.
   Without a prompt, returns the token that a text begins after: a newline, the last id of the
   vocabulary (GPT-2's end of text) if the data is token shards, or tok_first_id with --tokenizer.
   The caller frees the tokens. */
static int32_t *prompt_tokens(const job *j, int vocab, int64_t more, int64_t *n) {
    const char *prompt = j->v[O_PROMPT].text;
    const tok *t = tokenizer.tok;
    size_t bytes = prompt ? strlen(prompt) : 0;
    const int32_t *ids = j->prompt;
    *n = prompt && t ? j->prompt_tokens : prompt ? (int64_t)bytes : 1;
    int32_t *all = (int32_t *)calloc((size_t)(*n + more), sizeof *all);
    if (!all) return NULL;
    for (int64_t i = 0; prompt && i < *n; i++) all[i] = t ? ids[i] : (unsigned char)prompt[i];
    if (!prompt) all[0] = t ? tok_first_id(t) : has_ids(&j->config) ? vocab - 1 : '\n';
    return all;
}

/* Samples n = --generate tokens from the model and prints them. All ranks sample the same tokens,
   and rank 0 prints them. */
static void generate(dt_ctx *ctx, gpt *model, const job *j) {
    const value *v = j->v;
    int quiet = v[O_QUIET].number != 0, ids_only = has_ids(&j->config);
    int n = int_of(v, O_GENERATE);
    int64_t given = 0;
    if (n == 0) return;
    generated *g = (generated *)calloc(1, sizeof *g);
    int32_t *ids = prompt_tokens(j, model->config.vocab, n, &given);
    if (ids && g) {
        *g = (generated){ .ctx = ctx, .is_ids = ids_only, .is_first = 1 };
        g->prints = dt_ctx_rank(ctx) == 0;
        for (const char *at = v[O_STOP].text; at; g->stops++)
            at = unescape(O_STOP, at, 1, g->stop[g->stops], STOP_BYTES);
        gpt_sampling how = { .temperature = v[O_TEMPERATURE].number,
            .top_k = int_of(v, O_SAMPLE_TOP_K),
            .top_p = v[O_TOP_P].number,
            .limit = tokenizer.tok ? tok_vocab(tokenizer.tok)
                     : ids_only    ? 0
                                   : 256,
            .seed = (uint64_t)v[O_SEED].number,
            .stop = on_token,
            .user = g };
        line out = { .fd = 1 };
        if (!quiet && g->prints) line_printf(&out, "---\n");
        gpt_generate(model, ids, (int)given, (int)given + n, how);
        if (dt_error(ctx) == DT_OK) print_generated(g, g->bytes);
        if (g->prints && (!quiet || ids_only)) line_printf(&out, "\n");
        if (g->prints && !quiet) line_printf(&out, "---\n");
    } else
        dt_fail(ctx, DT_ERR_MEM, "--generate %d", n);
    if (g) free(g->text);
    free(g);
    free(ids);
}

/* ---- checkpoints ---- */

/* If standard error is a terminal, prints a status line on it. The next status line overwrites this
   status line. */
static void show_progress(const job *j, const char *text) {
    char overwrite[64];
    int n = snprintf(overwrite, sizeof overwrite, "\r%-30s\r%s", "", text);
    if (isatty(2) && !j->v[O_QUIET].number) write_all(2, overwrite, (size_t)n);
}

static void on_save(dt_ctx *ctx, const char *path, void *user) {
    const job *j = (const job *)user;
    line out = { .fd = 1 };
    show_progress(j, "");
    if (!j->v[O_QUIET].number) line_printf(&out, "saved   %s\n", path);
    check_stdout(ctx, j);
}

static void on_progress(double done, void *user) {
    char text[32];
    snprintf(text, sizeof text, "saving  %3.0f%%", 100 * done);
    show_progress((const job *)user, text);
}

/* Opens the file of --log-csv and returns its descriptor. The log may be a regular file, a FIFO
   with a reader, or a character device. If the log is the file of standard output, duplicates the
   descriptor of standard output, so that both share one file offset. If `keep` is 0, removes all
   old rows; if `keep` is 1, leaves them for csv_rewind. Sets *is_stream (see job.csv_is_stream). */
static int open_log(const char *path, const char *header, int keep, int *is_stream) {
    struct stat st, out;
    int there = stat(path, &st) == 0, how = O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    int file = !there || S_ISREG(st.st_mode),
        same = there && fstat(1, &out) == 0 && same_file(path, &out);
    if (!file && !S_ISFIFO(st.st_mode) && !S_ISCHR(st.st_mode)) check_kind(O_LOG_CSV, path, A_FILE);
    int fd = same ? fcntl(1, F_DUPFD_CLOEXEC, 3)
                  : open(path, file ? how | O_RDWR | O_CREAT : how | O_WRONLY, 0666);
    if (fd < 0 && errno == ENXIO && there)
        refuse("--log-csv %s: %s without a reader", path, kind_of(st.st_mode));
    if (fd < 0 || fstat(fd, &st) != 0) refuse("--log-csv %s: %s", path, strerror(errno));
    *is_stream = same || !S_ISREG(st.st_mode);
    size_t length = strlen(header);
    char first[4096];
    ssize_t got = *is_stream || !keep ? 0 : pread(fd, first, length + 1, 0);
    if (got > 0 &&
        ((size_t)got <= length || memcmp(first, header, length) != 0 || first[length] != '\n'))
        refuse(
            "--log-csv %s: not a log with the columns of this version, and --resume would drop its "
            "rows; use another name",
            path);
    if (!*is_stream && !keep && ftruncate(fd, 0) != 0)
        refuse("--log-csv %s: %s", path, strerror(errno));
    if (*is_stream || !keep) {
        line row = { .fd = fd };
        line_printf(&row, "%s\n", header);
        if (row.error) refuse("--log-csv %s: %s", path, write_error_text(row.error));
    }
    return fd;
}

/* Keeps the log's rows up to `step`, the step from which the run resumes, and removes the rows of
   the later steps, which the run will repeat. If the row of any step up to `step` is missing,
   removes all rows. A log that cannot be read stays unchanged. */
static void csv_rewind(dt_ctx *ctx, const job *j, int64_t step) {
    char row[1024];
    off_t keep = 0;
    ssize_t got;
    int64_t last = -1; /* step of the last row to keep; 0: only the header; -1: nothing */
    if (j->csv_is_stream) return;
    while ((got = pread(j->csv, row, sizeof row - 1, keep)) > 0) {
        row[got] = 0;
        char *end = strchr(row, '\n');
        if (!end) break;
        *end = 0;
        int64_t at =
            last < 0 ? (strcmp(row, csv_header(&j->config)) == 0 ? 0 : -1) : strtoll(row, NULL, 10);
        if (at < 0 || (last > 0 && at != last + 1) || at > step) break;
        last = at;
        keep += end + 1 - row;
    }
    if (last != step) keep = 0;
    if (got < 0 || ftruncate(j->csv, keep) != 0 || lseek(j->csv, keep, SEEK_SET) != keep) {
        csv_failed(ctx, j, errno);
        return;
    }
    line out = { .fd = j->csv };
    if (keep == 0) line_printf(&out, "%s\n", csv_header(&j->config));
    if (out.error) csv_failed(ctx, j, out.error);
}

/* A resumed run must have the checkpoint's values of fixed_options. It may have other values of
   changeable_options, and then prints the old and the new value; print_changes prints what follows
   from some of them. */
static const int fixed_options[] = { O_ARCH, O_LAYERS, O_WIDTH, O_HEADS, O_KV_HEADS, O_FFN, O_VOCAB,
    O_TIE, O_EXPERTS, O_TOP_K, O_MOE_EVERY, O_SHARED_EXPERTS, O_CAPACITY, O_ROUTER_BIAS, O_SEED,
    O_OPTIMIZER, O_LORA, O_LORA_ALPHA, O_LORA_ON, O_BASE, O_DATA_MIX, O_DOCUMENTS, O_DOCUMENT_END };
static const int changeable_options[] = { O_DROPOUT, O_BALANCE_LOSS, O_Z_LOSS, O_BATCH, O_STEPS,
    O_LR, O_LR_SCHEDULE, O_WARMUP, O_LR_STEPS, O_MIN_LR_RATIO, O_BATCH_RAMP, O_WEIGHT_DECAY, O_CLIP,
    O_BETA1, O_BETA2, O_EPS, O_MOMENTUM, O_ADAMW_LR_SCALE, O_LABEL_SMOOTHING, O_FREEZE_STEPS,
    O_LOSS_SCALE, O_GRAD_DTYPE, O_REDUCE, O_TOKENIZER, O_EMA, O_SKIP_LOSS_Z, O_SKIP_NORM_Z,
    O_LORA_DROPOUT, O_EPOCHS, O_SEQ, O_DTYPE, O_SHUFFLE };

/* Returns 1 if option `id` has another value in `then`, the settings of a checkpoint; 0 if it has
   the same value or if the checkpoint does not know the option. Writes the checkpoint's value to
   `text`, which has room for `bytes` bytes. */
static int differs(const dt_json *then, const value *v, int id, char *text, size_t bytes) {
    int node = dt_json_find(then, 0, table[id].name), on = 0;
    double number = 0;
    const char *word = dt_json_string(then, node, NULL);
    if (dt_json_bool(then, node, &on)) number = on;
    if (word || node < 0 || dt_json_kind_of(then, node) == DT_JSON_NULL) {
        snprintf(text, bytes, "%s", word ? word : "not given");
        return node >= 0 && strcmp(word ? word : "", v[id].text ? v[id].text : "") != 0;
    }
    dt_json_number(then, node, &number);
    snprintf(text, bytes, "%.10g", number);
    if (table[id].kind == SWITCH) snprintf(text, bytes, "%s", on ? "on" : "off");
    return number != v[id].number;
}

/* Returns the first option, of fixed_options and --ema, with whose value in `then`, the settings of
   a checkpoint, the run cannot continue; -1 if there is none. Writes the checkpoint's value to `was`. */
static int changed_option(const dt_json *then, const value *v, char *was, size_t bytes) {
    for (size_t i = 0; i < sizeof fixed_options / sizeof *fixed_options; i++)
        if (differs(then, v, fixed_options[i], was, bytes)) return fixed_options[i];
    /* --ema may have another value, but may not begin or end */
    int other_ema = differs(then, v, O_EMA, was, bytes);
    return other_ema && (v[O_EMA].number == 0 || strcmp(was, "0") == 0) ? O_EMA : -1;
}

/* Compares source number i of --data with what a checkpoint says of it (print_sources): the source
   may have grown, but begins as it did. Returns 1 and writes the difference to `why` if not. */
static int source_differs(
    const dt_json *then, int node, int i, const train_files *f, char *why, size_t size) {
    int64_t bytes = 0, tokens = 0;
    const char *was = dt_json_string(then, dt_json_find(then, node, "digest"), NULL);
    char is[24], how[80];
    if (!was || !dt_json_int(then, dt_json_find(then, node, "bytes"), &bytes) ||
        !dt_json_int(then, dt_json_find(then, node, "tokens"), &tokens))
        return 0;
    int64_t read = bytes;
    snprintf(is, sizeof is, "%016llx", (unsigned long long)encode_source_digest(f, &read));
    if (read == bytes && strcmp(is, was) != 0)
        snprintf(how, sizeof how, "begins with other data than in the saved run");
    else if (!f->examples && f->tokens < tokens)
        snprintf(how, sizeof how, "had %lld tokens, and has %lld now", (long long)tokens,
            (long long)f->tokens);
    else
        return 0;
    snprintf(why, size,
        "source %d of --data, %s, %s: give the same files in the same order; they may have grown",
        i + 1, f->path[0], how);
    return 1;
}

/* Returns 1 if the sources or the tokenizer are not those of a checkpoint with the settings `then`,
   and writes the difference to `why`. Accepts a checkpoint that does not describe them. */
static int sources_differ(
    const dt_json *then, const value *v, const train_files *data, char *why, size_t size) {
    int list = dt_json_find(then, 0, "sources"), i = 0, text = 0;
    const char *was = dt_json_string(then, dt_json_find(then, 0, "tokenizer-digest"), NULL);
    const char *name = dt_json_string(then, dt_json_find(then, 0, "tokenizer"), NULL);
    char is[24] = "";
    int64_t fewer = 0, n = 0;
    if (list < 0 || !was || !data->count) return 0;
    for (const train_files *f = data; f; f = f->next) text |= !f->shards || *f->encoded;
    if (tokenizer.tok)
        snprintf(
            is, sizeof is, "%016llx", (unsigned long long)encode_tokenizer_digest(tokenizer.tok));
    if (text && strcmp(is, was) != 0) {
        snprintf(why, size, "the saved run had %s%s, and this run has %s%s: use the saved run's",
            *was ? "--tokenizer " : "no --tokenizer", *was && name ? name : "",
            *is ? "another one, --tokenizer " : "none", *is ? v[O_TOKENIZER].text : "");
        return 1;
    }
    for (const train_files *f = data; f && i < dt_json_count(then, list); f = f->next, i++) {
        if (f->examples) continue; /* their number of tokens depends on --seq */
        dt_json_int(then, dt_json_find(then, dt_json_at(then, list, i), "tokens"), &n);
        fewer += n - f->tokens;
    }
    if (fewer > 0) return 0; /* train() reports data that have shrunk */
    i = 0;
    for (const train_files *f = data; f && i < dt_json_count(then, list); f = f->next, i++)
        if (source_differs(then, dt_json_at(then, list, i), i, f, why, size)) return 1;
    return 0;
}

/* Writes why a run cannot continue from a checkpoint with the settings `then` to `why`, and returns
   1; returns 0 if it can. */
static int cannot_resume(
    const dt_json *then, const value *v, const train_files *data, char *why, size_t size) {
    char was[160], had[160];
    int other = changed_option(then, v, was, sizeof was);
    if (other < 0) return sources_differ(then, v, data, why, size);
    if (other == O_EMA) {
        int had_none = strcmp(was, "0") == 0;
        snprintf(why, size, "--ema was %s, and is %s now: %s; use --ema %s", was, v[O_EMA].text,
            had_none ? "the checkpoint has no EMA of the weights to continue"
                     : "the checkpoint's EMA of the weights would be lost",
            was);
        return 1;
    }
    int forgotten = other == O_VOCAB && !tokenizer.tok &&
                    differs(then, v, O_TOKENIZER, had, sizeof had) && strcmp(had, "not given") != 0;
    snprintf(why, size, "--%s was %s, and is %s now: that would be a different training run%s%s",
        table[other].name, was, v[other].text ? v[other].text : "not given",
        forgotten ? "; it had --tokenizer " : "", forgotten ? had : "");
    return 1;
}

/* Refuses the run if one of fixed_options has another value in the checkpoint of --resume, or if
   the data are not those of its run. This is checked before any rank starts; the ranks check later
   that the checkpoint is complete. */
static void check_resume(const value *v, const train_files *data) {
    const char *resume = v[O_RESUME].text;
    char path[4096], was[160], newest[64], why[512];
    size_t bytes = 0, length = 0;
    if (!resume) return;
    if (!check_kind(O_RESUME, resume, A_DIRECTORY)) {
        if (errno == ENOENT && v[O_SAVE].text && strcmp(resume, v[O_SAVE].text) == 0) return;
        refuse("--resume %s: %s", resume, strerror(errno));
    }
    snprintf(path, sizeof path, "%.3900s/manifest.json", resume);
    if (access(path, F_OK) != 0 &&
        dt_checkpoint_newest(dt_io_default(), resume, newest, sizeof newest) >= 0)
        snprintf(path, sizeof path, "%.3900s/%s/manifest.json", resume, newest);
    if (access(path, F_OK) != 0) return;
    dt_ctx *ctx = probe_ctx();
    char *text = dt_file_read(ctx, path, (size_t)1 << 28, &bytes);
    dt_json *manifest = text ? dt_json_parse(ctx, path, text, bytes) : NULL;
    const char *settings =
        manifest ? dt_json_string(manifest, dt_json_find(manifest, 0, "config"), &length) : NULL;
    dt_json *then = settings ? dt_json_parse(ctx, "its settings", settings, length) : NULL;
    if (then && cannot_resume(then, v, data, why, sizeof why))
        refuse("--resume %s: %s", resume, why);
    if (then && differs(then, v, O_SEQ, was, sizeof was) && int_of(v, O_ARCH) == GPT_GPT2 &&
        int_of(v, O_SEQ) < atoi(was))
        refuse(
            "--resume %s: --seq was %s, and is %d now: a GPT-2 with %s positions would lose some "
            "of them; use --seq %s or more",
            resume, was, int_of(v, O_SEQ), was, was);
    dt_json_free(then);
    dt_json_free(manifest);
    if (text) dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
    dt_ctx_free(ctx);
}

/* Prints what other values of --seq, --dtype and --shuffle and more data mean for a resumed run. */
static void print_changes(const value *v, const dt_json *then, const train_position *at) {
    char was[160];
    line out = { .fd = 1 };
    int seq = differs(then, v, O_SEQ, was, sizeof was), grown = at->tokens != at->tokens_then;
    int shuffled = differs(then, v, O_SHUFFLE, was, sizeof was);
    int other = differs(then, v, O_DTYPE, was, sizeof was);
    int was_16 = strcmp(was, "bf16") == 0 || strcmp(was, "f16") == 0;
    int is_16 = strcmp(v[O_DTYPE].text, "bf16") == 0 || strcmp(v[O_DTYPE].text, "f16") == 0;
    if (seq && int_of(v, O_ARCH) == GPT_GPT2)
        line_printf(&out,
            "        positions %d to %d of wpe begin at random, their optimizer state at 0\n",
            at->seq_then, int_of(v, O_SEQ) - 1);
    if (other)
        line_printf(&out,
            "        parameters are the nearest %s of the checkpoint's %s, as is optimizer "
            "state%s\n",
            v[O_DTYPE].text, was_16 ? "f32 master weights" : "parameters",
            is_16 && !was_16 ? "; f32 master weights begin from the parameters" : "");
    if (grown)
        line_printf(&out, "        the data had %lld tokens, and has %lld from here on\n",
            (long long)at->tokens_then, (long long)at->tokens);
    if (seq || grown || shuffled)
        line_printf(&out,
            "        the run continues at sequence %lld of %lld (from 0) in epoch %lld%s\n",
            (long long)(at->consumed % at->sequences), (long long)at->sequences,
            (long long)(at->consumed / at->sequences),
            shuffled ? ", in the new order: this epoch may read some sequences twice" : "");
}

static void on_resume(dt_ctx *ctx, int64_t step, const char *path, const char *settings,
    const train_position *at, void *user) {
    const job *j = (const job *)user;
    char was[160], why[512];
    int first = dt_ctx_rank(ctx) == 0;
    line out = { .fd = 1 };
    if (j->csv >= 0 && first) csv_rewind(ctx, j, step);
    if (step == 0) return;
    dt_json *then = dt_json_parse(ctx, "its settings", settings, strlen(settings));
    if (then && cannot_resume(then, j->v, &j->config.data, why, sizeof why))
        dt_fail(ctx, DT_ERR_ARG, "%s: %s", path, why);
    if (first && dt_error(ctx) == DT_OK && !j->v[O_QUIET].number)
        line_printf(&out, "resumed %s   step %lld of %s%s\n", path, (long long)step,
            j->v[O_STEPS].text,
            j->config.stop_at == 0      ? ": trains nothing"
            : step >= j->config.stop_at ? ": all steps are done"
                                        : "");
    for (size_t i = 0; first && dt_error(ctx) == DT_OK && j->config.stop_at > 0 &&
                       i < sizeof changeable_options / sizeof *changeable_options;
         i++)
        if (differs(then, j->v, changeable_options[i], was, sizeof was) && !j->v[O_QUIET].number)
            line_printf(&out, "        --%s was %s, and is %s from here on\n",
                table[changeable_options[i]].name, was,
                j->v[changeable_options[i]].text ? j->v[changeable_options[i]].text : "not given");
    if (first && then && dt_error(ctx) == DT_OK && !j->v[O_QUIET].number)
        print_changes(j->v, then, at);
    dt_json_free(then);
}

/* Copies the tokenizer that was used into the folder of --save-model, so that the folder is
   complete. */
static void copy_tokenizer(dt_ctx *ctx, const value *v) {
    char path[4096];
    size_t bytes = 0;
    if (!tokenizer_copy(v, path, sizeof path)) return;
    char *text = dt_file_read(ctx, v[O_TOKENIZER].text, TOK_MAX_FILE, &bytes);
    if (!text) return;
    dt_file_write(ctx, path, text, bytes);
    dt_free(ctx, DT_MEM_HOST, text, bytes + 1);
}

static void at_end(dt_ctx *ctx, gpt *model, void *user) {
    const job *j = (const job *)user;
    line out = { .fd = 1 };
    if (dt_ctx_rank(ctx) == 0) copy_tokenizer(ctx, j->v);
    generate(ctx, model, j);
    if (dt_ctx_rank(ctx) != 0) return;
    int64_t later = j->steps - 1; /* number of steps after the first; only rank 0 counts steps */
    if (!j->v[O_QUIET].number && later > 0)
        line_printf(&out,
            "average %.1f ms per step, %.0f tok/s, over %lld steps (without the first)\n",
            j->ms / (double)later, j->tokens / (j->ms / 1000), (long long)later);
}

/* Each rank may have its own values of per_rank_options. An option in presence_options must be
   given on all ranks or on none, but its values may differ. All ranks must have the same values of
   all other options. */
static const int per_rank_options[] = { O_DATA, O_TOKEN_CACHE, O_READ_AHEAD, O_RANK, O_RENDEZVOUS,
    O_TOKEN_FILE, O_TIMEOUT, O_OFFLOAD_OPTIM, O_OFFLOAD_PARAMS, O_MEM_LIMIT, O_LINK_LATENCY,
    O_LINK_BANDWIDTH, O_LOG_CSV, O_QUIET, O_PEAK_TFLOPS, O_CONFIG };
static const int presence_options[] = { O_VAL, O_MODEL, O_ADAPTER, O_TOKENIZER, O_SCHEDULE_SVG,
    O_SCHEDULE_TEXT, O_SAVE, O_RESUME, O_SAVE_MODEL, O_TRACE };

static int is_among(int id, const int *list, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (list[i] == id) return 1;
    return 0;
}

static uint32_t option_digest(const value *v, int id) {
    /* FNV-1a hash of a TEXT option's text, but of any other option's number, so that 1e-2 and 0.01
       have the same hash */
    uint32_t h = v[id].text ? 2166136261u : 1;
    const char *p = table[id].kind == TEXT ? v[id].text : (const char *)&v[id].number;
    if (is_among(id, per_rank_options, sizeof per_rank_options / sizeof per_rank_options[0]))
        return 0;
    if (!v[id].text ||
        is_among(id, presence_options, sizeof presence_options / sizeof presence_options[0]))
        return h;
    for (size_t i = 0, n = table[id].kind == TEXT ? strlen(p) : sizeof(double); i < n; i++)
        h = (h ^ (unsigned char)p[i]) * 16777619u;
    return h;
}

/* [collective: world] Called if the ranks were started separately, so that each rank has its own
   command line. Fails on every rank whose options or whose number of data tokens differ from those
   of rank 0, because the ranks would not train the same model. */
static dt_status compare_options(dt_ctx *ctx, const job *j) {
    enum { DIGESTS = N_OPTIONS + 1 };
    int n = dt_comm_size(dt_world(ctx));
    uint32_t *all = (uint32_t *)calloc((size_t)(n + 1) * DIGESTS, sizeof *all),
             *mine = all + (size_t)n * DIGESTS;
    if (!all) return dt_fail(ctx, DT_ERR_MEM, "the options of %d ranks", n);
    for (int i = 0; i < N_OPTIONS; i++) mine[i] = option_digest(j->v, i);
    mine[N_OPTIONS] = (uint32_t)all_tokens(&j->config.data);
    dt_all_gather(dt_world(ctx), mine, all, DIGESTS, DT_I32);
    for (int i = 0; i < DIGESTS && dt_error(ctx) == DT_OK; i++) {
        const char *text = i < N_OPTIONS ? j->v[i].text : NULL;
        if (all[i] == mine[i]) continue;
        if (i == N_OPTIONS)
            dt_fail(ctx, DT_ERR_ARG,
                "--data has %lld tokens here, and a different number on rank 0",
                (long long)all_tokens(&j->config.data));
        else
            dt_fail(ctx, DT_ERR_ARG,
                "--%s%s%s here, but rank 0 has another value: give all ranks the same options",
                table[i].name, text ? " " : "", text ? text : " is not given");
    }
    free(all);
    return dt_error(ctx);
}

static dt_status rank_main(dt_ctx *ctx, void *user) {
    job *j = (job *)user;
    if ((launched.size || is_tcp(j->v)) && compare_options(ctx, j) != DT_OK) return dt_error(ctx);
    return train(ctx, &j->config);
}

/* SIGUSR1 (kill -USR1) sets this flag, which asks dt_run to print the table of dt_ranks_text. For
   each rank the table says in which operation the rank waits, or which operation it finished
   last. */
static int report_requested;
static void on_sigusr1(int number) {
    (void)number;
    __atomic_store_n(&report_requested, 1, __ATOMIC_RELAXED);
}

/* Handles SIGTERM if --save is given: the run finishes the step, saves and ends. A second SIGTERM
   ends the program at once. */
static void on_sigterm(int number) {
    static const char text[] =
        "SIGTERM: finishing the step and saving; a second SIGTERM ends the program at once\n";
    struct pollfd to = { 2, POLLOUT, 0 };
    int reason = errno;
    (void)number;
    /* poll makes sure that the write does not block */
    if (__atomic_exchange_n(launched.stop_requested, 1, __ATOMIC_RELAXED) == 0 &&
        prints_messages() && poll(&to, 1, 0) > 0)
        number = (int)write(2, text, sizeof text - 1);
    errno = reason;
}

static void install_signal_handlers(job *j) {
    struct sigaction act;
    memset(&act, 0, sizeof act);
    act.sa_handler = on_sigusr1;
    act.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &act, NULL);
    if (!j->config.save) return;
    act.sa_handler = on_sigterm;
    act.sa_flags = (int)(SA_RESTART | SA_RESETHAND);
    sigaction(SIGTERM, &act, NULL);
    j->config.stop = launched.stop_requested;
}

static dt_status run_once(job *j, dt_report *report, const dt_host *host) {
    static const dt_backend backends[] = { DT_BACKEND_THREADS, DT_BACKEND_PROCS, DT_BACKEND_TCP };
    dt_backend backend = is_nccl(j->v)   ? DT_BACKEND_NCCL
                         : launched.size ? DT_BACKEND_MPI
                                         : backends[int_of(j->v, O_BACKEND)];
    return dt_run(
        (dt_run_desc){ .ranks = int_of(j->v, O_RANKS),
            .backend = backend,
            .timeout_s = j->v[O_TIMEOUT].number,
            .seed = (uint64_t)j->v[O_SEED].number,
            .host = host,
            .kernels = kernels_of(j->v),
            .report = report,
            .rank = launched.rank,
            .rendezvous = j->v[O_RENDEZVOUS].text,
            .link = { j->v[O_LINK_LATENCY].number / 1e3, j->v[O_LINK_BANDWIDTH].number * 1e6 },
            .mem_limit = (size_t)j->v[O_MEM_LIMIT].number,
            .read_fault_env = j->attempt == 0,
            .status_request = &report_requested },
        rank_main, j);
}

/* Elastic restart. Reduces dp by 1, or by more until --batch, --batch-ramp and --shard-group divide
   evenly over the remaining replicas, and the experts over the remaining ranks. Changes nothing if
   --min-ranks is not given, or if fewer ranks than --min-ranks would remain. */
static void drop_replicas(job *j) {
    train_config *c = &j->config;
    int ep = c->mesh.expert_tp ? 1 : c->mesh.ep, per = c->mesh.tp * c->mesh.cp * c->mesh.pp * ep,
        dp = c->mesh.dp - 1;
    int64_t B = long_of(j->v, O_BATCH);
    if (!j->v[O_MIN_RANKS].text) return;
    for (; dp >= 1 && dp * per >= int_of(j->v, O_MIN_RANKS); dp--) {
        int64_t one = (int64_t)c->micro_batch * dp * ep;
        int group = c->zero.shard_group;
        int ramps = !c->ramp.samples || (c->ramp.start % one == 0 && c->ramp.incr % one == 0);
        char why[256];
        dt_mesh_desc fewer = c->mesh;
        fewer.dp = dp;
        if (B % one != 0 || !ramps || (group && dp * ep * c->mesh.cp % group != 0) ||
            dt_mesh_resolve(&fewer, dp * per, why, sizeof why) != DT_OK)
            continue;
        c->mesh.dp = dp;
        c->accum = (int)(B / one);
        compute((value *)&j->v[O_DP], dp);
        compute((value *)&j->v[O_ACCUM], c->accum);
        compute((value *)&j->v[O_RANKS], (int64_t)dp * per);
        return;
    }
}

/* Returns 1 if the ranks should restart after this failure, and prepares the restart; else returns
   0. */
static int should_restart(job *j, const dt_report *report) {
    if (j->attempt >= int_of(j->v, O_MAX_RESTARTS) || get_flag(launched.stop_requested)) return 0;
    if (report->status == DT_ERR_IO && get_flag(launched.stdout_error)) return 0;
    if (!restart_may_help(report, get_flag(launched.made_step))) return 0;
    set_flag(launched.made_step, 0);
    drop_replicas(j);
    j->attempt++;
    j->config.restarted = 1;
    print_error("restart %d of %s with %s ranks, after: %s\n", j->attempt,
        j->v[O_MAX_RESTARTS].text, j->v[O_RANKS].text, report->text);
    return 1;
}

/* Prints the last lines of a successful run. */
static void print_end(const job *j, int stopped) {
    line out = { .fd = 1 };
    if (stopped)
        line_printf(&out, "stopped by SIGTERM; --resume %s continues the run\n", j->config.save);
    if (j->csv >= 0) line_printf(&out, "log     %s\n", j->v[O_LOG_CSV].text);
    if (j->config.trace) line_printf(&out, "trace   %s\n", j->config.trace);
    if (j->config.svg && access(j->config.svg, F_OK) == 0)
        line_printf(&out, "drawn   %s\n", j->config.svg);
    if (j->v[O_SAVE_MODEL].text && !stopped)
        line_printf(&out, "model   %s\n", j->v[O_SAVE_MODEL].text);
}

/* Returns the exit status: 1 if a write to standard output has failed, and then also prints an
   error; else `status`. */
static int exit_status(const job *j, int status) {
    const char *save = j && get_flag(launched.stop_requested) ? j->config.save : NULL;
    if (!get_flag(launched.stdout_error)) return status;
    print_error("error: rank 0: standard output: %s%s%s%s\n",
        write_error_text(get_flag(launched.stdout_error)), save ? "; --resume " : "",
        save ? save : "", save ? " continues the run" : "");
    return 1;
}

static int run(job *j) {
    dt_report report = { .status = DT_OK };
    dt_host host = *dt_host_default();
    host.log = is_tcp(j->v) ? log_without_errors : log_first_error;
    /* With --max-restarts, no failure is printed before should_restart has decided. */
    if (int_of(j->v, O_MAX_RESTARTS)) host.log = log_without_errors;
    install_signal_handlers(j);
    dt_status status = run_once(j, &report, &host);
    while (status != DT_OK && !report.left_behind && should_restart(j, &report))
        status = run_once(j, &report, &host);
    if (report.left_behind) { /* a rank's thread did not end and still uses *j */
        if (!get_flag(launched.failure_printed)) print_error("error: %s\n", report.text);
        _exit(1);
    }
    /* with --backend mpi, the rank that detected the failure has printed the error */
    int printed = status != DT_OK && (launched.size || get_flag(launched.failure_printed));
    if (j->csv >= 0 && close(j->csv) != 0 && status == DT_OK) {
        status = DT_ERR_IO;
        snprintf(report.text, sizeof report.text, "rank 0: --log-csv %s: %s", j->v[O_LOG_CSV].text,
            strerror(errno));
    }
    /* Rank 0 prints the error. With tcp and nccl two kinds of other ranks print the error too: the
       failed rank, because rank 0 may have ended, and every rank that a user started with --rank,
       because each of these ranks may have its own terminal. */
    if (status != DT_OK) {
        int by_hand = j->v[O_RANK].from >= GIVEN;
        int prints = prints_messages() ||
                     (is_tcp(j->v) && (by_hand || report.rank < 0 || report.rank == launched.rank));
        let_rank_0_print_first();
        if (prints && !printed) print_error("error: %s\n", report.text);
        return 1;
    }
    int stopped = get_flag(launched.stop_requested);
    if (prints_messages() && !j->v[O_QUIET].number) print_end(j, stopped);
    return exit_status(j, stopped ? 128 + SIGTERM : 0);
}

// ==== 10. Dry run ===============================================================================

/* Prints the n ranks of the group to which `rank` belongs along one axis. Two consecutive ranks of
   the group differ by `stride`. */
static void print_group(line *out, int rank, int n, int stride) {
    char text[64] = "";
    int first = rank - rank / stride % n * stride, used = 0;
    for (int i = 0; i < n && used < 40; i++)
        used += snprintf(
            text + used, sizeof text - (size_t)used, "%s%d", i ? " " : "", first + i * stride);
    line_printf(out, "  %-20s", used >= 40 ? strcpy(text + 37, "..") - 37 : text);
}

enum { MAP_ROWS = 64 };

/* The axes of the map, in order of their strides. With expert folding, ep and etp (expert_tp)
   arrange the ranks of a stage anew. */
enum { MAP_TP, MAP_CP, MAP_EP, MAP_DP, MAP_PP, MAP_EXPERT_TP, MAP_AXES };

static void print_map(const train_config *c, int ranks) {
    static const char *const names[MAP_AXES] = { "tp", "cp", "ep", "dp", "pp", "etp" };
    const dt_mesh_desc *m = &c->mesh;
    line out = { .fd = 1 };
    int folded = m->expert_tp > 0, ep = folded ? 1 : m->ep;
    int n[MAP_AXES] = { m->tp, m->cp, m->ep, m->dp, m->pp, folded ? m->expert_tp : 1 };
    int stride[MAP_AXES] = { 1, m->tp, folded ? m->expert_tp : m->tp * m->cp, m->tp * m->cp * ep,
        m->tp * m->cp * ep * m->dp, 1 };
    int shown[MAP_AXES], a;
    for (a = 0; a < MAP_AXES; a++) shown[a] = n[a] > 1 || a < MAP_EP || a == MAP_DP;
    line_printf(&out, "rank ");
    for (a = MAP_AXES - 1; a >= 0; a--)
        if (shown[a]) line_printf(&out, " %s", names[a]);
    for (a = 0; a < MAP_AXES; a++)
        if (n[a] > 1) line_printf(&out, "  %s with%-*s", names[a], 15 - (int)strlen(names[a]), "");
    line_printf(&out, "\n");
    for (int r = 0; r < ranks && r < MAP_ROWS; r++) {
        line_printf(&out, "%4d ", r);
        for (a = MAP_AXES - 1; a >= 0; a--)
            if (shown[a]) line_printf(&out, "%*d", 1 + (int)strlen(names[a]), r / stride[a] % n[a]);
        for (a = 0; a < MAP_AXES; a++)
            if (n[a] > 1) print_group(&out, r, n[a], stride[a]);
        line_printf(&out, "\n");
    }
    if (ranks > MAP_ROWS && folded)
        line_printf(
            &out, " ... rank = ((pp * %d + dp) * %d + cp) * %d + tp\n", m->dp, m->cp, m->tp);
    else if (ranks > MAP_ROWS)
        line_printf(&out, " ... rank = (((pp * %d + dp) * %d + ep) * %d + cp) * %d + tp\n", m->dp,
            m->ep, m->cp, m->tp);
}

static void on_dry_step(dt_ctx *ctx, const train_row *row, void *user) {
    (void)ctx, (void)row, (void)user;
}

/* The results of a dry run. */
typedef struct dry_figures {
    /* each value is the largest of all ranks' values and of both steps */
    double mem[TRAIN_MEMS], sent[DT_AXES];
    train_footprint footprint; /* the memory of rank number `rank` */
    int rank;     /* the rank that failed; if none failed, the rank with the largest memory peak */
    double flops; /* FLOPs per step of the rank that computes the most */
    dt_report report;
} dry_figures;

static void no_log(void *user, int level, int rank, const char *text) {
    (void)user, (void)level, (void)rank, (void)text;
}

/* Returns 1 if a dry run gives every expert of every rank equally many tokens: it routes choice j
   of token t to expert (k t + j) mod E, and a rank of cp has one or two pieces of a sequence. */
static int is_even_routing(const train_config *c) {
    int64_t pieces = 2 * (int64_t)c->mesh.cp * c->mesh.tp, T = c->seq ? c->seq : c->model.seq;
    int64_t k = c->model.top_k ? c->model.top_k : 1;
    int drops = c->model.capacity > 0 && c->model.capacity < 1;
    return !c->model.experts ||
           (!drops && T % pieces == 0 && T / pieces * k % c->model.experts == 0);
}

/* Returns the number of the next kind of rank in a pipeline stage after rank `kind` of the stage
   (-1: the first), or -1 if there is none. The ranks of a stage differ in the part of a sequence
   that they have (cp), because of causal attention, and if the routing is not even also in their
   place among the ranks that share the experts. If `each` is 1, every rank is a kind. */
static int next_kind(const train_config *c, int kind, int each) {
    const dt_mesh_desc *m = &c->mesh;
    int even = is_even_routing(c), stage = m->tp * m->cp * m->dp * (m->expert_tp ? 1 : m->ep);
    int end = each || (!even && m->expert_tp) ? stage : even ? m->tp * m->cp : stage / m->dp;
    int next = kind < 0 ? 0 : kind + (even && !each ? m->tp : 1);
    return next < end ? next : -1;
}

/* Returns the results of a dry run with the settings c. The dry run has two steps, because the
   second step allocates all that later steps need. Of each pipeline stage one rank of each kind
   runs, as a thread, and stands for the others (dt_run_desc.present); Muon needs all ranks.
   `limit` is the memory limit of a rank in bytes; 0 means no limit. If `all` is not NULL, each rank
   runs once, and its footprint is written there. */
static dry_figures run_dry(const job *j, train_config c, double limit, train_footprint *all) {
    enum { STEPS = 2 };
    int ranks = int_of(j->v, O_RANKS), at_once = c.zero.optimizer == DT_MUON, each = all != NULL;
    dry_figures f = { .rank = 0 };
    dt_dry *counts = (dt_dry *)calloc((size_t)ranks, sizeof *counts);
    train_footprint *footprint = (train_footprint *)calloc((size_t)ranks, sizeof *footprint);
    if (!counts || !footprint) refuse("a dry run: out of memory");
    for (int r = 0; r < ranks; r++) counts[r].forked = strcmp(j->v[O_BACKEND].text, "procs") == 0;
    c.dry = counts;
    c.footprint = footprint;
    c.weights = c.adapter = c.trace = c.save = c.resume = c.export_to = NULL;
    c.stop_at = STEPS;
    c.ramp.samples = 0; /* without the batch ramp, every step has the full (largest) batch */
    memset(&c.val, 0, sizeof c.val);
    c.on_step = on_dry_step;
    c.at_end = NULL;
    dt_host host = *dt_host_default();
    host.log = no_log;
    for (int kind = next_kind(&c, -1, each); kind >= 0 && f.report.status == DT_OK;
         kind = at_once ? -1 : next_kind(&c, kind, each))
        dt_run((dt_run_desc){ .ranks = ranks,
                   .timeout_s = j->v[O_TIMEOUT].number,
                   .host = &host,
                   .kernels = kernels_of(j->v),
                   .report = &f.report,
                   .rank = kind,
                   .present = at_once ? 0 : c.mesh.pp,
                   .mem_limit = (size_t)limit },
            train, &c);
    for (int r = 0; r < ranks; r++) {
        const train_footprint *n = &footprint[r];
        f.flops = fmax(f.flops, counts[r].flops / STEPS);
        for (int m = 0; m < TRAIN_MEMS; m++) f.mem[m] = fmax(f.mem[m], n->mem[m]);
        for (int a = 0; a < DT_AXES; a++) f.sent[a] = fmax(f.sent[a], n->sent[a]);
        if (n->memory.peak_total > footprint[f.rank].memory.peak_total) f.rank = r;
    }
    if (f.report.status != DT_OK && f.report.rank >= 0) f.rank = f.report.rank;
    f.footprint = footprint[f.rank];
    if (all) memcpy(all, footprint, (size_t)ranks * sizeof *all);
    free(counts);
    free(footprint);
    return f;
}

static const char *const memory_classes[DT_MEM_CLASSES] = { "params", "grads", "optim", "acts",
    "comm", "host", "temp" };

/* Prints the bytes of each memory class on one rank. Beside them prints, for the classes that have
   a formula, the bytes that the formula predicts. */
static void print_memory(int fd, const train_footprint *n) {
    line out = { .fd = fd };
    const dt_memory *m = &n->memory;
    int formula = n->kind[0].shard_ranks > 0, experts = n->kind[1].params > 0;
    line_printf(&out, "  %-12s%16s%16s", "class", "live", "peak");
    if (formula)
        line_printf(&out, "%16s   P = %lld parameters, padded by bucket to %lld x %d: %lld",
            "formula", (long long)n->kind[0].params, (long long)n->kind[0].shard_ranks, DT_PIECE,
            (long long)n->kind[0].padded);
    if (experts)
        line_printf(&out, "; Q = %lld of experts, to %lld x %d: %lld", (long long)n->kind[1].params,
            (long long)n->kind[1].shard_ranks, DT_PIECE, (long long)n->kind[1].padded);
    line_printf(&out, "\n");
    for (int i = 0; i < DT_MEM_CLASSES; i++) {
        line_printf(&out, "  %-12s%16zu%16zu", memory_classes[i], m->live[i], m->peak[i]);
        for (int k = 0; k < 1 + experts && formula && i <= DT_MEM_OPTIM; k++) {
            if (k == 0)
                line_printf(&out, "%16.0f   %d P", n->formula[i], n->bytes[i]);
            else
                line_printf(&out, " + %d Q", n->bytes[i]);
            if (n->sharded[i] && n->kind[k].shard_ranks > 1)
                line_printf(&out, " / %d", n->kind[k].shard_ranks);
        }
        if (formula && i == DT_MEM_GRADS && n->tree_levels > 0)
            line_printf(&out, " + %.0f for the levels of the tree", n->tree_levels);
        if (formula && i == DT_MEM_OPTIM && n->one_state > 0)
            line_printf(&out, " - %.0f, as matrices have one state", n->one_state);
        line_printf(&out, "\n");
    }
    line_printf(&out, "  %-12s%16zu%16zu\n", "all at once", m->live_total, m->peak_total);
}

static int dry_run(job *j) {
    static const char *const axes[DT_AXES] = { "dp", "tp", "cp", "pp", "ep" };
    static const char *const classes[TRAIN_MEMS] = { "params", "grads", "optim", "acts", "comm",
        "all at once" };
    if ((launched.size || is_tcp(j->v)) && j->v[O_BACKEND].from < GIVEN)
        refuse("--dry-run needs only one process: start it without %s", launched.launcher.launcher);
    if (launched.size || is_tcp(j->v))
        refuse("--dry-run needs only one process: leave --backend %s out", j->v[O_BACKEND].text);
    dry_figures f = run_dry(j, j->config, 0, NULL);
    line out = { .fd = 1 };
    if (f.report.status != DT_OK) {
        print_error("error: %s\n", f.report.text);
        return 1;
    }
    print_map(&j->config, int_of(j->v, O_RANKS));
    line_printf(&out, "\n");
    line_printf(&out, "per rank and step, the largest over the ranks\n");
    line_printf(&out, "  sends, bytes ");
    for (int a = 0; a < DT_AXES; a++) line_printf(&out, "  %s %.0f", axes[a], f.sent[a]);
    line_printf(&out, "\n");
    line_printf(&out, "  needs, bytes ");
    for (int m = 0; m < TRAIN_MEMS; m++) line_printf(&out, "  %s %.0f", classes[m], f.mem[m]);
    line_printf(&out, "\n");
    line_printf(&out, "  computes      %.4g GFLOP in products\n", f.flops / 1e9);
    line_printf(&out, "\n");
    line_printf(
        &out, "bytes of rank %d, which needs the most: live at the end, peak of the run\n", f.rank);
    print_memory(1, &f.footprint);
    return 0;
}

// ==== 11. Memory limit ==========================================================================

/* The search for settings that fit into --mem-limit. */
typedef struct advice {
    const job *j;
    double limit, min_peak;  /* in bytes; min_peak is the smallest peak above the limit */
    char min_peak_text[256]; /* the options of the setting that has this peak */
    int tried, fit;          /* number of settings tried, and of those that fit into the limit */
    int stage;               /* the highest ZeRO stage tried so far */
} advice;

/* Writes the options in which the settings c differ from the job's settings, in the form that they
   have on the command line. */
static void setting_text(const job *j, const train_config *c, char *text, size_t bytes) {
    const train_config *now = &j->config;
    char zero[24] = "", micro[64] = "";
    if (c->zero.stage != now->zero.stage) snprintf(zero, sizeof zero, " --zero %d", c->zero.stage);
    if (c->micro_batch != now->micro_batch)
        snprintf(micro, sizeof micro, " --micro-batch %d --accum %d", c->micro_batch, c->accum);
    snprintf(text, bytes, "%s%s%s%s%s", zero,
        c->model.recompute != now->model.recompute ? " --recompute full" : "", micro,
        c->zero.offload_optim != now->zero.offload_optim ? " --offload-optim DIR" : "",
        c->zero.offload_params != now->zero.offload_params ? " --offload-params DIR" : "");
}

/* Does a dry run with the settings c, and prints these settings if they fit into the limit. Does
   not count settings whose dry run fails, because this build cannot run them. */
static void try_setting(advice *a, train_config c) {
    char text[256];
    dry_figures f = run_dry(a->j, c, 0, NULL);
    double peak = (double)f.footprint.memory.peak_total;
    if (f.report.status != DT_OK) return;
    a->tried++;
    if (c.zero.stage > a->stage) a->stage = c.zero.stage;
    setting_text(a->j, &c, text, sizeof text);
    if (peak <= a->limit) {
        print_error("  %.0f bytes per rank with%s\n", peak, text);
        a->fit++;
    } else if (a->tried - a->fit == 1 || peak < a->min_peak) {
        a->min_peak = peak;
        memcpy(a->min_peak_text, text, sizeof text);
    }
}

/* Tries at most 12 settings, in this order: higher ZeRO stages, full recompute, smaller
   micro-batches, offload to disk. */
static void try_settings(advice *a) {
    const train_config *now = &a->j->config;
    train_config c = *now;
    int smaller = (int)largest_divisor(now->micro_batch, now->micro_batch / 2);
    for (c.zero.stage = now->zero.stage + 1; c.zero.stage <= 3; c.zero.stage++) try_setting(a, c);
    c.model.recompute = GPT_RECOMPUTE_FULL;
    for (c.zero.stage = now->zero.stage; c.zero.stage <= a->stage; c.zero.stage++)
        if (now->model.recompute != GPT_RECOMPUTE_FULL) try_setting(a, c);
    c.zero.stage = a->stage;
    for (; smaller < c.micro_batch; smaller = 1) {
        c.accum = (int)((int64_t)now->accum * now->micro_batch / smaller);
        c.micro_batch = smaller;
        c.model.recompute = now->model.recompute;
        if (smaller == 1) try_setting(a, c);
        c.model.recompute = GPT_RECOMPUTE_FULL;
        if (smaller > 1 || now->model.recompute != GPT_RECOMPUTE_FULL) try_setting(a, c);
    }
    c.zero.offload_optim = "."; /* a dry run writes nothing */
    try_setting(a, c);
    c.zero.offload_params = ".";
    try_setting(a, c);
}

/* Checks --mem-limit before any rank starts, by a dry run of two steps. If the run does not fit
   into the limit, prints settings that would fit, and ends the program. */
static void check_mem_limit(const job *j) {
    const char *text = j->v[O_MEM_LIMIT].text;
    advice a = { .j = j, .limit = j->v[O_MEM_LIMIT].number, .stage = j->config.zero.stage };
    dry_figures f = run_dry(j, j->config, a.limit, NULL);
    /* the run fits into the limit, or fails for another reason, which the run will report later */
    if (f.report.status != DT_ERR_MEM) return;
    if (!prints_messages()) refuse("--mem-limit %s: %s", text, f.report.text);
    print_error("error: --mem-limit %s: %s\n", text, f.report.text);
    print_error("bytes of rank %d at that time\n", f.rank);
    print_memory(2, &f.footprint);
    f = run_dry(j, j->config, 0, NULL);
    print_error(
        "These settings need %zu bytes per rank. With the options of one of these lines they "
        "would fit:\n",
        f.footprint.memory.peak_total);
    try_settings(&a);
    if (a.fit == 0) print_error("  none of the %d settings that were tried\n", a.tried);
    if (a.fit == 0 && a.tried > 0)
        print_error("The smallest setting that was tried needs %.0f bytes per rank, with%s.\n",
            a.min_peak, a.min_peak_text);
    exit(2);
}

// ==== 12. Preparation ===========================================================================

/* With --backend mpi, initializes MPI and sets launched.rank and launched.size. dt_run would
   initialize MPI too late, because the checks before dt_run need the rank. */
static void begin_mpi(const value *v, int *argc, char ***argv) {
#ifdef DT_USE_MPI
    int level;
    if (strcmp(v[O_BACKEND].text, "mpi") != 0) return;
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &launched.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &launched.size);
#else
    (void)v, (void)argc, (void)argv;
#endif
}

/* Finalizes MPI, except after a failure, because MPI_Finalize would wait for a lost rank. Returns
   the exit status `failed`. */
static int end_mpi(int failed) {
#ifdef DT_USE_MPI
    if (launched.size && !failed) MPI_Finalize();
#endif
    return failed;
}

/* Opens /dev/null on each of the descriptors 0 to 2 that is closed. Otherwise a file that is opened
   later would become standard output or standard error. */
static void open_standard(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) _exit(2);
}

/* Prepares the process. Ignores SIGPIPE and SIGXFSZ, so that a write to a closed pipe or beyond the
   file-size limit fails with an errno instead of ending the process. */
static void init_process(void) {
    open_standard();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    make_flags();
}

/* Finds the data, and checks all that can be checked before any rank starts. Opens the log and
   prints the settings. */
static void prepare(job *j) {
    const value *v = j->v;
    j->config.on_step = on_step;
    j->config.on_eval = on_eval;
    j->config.at_end = at_end;
    j->config.on_save = on_save;
    j->config.on_resume = on_resume;
    j->config.on_progress = on_progress;
    j->config.user = j;
    if (v[O_TOKEN_FILE].text) check_token(v[O_TOKEN_FILE].text);
    if (!j->config.data.count)
        find_data(v, &j->config, dt_batch_ramp_consumed(j->config.ramp, j->config.stop_at + 1));
    j->prompt = resolve_generation(v, &j->config, &j->prompt_tokens);
    check_resume(v, &j->config.data);
    if (prints_messages()) check_outputs(v, &j->config);
    if (v[O_MEM_LIMIT].text) check_mem_limit(j);
    if (v[O_LOG_CSV].text && prints_messages() && !v[O_DRY_RUN].number)
        j->csv = open_log(
            v[O_LOG_CSV].text, csv_header(&j->config), v[O_RESUME].text != NULL, &j->csv_is_stream);
    if (v[O_TRACE].text && prints_messages()) check_writable(O_TRACE, v[O_TRACE].text);
    if (v[O_SCHEDULE_SVG].text && prints_messages())
        check_writable(O_SCHEDULE_SVG, v[O_SCHEDULE_SVG].text);
    if (v[O_SCHEDULE_TEXT].text && prints_messages())
        write_schedule(&j->config, v[O_SCHEDULE_TEXT].text);
    if (!v[O_QUIET].number && prints_messages()) print_settings(v, &j->config);
}

/* --plan-rows: predicts the layouts of a file. Nothing is trained, so no other option applies. */
static int predict_rows(const value *v) {
    char error[512];
    if (!v[O_PLAN_ROWS].text)
        refuse("--%s needs --plan-rows FILE", v[O_PLAN_CSV].text ? "plan-csv" : "profile");
    if (!v[O_PLAN_CSV].text) refuse("--plan-rows needs --plan-csv FILE");
    for (int i = 0; i < N_OPTIONS; i++)
        if (v[i].from >= GIVEN && i != O_PLAN_ROWS && i != O_PROFILE && i != O_PLAN_CSV)
            refuse("--%s has no effect with --plan-rows, which trains nothing", table[i].name);
    const dt_plan_profile *profile =
        v[O_PROFILE].text ? dt_plan_profile_of(v[O_PROFILE].text) : dt_plan_profiles(NULL);
    int status = plan_rows(v[O_PLAN_ROWS].text, profile, v[O_PLAN_CSV].text, error, sizeof error);
    if (status == 2) refuse("%s", error);
    if (status) print_error("error: %s\n", error);
    return status;
}

// ==== 13. Planner ===============================================================================

/* What the two callbacks of the search need. */
typedef struct plan_job {
    value *v;
    int refused;   /* dry runs that this program refused */
    char why[300]; /* the first line that the last of them printed */
} plan_job;

/* Returns 1 if the user has fixed an option to another value than the layout's. */
static int plan_refuses(const dt_layout *l, void *user) {
    const value *v = ((const plan_job *)user)->v;
    const struct {
        int id, value;
    } sizes[] = { { O_DP, l->mesh.dp }, { O_TP, l->mesh.tp }, { O_CP, l->mesh.cp },
        { O_PP, l->mesh.pp }, { O_EP, l->mesh.ep }, { O_ZERO, l->zero }, { O_CHUNKS, l->chunks },
        { O_MICRO_BATCH, l->micro_batch }, { O_ACCUM, l->accum } };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (v[sizes[i].id].from >= GIVEN && int_of(v, sizes[i].id) != sizes[i].value) return 1;
    if (v[O_RECOMPUTE].from >= GIVEN &&
        strcmp(v[O_RECOMPUTE].text, plan_recomputes[l->recompute]) != 0)
        return 1;
    if (v[O_SP].from >= GIVEN && l->mesh.tp > 1 && (v[O_SP].number != 0) != l->sp) return 1;
    return v[O_SCHEDULE].from >= GIVEN && l->mesh.pp > 1 &&
           strcmp(v[O_SCHEDULE].text, plan_schedule(l->schedule)) != 0;
}

/* Runs the layout dry, in this process, which it ends. If the run is possible, the status is 0 and
   the bytes of the rank that needs most are in the pipe `out`. Else the reason is there, as every
   error line of this program. */
static __attribute__((noreturn)) void plan_dry_child(value *v, const dt_layout *l, int out) {
    char numbers[9][16];
    const int ids[9] = { O_DP, O_TP, O_CP, O_PP, O_EP, O_ZERO, O_CHUNKS, O_MICRO_BATCH, O_ACCUM },
              values[9] = { l->mesh.dp, l->mesh.tp, l->mesh.cp, l->mesh.pp, l->mesh.ep, l->zero,
                  l->chunks, l->micro_batch, l->accum };
    job j = { .v = v, .csv = -1 };
    int quiet = open("/dev/null", O_WRONLY);
    if (quiet >= 0) dup2(quiet, 1);
    dup2(out, 2);
    for (int i = 0; i < 9; i++) {
        snprintf(numbers[i], sizeof numbers[i], "%d", values[i]);
        if (ids[i] != O_CHUNKS || l->chunks > 1) set(&v[ids[i]], ids[i], numbers[i], GIVEN);
    }
    set(&v[O_RECOMPUTE], O_RECOMPUTE, plan_recomputes[l->recompute], GIVEN);
    if (l->mesh.pp > 1) set(&v[O_SCHEDULE], O_SCHEDULE, plan_schedule(l->schedule), GIVEN);
    set(&v[O_SP], O_SP, l->sp ? "on" : "off", GIVEN);
    if (l->mesh.cp > 1 && v[O_CP_KIND].from < GIVEN) set(&v[O_CP_KIND], O_CP_KIND, "zigzag", GIVEN);
    /* a dry run reads its batches, whatever they are: any file will do */
    if (!v[O_DATA].text) set(&v[O_DATA], O_DATA, "/proc/self/exe", GIVEN);
    j.config = resolve(v);
    find_data(v, &j.config, 1);
    dry_figures f = run_dry(&j, j.config, 0, NULL);
    if (f.report.status != DT_OK) refuse("%s", f.report.text);
    /* host memory is not the device's */
    double bytes = (double)(f.footprint.memory.peak_total - f.footprint.memory.live[DT_MEM_HOST]);
    _exit(write(out, &bytes, sizeof bytes) == sizeof bytes ? 0 : 2);
}

/* Returns the bytes of the layout's dry run, or -1 if this program refuses the layout. A child
   process runs it, because a refusal ends the process. */
static double plan_dry_bytes(const dt_layout *l, void *user) {
    plan_job *job = (plan_job *)user;
    char text[sizeof job->why] = "";
    size_t used = 0;
    int ends[2], status = -1;
    double bytes;
    if (pipe(ends) != 0) refuse("--plan: a pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child == 0) plan_dry_child(job->v, l, ends[1]);
    if (child < 0) refuse("--plan: a process for a dry run: %s", strerror(errno));
    close(ends[1]);
    for (ssize_t got = 1; got != 0 && used < sizeof text - 1;) {
        got = read(ends[0], text + used, sizeof text - 1 - used);
        if (got < 0 && errno != EINTR) break;
        if (got > 0) used += (size_t)got;
    }
    close(ends[0]);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && used == sizeof bytes)
        return memcpy(&bytes, text, sizeof bytes), bytes;
    text[strcspn(text, "\n")] = 0;
    int prefix = strncmp(text, "error: ", 7) == 0 ? 7 : 0;
    snprintf(job->why, sizeof job->why, "%s", used ? text + prefix : "its process died");
    job->refused++;
    return -1;
}

static __attribute__((format(printf, 1, 2))) void plan_line(const char *fmt, ...) {
    va_list args;
    line out = { .fd = 1 };
    va_start(args, fmt);
    line_vprintf(&out, fmt, args);
    va_end(args);
    flush_line(&out);
}

static dt_plan_model plan_model(value *v) {
    gpt_config c = resolve_model(v);
    dt_plan_model m = { .layers = c.layers,
        .width = c.width,
        .heads = c.heads,
        .kv_heads = c.kv_heads,
        .ffn = c.ffn,
        .gated = c.arch == GPT_LLAMA,
        .vocab = c.vocab,
        .seq = c.seq,
        .tied = c.tied,
        .experts = c.experts,
        .top_k = c.experts ? gpt_top_k(c) : 0,
        .moe_every = c.moe_every };
    return m;
}

static void read_cluster(dt_ctx *ctx, const value *v, plan_cluster *c) {
    char why[700];
    const char *text = v[O_CLUSTER].text;
    if (!text) refuse("--plan needs --cluster KIND:NODESxGPUS, such as h100:16x8, or a JSON file");
    int is_file = strlen(text) > 5 && strcmp(text + strlen(text) - 5, ".json") == 0;
    if (!(is_file ? plan_cluster_of_file(ctx, text, c, why, sizeof why)
                  : plan_cluster_of_text(text, c, why, sizeof why)))
        refuse("--cluster %s", why);
}

static int write_plan(dt_ctx *ctx, const plan_answer *a, const char *path) {
    dt_json_out out = { .ctx = ctx };
    plan_json(a, &out);
    if (dt_error(ctx) == DT_OK) dt_file_write(ctx, path, out.text, out.used);
    if (dt_error(ctx) != DT_OK) print_error("error: --plan-json: %s\n", error_without_rank(ctx));
    dt_json_out_free(&out);
    return dt_error(ctx) != DT_OK;
}

/* --plan: searches, prints and writes the plan. Returns the program's exit status. */
static int make_plan(value *v) {
    enum { TOO_BIG = 3 };
    dt_host host = *dt_host_default();
    host.log = no_log; /* errors are printed once, by this program */
    dt_ctx *ctx = dt_ctx_make((dt_ctx_desc){ .host = &host });
    plan_cluster cluster = { .nodes = 0 };
    int top = int_of(v, O_TOP), failed = 0;
    read_cluster(ctx, v, &cluster);
    dt_plan_model model = plan_model(v);
    static const double sizes[] = { 4, 2, 2, 8 }; /* of f32, bf16, f16, f64 */
    plan_own_memory(&cluster, &model, sizes[int_of(v, O_DTYPE)]);
    plan_answer a = { .model = &model, .cluster = &cluster };
    if (v[O_TOKENS].text && (a.tokens = plan_tokens(v[O_TOKENS].text)) <= 0)
        refuse("--tokens %s: not a number of tokens, such as 300B or 2T", v[O_TOKENS].text);
    dt_plan_row *rows = (dt_plan_row *)calloc((size_t)top + TOO_BIG, sizeof *rows);
    if (!rows) refuse("--plan: out of memory");
    plan_job dry = { .v = v };
    dt_plan_desc desc = { .model = &model,
        .profile = &cluster.profile,
        .gpus = cluster.nodes * cluster.gpus,
        .batch = int_of(v, O_BATCH),
        .memory = cluster.profile.memory,
        .refuses = plan_refuses,
        .bytes = plan_dry_bytes,
        .user = &dry };
    if (dt_plan_search(desc, rows, top, rows + top, TOO_BIG, &a.found) != DT_OK)
        refuse("--plan: a size of the model is impossible");
    a.desc = &desc;
    a.rows = rows;
    a.too_big = rows + top;
    if (a.found.tried == 0)
        refuse("--plan: no layout of %d GPUs divides the model, --batch %d and the given options",
            desc.gpus, desc.batch);
    if (a.found.rows == 0 && dry.refused > 0)
        refuse(
            "--plan: this program refuses the fastest layouts that fit; the last one: %s", dry.why);
    plan_print(&a, plan_line);
    if (v[O_PLAN_JSON].text) failed = write_plan(ctx, &a, v[O_PLAN_JSON].text);
    free(rows);
    dt_ctx_free(ctx);
    close_tokenizer();
    return exit_status(NULL, failed);
}

// ==== 14. main ==================================================================================

int main(int argc, char **argv) {
    value v[N_OPTIONS];
    job j = { .v = v, .csv = -1 };
    init_process();
    /* CUDA reads this variable at its first call. Lazy loading is turned off, because it would
       synchronize with the device when a kernel is loaded. The device may then be waiting in NCCL
       for another rank: a deadlock. */
    if (dt_backend_is_built(DT_BACKEND_NCCL)) setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    memset(v, 0, sizeof v);
    parse(v, argc, argv);
    /* half of --timeout, so that rank 0 fails before the ranks that wait for rank 0 time out */
    launched.write_timeout_s = v[O_TIMEOUT].number / 2;
    launched.is_quiet = v[O_QUIET].number != 0;
    if (v[O_HELP].number) print_help();
    if (v[O_LIST_REFUSED].number) print_refused();
    if (v[O_HELP].number || v[O_LIST_REFUSED].number) return exit_status(NULL, 0);
    if (v[O_PLAN_ROWS].text || v[O_PLAN_CSV].text || v[O_PROFILE].text) return predict_rows(v);
    if (v[O_PLAN].number) return make_plan(v);
    for (int i = O_CLUSTER; i <= O_PLAN_SVG; i++)
        if (v[i].from == GIVEN) refuse("--%s needs --plan", table[i].name);
    find_launch(v);
    begin_mpi(v, &argc, &argv);
    j.config = resolve(v);
    char *settings = config_json(v, NULL);
    if (v[O_PRINT_CONFIG].number) {
        close_tokenizer();
        line out = { .fd = 1 };
        if (prints_messages())
            line_add_text(&out, settings, strlen(settings), "\n"), flush_line(&out);
        free(settings);
        train_files_free(&j.config.data);
        train_files_free(&j.config.val);
        return end_mpi(exit_status(NULL, 0));
    }
    prepare(&j);
    if (get_flag(launched.stdout_error)) return end_mpi(exit_status(NULL, 1));
    free(settings);
    j.config.settings = settings = config_json(v, &j.config.data);
    int failed = v[O_DRY_RUN].number ? exit_status(NULL, dry_run(&j)) : run(&j);
    free(settings);
    free(j.prompt);
    train_files_free(&j.config.data);
    train_files_free(&j.config.val);
    close_tokenizer();
    return end_mpi(failed);
}
