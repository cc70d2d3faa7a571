/* gpt.h - GPT-2, Llama and later models with Llama's architecture (Mistral, Mixtral, Qwen, Gemma,
   DeepSeek-V3), written with dt's public functions only - public domain or MIT, at your choice

   Include gpt.h after dt_zero.h or after dt_parallel.h. All functions are static. gpt_files.h reads
   and writes weight files.

       gpt        model  = gpt_register(ctx, (gpt_config){ .layers = 4, .width = 128, .heads = 4,
                                                           .kv_heads = 4, .ffn = 512, .seq = 128,
                                                           .vocab = 256, .tied = 1 });
       dt_tensor *logits = gpt_logits(&model, ids);                          // (B,T) i32 -> (B,T,V)
       dt_tensor *loss   = gpt_loss(&model, ids, labels, denominator);       // a scalar in nats
       gpt_generate(&model, text, given, total, (gpt_sampling){ .temperature = 0.8 });

   Letters: B sequences, T tokens per sequence, V vocabulary size, L layers, C width, H query heads,
   K key/value heads (grouped-query attention if K < H, arXiv:2305.13245), D = C/H or
   config.parts.head_dim, F feed-forward width.

   GPT_GPT2 computes

       x = wte[ids] + wpe[positions]
       per layer   x += attn.proj(attention(q(n), k(n), v(n))), where n = ln_1(x)
                   x += mlp.proj(gelu(mlp.fc(ln_2(x))))
       logits = ln_f(x) head^T, where head is wte if tied, else lm_head; no bias

   GPT_LLAMA computes the same with RMSNorm instead of layernorm, no biases, rotary embedding of q
   and k (rotated halves, base theta) instead of wpe, and mlp.proj(silu(gate) up), where gate and up
   are one parameter (2,F,C).

   config.parts has the options of later models with the architecture of Llama: QK-norm, RoPE
   scaling, sliding-window attention, soft-capping, and Gemma's norms. Zeros mean Llama.

   Dropout applies to the embedding, and to the outputs of attn.proj and mlp.proj before the
   residual addition. Dropout is active only in a forward pass that has a step number
   (gpt_tokens.step).

   LoRA and QLoRA: if config.lora.rank > 0, all parameters of the model are frozen, and the layers'
   matrices that config.lora.modules names get adapters (dt_adapter), which are trained; those of
   the modules of multi-token prediction get none. In addition
   config.base stores the frozen matrices of the layers in bf16, int8 or NF4 blocks (dt_quant), but
   not the embeddings, the head, the norms and the experts.

   Mixture of experts (MoE): if config.experts > 0, every moe_every-th layer has `experts` MLPs
   instead of one, and each token uses top_k of them. The experts are sharded over config.ep
   (dt_parallel.h, section 5), and config.expert_tp folds them. If config.shared_experts > 0, every
   token also uses the shared experts. config.route, expert_groups, top_groups, raw_gates and
   gate_scale make the router that of DeepSeek-V3 (arXiv:2412.19437).

   Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1): if config.mla.kv_rank > 0, keys
   and values are computed from a latent of few elements, which is all that generation caches. See
   gpt_latent_heads.

   Multi-token prediction (MTP, arXiv:2412.19437, section 2.2): config.mtp modules after the last
   layer also predict the tokens after the next one, in training. See gpt_mtp_forward.

   Activation checkpointing (recompute) stores fewer activations in the forward pass and recomputes
   the others in the backward pass. The table gives for each config.recompute the number of elements
   that a layer stores per token, and which activations these are. A layer's input is counted in the
   layer before it. full:k is `full` with recompute_every = k.

       GPT-2   none        4C + 2KD + F + H + 4     q, k, v, heads, x, fc, x; lse; mean and rstd
                                                    twice
               selective   3C + F + 2               without q, k, v, lse, mean, rstd of attention
                                                    (arXiv:2205.05198)
       Llama   none        4C + 2KD + 2F + H + 2    rotated q and k, v, heads, x, gate, up, x; lse;
                                                    rstd twice
               selective   3C + 2F + 1              without those of attention, as above
       both    full        C                        the output (arXiv:1604.06174)
               full:k      C / k                    the output of every k-th layer

   With every config.recompute the backward pass computes the outputs of the norms, of GELU and of
   SwiGLU again, one layer at a time: they cost one pass over memory each. In 16 bits a GPT-2 stores
   the output of GELU, F more.

   Latent attention stores more than the table says: the latents, and the parts of q, k and v before
   their concatenation.

   In the backward pass, full:k also holds the activations of `none` for k layers at a time. A GPT-2
   with F = 4C and K = H needs less memory with full:k than with `full` if

       L - L/k > (k - 1)(10 + H/C)

   Dropout and the residual addition write over their input, so dropout adds nothing; over tp it
   adds 2C to `none` and `selective`, because the sums over the ranks are stored too. The
   zero-bubble schedule keeps recomputed activations and their gradients from a micro-batch's action
   I (input gradients) to its action W (weight gradients): the inputs and the output gradients of all
   weights, 16C for a GPT-2 with F = 4C and K = H. With this schedule `selective` saves little and
   `full` saves nothing.

   Layouts: config.tp shards heads, hidden units and the vocabulary. config.sp also shards the
   tokens outside the tensor-parallel layers. config.cp shards the tokens everywhere: each rank
   passes the ids, labels, positions and documents of its own tokens only (dt_parallel.h, sections 3
   and 4). Every rank of tp and cp calls the same functions. Each rank has B T/cp tokens. Let t be
   the number of tp ranks and S the number of bytes of C elements. In each layer a rank sends this
   number of bytes per token:

       tp              forward 4 (t-1)/t S         backward the same
       tp with sp      forward 4 (t-1)/t S         backward 6 (t-1)/t S, because the inputs of
                                                   attention and MLP are gathered again

   Without recompute, a rank stores for each layer this number of elements per token. If K < t, each
   rank has one kv head, so KD/t means D:

       GPT-2   tp          2C + 4 + (2C + 2KD + F + H)/t
               tp with sp  (2C + 4)/t + (2C + 2KD + F + H)/t
       Llama   tp          2C + 2 + (2C + 2KD + 2F + H)/t
               tp with sp  (2C + 2)/t + (2C + 2KD + 2F + H)/t */
#ifndef GPT_H
#define GPT_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GPT_MAX_LAYERS = 192, GPT_MAX_STAGES = 2 * GPT_MAX_LAYERS + 2, GPT_MAX_MTP = 4 };
enum { GPT_RECOMPUTE_NONE = 0, GPT_RECOMPUTE_SELECTIVE, GPT_RECOMPUTE_FULL };
enum { GPT_GPT2 = 0, GPT_LLAMA };
/* The modules that can have a LoRA adapter: attention's four matrices; Llama's gate, up and down;
   GPT-2's fc. `down` is the output matrix of either MLP. */
enum {
    GPT_LORA_Q,
    GPT_LORA_K,
    GPT_LORA_V,
    GPT_LORA_O,
    GPT_LORA_GATE,
    GPT_LORA_UP,
    GPT_LORA_DOWN,
    GPT_LORA_FC,
    GPT_LORA_MODULES
};
/* LoRA (arXiv:2106.09685): y = x w^T + (alpha / rank) (dropout(x) a^T) b^T */
typedef struct gpt_lora {
    int rank;         /* 0: no adapters */
    double alpha;     /* 0 means rank */
    double dropout;   /* in [0,1), in training only */
    unsigned modules; /* bits 1 << GPT_LORA_* */
} gpt_lora;

/* Sizes of multi-head latent attention. q and k of a head have nope_dim elements without position
   and rope_dim elements with rotary embedding; v has value_dim, at most nope_dim + rope_dim. */
typedef struct gpt_mla {
    int kv_rank; /* elements of the latent of keys and values; 0: ordinary attention */
    int q_rank;  /* elements of the latent of queries; 0: queries are computed from x */
    int nope_dim, rope_dim, value_dim;
} gpt_mla;

/* Parts of models with the architecture of Llama; zeros switch them off, and GPT_GPT2 has none of
   them. The released models use:

       Llama 3.x   rope
       Mistral     window
       Qwen 2      qkv_bias
       Qwen 3      head_dim, qk_norm
       Gemma 2     gemma, head_dim, query_scalar, window, global_every, both soft caps
       Gemma 3     gemma, head_dim, query_scalar, window, global_every, qk_norm, local_theta,
                   rope */
typedef struct gpt_parts {
    int head_dim; /* D; 0 means C/H */
    int qkv_bias; /* biases of q, k and v */
    int qk_norm;  /* QK-norm: RMSNorm over D of each head of q and k, before the rotary embedding */
    /* Sliding-window attention: a token attends to the newest `window` tokens up to itself. With
       global_every = N, layers N - 1, 2N - 1, .. are global: they attend to all tokens; the others
       are local. If N is 0, all layers are local */
    int window, global_every;
    dt_rope_scaling rope; /* RoPE scaling; not in local layers that have a theta of their own */
    double local_theta;   /* base of the rotary embedding in local layers; 0 means config.theta */
    /* scores are divided by its square root; 0 means the size of a query (Hugging Face:
       query_pre_attn_scalar) */
    double query_scalar;
    double attn_soft_cap, logit_soft_cap; /* soft-capping of scores and of logits; 0 means none */
    /* Gemma: the embedding is multiplied by sqrt(C), GeGLU replaces SwiGLU, attn.proj and mlp.proj
       are followed by an RMSNorm before the residual addition, and norms multiply by 1 + weight.
       Weights of norms are stored as Gemma's files have them, and start at 0 */
    int gemma;
} gpt_parts;

typedef struct gpt_config {
    int layers, width, heads, kv_heads, ffn;
    int seq; /* largest number of tokens per sequence */
    int vocab;
    int tied; /* 1: the head uses wte.weight; 0: the head has its own lm_head.weight */
    dt_dtype dtype;
    int recompute;       /* GPT_RECOMPUTE_*; every value gives bit-identical results */
    int recompute_every; /* for GPT_RECOMPUTE_FULL: layers per recomputed block; 0 means 1 */
    int arch;            /* GPT_GPT2 or GPT_LLAMA */
    gpt_lora lora;
    dt_quant base;    /* storage of the layers' frozen matrices; needs lora.rank > 0 */
    double norm_eps;  /* epsilon of layernorm and RMSNorm; 0 means 1e-5 */
    double theta;     /* base of the rotary embedding; 0 means 10000 */
    double dropout;   /* dropout probability, in [0,1) */
    double smoothing; /* label smoothing (arXiv:1512.00567), in [0,1) */
    /* Group that shards heads, hidden units and vocabulary. tp, cp, ep and pp may be NULL, which
       means a group of one rank */
    dt_comm *tp;
    int sp;             /* sequence parallelism: tp also shards the tokens */
    dt_comm *cp;        /* group that shards the tokens */
    int cp_kind;        /* how cp shards the tokens: DT_CP_* */
    int experts;        /* number of experts E of a MoE layer; 0: all layers are dense */
    int top_k;          /* experts per token; 0 means 1 if there is one expert, else 2 */
    int moe_every;      /* N: layers N - 1, 2 N - 1, .. are MoE layers; 0 means 1 (all layers) */
    int shared_experts; /* n: each MoE layer also has a dense MLP with F = n ffn for all tokens */
    double capacity;    /* dt_route_desc.capacity in training; generation has no limit */
    double balance, z;  /* weights of the load-balancing loss and the router z-loss */
    /* If router_bias > 0, the router has one bias per expert, and gpt_balance raises or lowers each
       bias by this amount */
    double router_bias;
    dt_comm *ep; /* group that shards the experts */
    /* Expert folding: dt_mesh.sizes.expert_tp, and the mesh's groups expert_tp, which shards each
       expert, and dispatch. 0: tp shards each expert, and ep dispatches */
    int expert_tp;
    dt_comm *expert_tp_group, *dispatch;
    dt_comm *pp; /* group of the pipeline's p ranks */
    int stages;  /* number of pipeline stages; 0 or 1 if stage_begin is NULL */
    /* (stages): the rank of pp that has each stage; each rank has equally many. NULL means that
       rank s % p has stage s. The array is not copied. */
    const int *stage_rank;
    /* Divides the model into stages; NULL means one stage. The model is a list of items: item 0 is
       the embedding, items 1 + 2i and 2 + 2i are attention and MLP of layer i, and item
       2 layers + 1 is the head. Stage s has items [stage_begin[s], stage_begin[s + 1]), so the
       array has stages + 1 elements. The array is not copied. */
    const int *stage_begin;
    gpt_mla mla;     /* multi-head latent attention; needs GPT_LLAMA and kv_heads = heads */
    int first_dense; /* the first n layers are dense in spite of `experts` */
    int moe_ffn;     /* F of each expert; 0 means ffn */
    /* DT_ROUTE_*, and other fields of dt_route_desc. With DT_ROUTE_SIGMOID every router has a bias
       per expert, also if router_bias is 0 */
    int route, expert_groups, top_groups, raw_gates;
    double gate_scale;
    int mtp;           /* modules of multi-token prediction, at most GPT_MAX_MTP; needs GPT_LLAMA */
    double mtp_weight; /* the gradient includes mtp_weight times the mean of the modules' losses */
    gpt_parts parts;
    /* 1 + the ids of the tokens that begin and end a text; 0: none. gpt_files.h reads them from and
       writes them to config.json, and nothing else uses them */
    int bos_token, eos_token;
} gpt_config;

/* The parameters of a layer. A parameter that this rank does not have is NULL. */
typedef struct gpt_layer {
    dt_tensor *ln_1_gain, *ln_1_bias;            /* (C) */
    dt_tensor *q, *q_bias;                       /* (H,D,C), (H,D) */
    dt_tensor *k, *k_bias, *v, *v_bias;          /* (K,D,C), (K,D) */
    dt_tensor *q_norm, *k_norm;                  /* (D), (D) */
    dt_tensor *attn_proj, *attn_proj_bias;       /* (C,H*D), (C) */
    dt_tensor *attn_norm, *mlp_norm;             /* (C), (C): Gemma's norms of the branches */
    dt_tensor *ln_2_gain, *ln_2_bias;            /* (C) */
    dt_tensor *fc, *fc_bias;                     /* (F,C), (F) */
    dt_tensor *gate_up;                          /* (2,F,C) */
    dt_tensor *mlp_proj, *mlp_proj_bias;         /* (C,F), (C) */
    dt_tensor *router, *router_bias;             /* (E,C), (E) */
    dt_tensor *experts_fc, *experts_fc_bias;     /* (E,F,C), (E,F) */
    dt_tensor *experts_gate_up;                  /* (E,2,F,C) */
    dt_tensor *experts_proj, *experts_proj_bias; /* (E,C,F), (E,C) */
    /* (R,in), (out,R) */
    dt_tensor *lora_a[GPT_LORA_MODULES], *lora_b[GPT_LORA_MODULES];
    /* the router's counts in training; route.experts is the caller's array (E), or NULL */
    dt_route_counts route;
    /* latent attention: q is (H,D,q_rank) or, without q_rank, (H,D,C), where D = nope_dim +
       rope_dim; attn_proj is (C,H value_dim) */
    dt_tensor *q_a, *q_a_norm;           /* (q_rank,C), (q_rank) */
    dt_tensor *kv_a, *kv_a_norm;         /* (kv_rank + rope_dim,C), (kv_rank) */
    dt_tensor *kv_b;                     /* (H,nope_dim + value_dim,kv_rank) */
    dt_tensor *enorm, *hnorm, *mtp_norm; /* (C), of a module of multi-token prediction */
    dt_tensor *eh_proj;                  /* (C,2C) */
} gpt_layer;

typedef struct gpt {
    gpt_config config;
    dt_ctx *ctx;
    dt_tensor *wte, *wpe;             /* (V,C), (seq,C) */
    gpt_layer layer[GPT_MAX_LAYERS];  /* the layers, then those of the modules of mtp */
    dt_tensor *ln_f_gain, *ln_f_bias; /* (C) */
    dt_tensor *head;                  /* (V,C) */
    dt_kv_groups kv;                  /* how the K key/value heads are divided over tp */
    /* The group of the two ranks that have the first and the last stage, if both need wte: for a
       tied head or for mtp. Each of them has a copy of wte. NULL if only one stage needs wte, or if
       one rank has both stages (ZB-V, DualPipe-V), which then share one wte. */
    dt_comm *tied;
    dt_tensor *mtp_wte; /* the embedding that the modules of mtp read, on the last stage */
    double mtp_loss;    /* sum of this rank's mean losses of the modules; the caller clears it */
} gpt;

// ==== Parameters =================================================================================

/* The section of the model to which a parameter belongs. The names of layer N's parameters begin
   with "h.N.". */
enum {
    GPT_EMBEDDING,
    GPT_ATTENTION,
    GPT_MLP,
    GPT_HEAD,
    /* parts of section GPT_MLP: the dense MLP, and the experts of a MoE layer */
    GPT_DENSE,
    GPT_EXPERT,
    GPT_LATENT, /* part of section GPT_ATTENTION, in place of q, k, v and proj */
    GPT_MTP     /* what a module of multi-token prediction has besides its layer */
};
/* The architectures and parts that have the parameter, one bit each. */
enum { GPT_ONLY_2 = 1, GPT_ONLY_LLAMA, GPT_BOTH };
enum { GPT_QKV_BIAS = 4, GPT_QK_NORM = 8, GPT_BRANCH_NORM = 16 };
/* The kind of a parameter decides its initial values. Gains and biases have no weight decay. */
enum {
    GPT_GAIN,
    GPT_BIAS,
    GPT_POSITION,
    GPT_MATRIX,
    GPT_BRANCH,
    GPT_ROUTER_BIAS,
    GPT_LORA_A,
    GPT_LORA_B
};
/* One row of the table of parameters. */
typedef struct gpt_param_row {
    int section, models;
    /* shape has one letter (see gpt_size) or digit per dimension. A '/' precedes the dimension that
       tp shards, and a '|' precedes the dimension that ep shards. If shape begins with '+', the
       parameter's gradient is partial over tp. With expert folding, expert_tp takes the place of tp
       in shapes with a '|'. */
    const char *name, *shape;
    int kind;
    size_t at; /* offset of the parameter's dt_tensor * in gpt or gpt_layer */
} gpt_param_row;

/* Every parameter once, in the order of registration. */
static const gpt_param_row gpt_param_rows[] = {
    { GPT_EMBEDDING, GPT_BOTH, "wte.weight", "/VC", GPT_MATRIX, offsetof(gpt, wte) },
    { GPT_EMBEDDING, GPT_ONLY_2, "wpe.weight", "TC", GPT_POSITION, offsetof(gpt, wpe) },
    { GPT_ATTENTION, GPT_BOTH, "ln_1.weight", "C", GPT_GAIN, offsetof(gpt_layer, ln_1_gain) },
    { GPT_ATTENTION, GPT_ONLY_2, "ln_1.bias", "C", GPT_BIAS, offsetof(gpt_layer, ln_1_bias) },
    { GPT_ATTENTION, GPT_BOTH, "attn.q.weight", "/HDC", GPT_MATRIX, offsetof(gpt_layer, q) },
    { GPT_ATTENTION, GPT_ONLY_2 | GPT_QKV_BIAS, "attn.q.bias", "/HD", GPT_BIAS,
        offsetof(gpt_layer, q_bias) },
    { GPT_ATTENTION, GPT_BOTH, "attn.k.weight", "/KDC", GPT_MATRIX, offsetof(gpt_layer, k) },
    { GPT_ATTENTION, GPT_ONLY_2 | GPT_QKV_BIAS, "attn.k.bias", "/KD", GPT_BIAS,
        offsetof(gpt_layer, k_bias) },
    { GPT_ATTENTION, GPT_BOTH, "attn.v.weight", "/KDC", GPT_MATRIX, offsetof(gpt_layer, v) },
    { GPT_ATTENTION, GPT_ONLY_2 | GPT_QKV_BIAS, "attn.v.bias", "/KD", GPT_BIAS,
        offsetof(gpt_layer, v_bias) },
    { GPT_ATTENTION, GPT_QK_NORM, "attn.q_norm.weight", "+D", GPT_GAIN,
        offsetof(gpt_layer, q_norm) },
    { GPT_ATTENTION, GPT_QK_NORM, "attn.k_norm.weight", "+D", GPT_GAIN,
        offsetof(gpt_layer, k_norm) },
    { GPT_ATTENTION, GPT_BOTH, "attn.proj.weight", "C/A", GPT_BRANCH,
        offsetof(gpt_layer, attn_proj) },
    { GPT_ATTENTION, GPT_ONLY_2, "attn.proj.bias", "C", GPT_BIAS,
        offsetof(gpt_layer, attn_proj_bias) },
    { GPT_LATENT, GPT_ONLY_LLAMA, "attn.q.weight", "/HxC", GPT_MATRIX, offsetof(gpt_layer, q) },
    { GPT_LATENT, GPT_ONLY_LLAMA, "attn.q_a.weight", "qC", GPT_MATRIX, offsetof(gpt_layer, q_a) },
    { GPT_LATENT, GPT_ONLY_LLAMA, "attn.q_a_norm.weight", "q", GPT_GAIN,
        offsetof(gpt_layer, q_a_norm) },
    { GPT_LATENT, GPT_ONLY_LLAMA, "attn.q_b.weight", "/Hxq", GPT_MATRIX, offsetof(gpt_layer, q) },
    { GPT_LATENT, GPT_ONLY_LLAMA, "attn.kv_a.weight", "yC", GPT_MATRIX, offsetof(gpt_layer, kv_a) },
    { GPT_LATENT, GPT_ONLY_LLAMA, "attn.kv_a_norm.weight", "z", GPT_GAIN,
        offsetof(gpt_layer, kv_a_norm) },
    { GPT_LATENT, GPT_ONLY_LLAMA, "attn.kv_b.weight", "/Hwz", GPT_MATRIX,
        offsetof(gpt_layer, kv_b) },
    { GPT_LATENT, GPT_ONLY_LLAMA, "attn.proj.weight", "C/o", GPT_BRANCH,
        offsetof(gpt_layer, attn_proj) },
    { GPT_ATTENTION, GPT_BRANCH_NORM, "attn.norm.weight", "C", GPT_GAIN,
        offsetof(gpt_layer, attn_norm) },
    { GPT_ATTENTION, GPT_BOTH, "attn.q.lora_a.weight", "+RC", GPT_LORA_A,
        offsetof(gpt_layer, lora_a[GPT_LORA_Q]) },
    { GPT_ATTENTION, GPT_BOTH, "attn.q.lora_b.weight", "/HDR", GPT_LORA_B,
        offsetof(gpt_layer, lora_b[GPT_LORA_Q]) },
    { GPT_ATTENTION, GPT_BOTH, "attn.k.lora_a.weight", "+RC", GPT_LORA_A,
        offsetof(gpt_layer, lora_a[GPT_LORA_K]) },
    { GPT_ATTENTION, GPT_BOTH, "attn.k.lora_b.weight", "/KDR", GPT_LORA_B,
        offsetof(gpt_layer, lora_b[GPT_LORA_K]) },
    { GPT_ATTENTION, GPT_BOTH, "attn.v.lora_a.weight", "+RC", GPT_LORA_A,
        offsetof(gpt_layer, lora_a[GPT_LORA_V]) },
    { GPT_ATTENTION, GPT_BOTH, "attn.v.lora_b.weight", "/KDR", GPT_LORA_B,
        offsetof(gpt_layer, lora_b[GPT_LORA_V]) },
    { GPT_ATTENTION, GPT_BOTH, "attn.proj.lora_a.weight", "R/A", GPT_LORA_A,
        offsetof(gpt_layer, lora_a[GPT_LORA_O]) },
    { GPT_ATTENTION, GPT_BOTH, "attn.proj.lora_b.weight", "+CR", GPT_LORA_B,
        offsetof(gpt_layer, lora_b[GPT_LORA_O]) },
    { GPT_MLP, GPT_BOTH, "ln_2.weight", "C", GPT_GAIN, offsetof(gpt_layer, ln_2_gain) },
    { GPT_MLP, GPT_ONLY_2, "ln_2.bias", "C", GPT_BIAS, offsetof(gpt_layer, ln_2_bias) },
    { GPT_DENSE, GPT_ONLY_2, "mlp.fc.weight", "/FC", GPT_MATRIX, offsetof(gpt_layer, fc) },
    { GPT_DENSE, GPT_ONLY_2, "mlp.fc.bias", "/F", GPT_BIAS, offsetof(gpt_layer, fc_bias) },
    { GPT_DENSE, GPT_ONLY_LLAMA, "mlp.gate_up.weight", "2/FC", GPT_MATRIX,
        offsetof(gpt_layer, gate_up) },
    { GPT_DENSE, GPT_BOTH, "mlp.proj.weight", "C/F", GPT_BRANCH, offsetof(gpt_layer, mlp_proj) },
    { GPT_DENSE, GPT_ONLY_2, "mlp.proj.bias", "C", GPT_BIAS, offsetof(gpt_layer, mlp_proj_bias) },
    { GPT_MLP, GPT_BRANCH_NORM, "mlp.norm.weight", "C", GPT_GAIN, offsetof(gpt_layer, mlp_norm) },
    { GPT_DENSE, GPT_ONLY_LLAMA, "mlp.gate.lora_a.weight", "+RC", GPT_LORA_A,
        offsetof(gpt_layer, lora_a[GPT_LORA_GATE]) },
    { GPT_DENSE, GPT_ONLY_LLAMA, "mlp.gate.lora_b.weight", "/FR", GPT_LORA_B,
        offsetof(gpt_layer, lora_b[GPT_LORA_GATE]) },
    { GPT_DENSE, GPT_ONLY_LLAMA, "mlp.up.lora_a.weight", "+RC", GPT_LORA_A,
        offsetof(gpt_layer, lora_a[GPT_LORA_UP]) },
    { GPT_DENSE, GPT_ONLY_LLAMA, "mlp.up.lora_b.weight", "/FR", GPT_LORA_B,
        offsetof(gpt_layer, lora_b[GPT_LORA_UP]) },
    { GPT_DENSE, GPT_ONLY_2, "mlp.fc.lora_a.weight", "+RC", GPT_LORA_A,
        offsetof(gpt_layer, lora_a[GPT_LORA_FC]) },
    { GPT_DENSE, GPT_ONLY_2, "mlp.fc.lora_b.weight", "/FR", GPT_LORA_B,
        offsetof(gpt_layer, lora_b[GPT_LORA_FC]) },
    { GPT_DENSE, GPT_BOTH, "mlp.proj.lora_a.weight", "R/F", GPT_LORA_A,
        offsetof(gpt_layer, lora_a[GPT_LORA_DOWN]) },
    { GPT_DENSE, GPT_BOTH, "mlp.proj.lora_b.weight", "+CR", GPT_LORA_B,
        offsetof(gpt_layer, lora_b[GPT_LORA_DOWN]) },
    { GPT_EXPERT, GPT_BOTH, "moe.router.weight", "EC", GPT_MATRIX, offsetof(gpt_layer, router) },
    { GPT_EXPERT, GPT_BOTH, "moe.router.bias", "E", GPT_ROUTER_BIAS,
        offsetof(gpt_layer, router_bias) },
    { GPT_EXPERT, GPT_ONLY_2, "moe.fc.weight", "|E/FC", GPT_MATRIX,
        offsetof(gpt_layer, experts_fc) },
    { GPT_EXPERT, GPT_ONLY_2, "moe.fc.bias", "|E/F", GPT_BIAS,
        offsetof(gpt_layer, experts_fc_bias) },
    { GPT_EXPERT, GPT_ONLY_LLAMA, "moe.gate_up.weight", "|E2/FC", GPT_MATRIX,
        offsetof(gpt_layer, experts_gate_up) },
    { GPT_EXPERT, GPT_BOTH, "moe.proj.weight", "|EC/F", GPT_BRANCH,
        offsetof(gpt_layer, experts_proj) },
    { GPT_EXPERT, GPT_ONLY_2, "moe.proj.bias", "+|EC", GPT_BIAS,
        offsetof(gpt_layer, experts_proj_bias) },
    { GPT_MTP, GPT_ONLY_LLAMA, "mtp.enorm.weight", "C", GPT_GAIN, offsetof(gpt_layer, enorm) },
    { GPT_MTP, GPT_ONLY_LLAMA, "mtp.hnorm.weight", "C", GPT_GAIN, offsetof(gpt_layer, hnorm) },
    { GPT_MTP, GPT_ONLY_LLAMA, "mtp.eh_proj.weight", "Cc", GPT_MATRIX,
        offsetof(gpt_layer, eh_proj) },
    { GPT_MTP, GPT_ONLY_LLAMA, "mtp.norm.weight", "C", GPT_GAIN, offsetof(gpt_layer, mtp_norm) },
    { GPT_HEAD, GPT_BOTH, "ln_f.weight", "C", GPT_GAIN, offsetof(gpt, ln_f_gain) },
    { GPT_HEAD, GPT_ONLY_2, "ln_f.bias", "C", GPT_BIAS, offsetof(gpt, ln_f_bias) },
    { GPT_HEAD, GPT_BOTH, "lm_head.weight", "/VC", GPT_MATRIX, offsetof(gpt, head) },
};
enum { GPT_PARAM_ROWS = sizeof gpt_param_rows / sizeof *gpt_param_rows };

/* Returns the bits of the model's architecture and parts (see gpt_param_row.models). */
static inline int gpt_model_bits(gpt_config c) {
    return 1 << c.arch | (c.parts.qkv_bias ? GPT_QKV_BIAS : 0) |
           (c.parts.qk_norm ? GPT_QK_NORM : 0) | (c.parts.gemma ? GPT_BRANCH_NORM : 0);
}

static inline int gpt_head_dim(gpt_config c) {
    return c.parts.head_dim > 0 ? c.parts.head_dim : c.width / c.heads;
}

static inline int gpt_is_moe(gpt_config c, int layer) {
    return c.experts > 0 && layer >= c.first_dense &&
           (layer + 1) % (c.moe_every > 0 ? c.moe_every : 1) == 0;
}

/* Returns the number of layers with those of the modules of multi-token prediction. */
static inline int gpt_all_layers(gpt_config c) { return c.layers + c.mtp; }

static inline int gpt_section(const gpt_param_row *r) {
    if (r->section == GPT_LATENT) return GPT_ATTENTION;
    return r->section > GPT_HEAD && r->section != GPT_MTP ? GPT_MLP : r->section;
}
static inline int gpt_is_in_layer(const gpt_param_row *r) {
    return gpt_section(r) == GPT_ATTENTION || gpt_section(r) == GPT_MLP || r->section == GPT_MTP;
}

/* Returns 0 if the parameter is of the other kind of attention (ordinary or latent), or belongs to
   a module of multi-token prediction and `layer` to none; else 1. With a latent of the queries
   (q_rank > 0) the parameters are q_a, q_a_norm and q_b, whose shapes have a 'q'; without, only
   q. */
static inline int gpt_attention_has(gpt_config c, const gpt_param_row *r, int layer) {
    int plain = r->section == GPT_ATTENTION && strncmp(r->name, "attn.", 5) == 0;
    if (r->section == GPT_MTP) return layer >= c.layers;
    if (r->section != GPT_LATENT) return !plain || c.mla.kv_rank == 0;
    if (strchr(r->shape, 'q') || strchr(r->shape, 'x'))
        return c.mla.kv_rank > 0 && (strchr(r->shape, 'q') != NULL) == (c.mla.q_rank > 0);
    return c.mla.kv_rank > 0;
}

static inline int gpt_is_lora(const gpt_param_row *r) {
    return r->kind == GPT_LORA_A || r->kind == GPT_LORA_B;
}
/* Returns the GPT_LORA_* of a parameter of an adapter. */
static inline int gpt_lora_module(const gpt_param_row *r) {
    size_t first =
        r->kind == GPT_LORA_A ? offsetof(gpt_layer, lora_a) : offsetof(gpt_layer, lora_b);
    return (int)((r->at - first) / sizeof(dt_tensor *));
}

/* Returns 1 if the model has the parameter; for a parameter of a layer, 1 if layer number `layer`
   has it. A tied head has no parameter of its own, because it uses wte. */
static inline int gpt_has_param(gpt_config c, const gpt_param_row *r, int layer) {
    int mixture = gpt_is_moe(c, layer);
    if (!(r->models & gpt_model_bits(c)) ||
        (c.tied && r->at == offsetof(gpt, head) && r->section == GPT_HEAD))
        return 0;
    if (!gpt_attention_has(c, r, layer)) return 0;
    if (r->kind == GPT_ROUTER_BIAS && c.router_bias == 0 && c.route != DT_ROUTE_SIGMOID) return 0;
    /* the modules of multi-token prediction have no adapters: PEFT cannot name them, because the
       models of transformers do not have these modules */
    if (gpt_is_lora(r) &&
        (c.lora.rank == 0 || !(c.lora.modules >> gpt_lora_module(r) & 1) || layer >= c.layers))
        return 0;
    return r->section == GPT_DENSE ? !mixture || c.shared_experts > 0
                                   : r->section != GPT_EXPERT || mixture;
}

/* Returns the size that a letter or digit of gpt_param_row.shape stands for. */
static inline int64_t gpt_size(gpt_config c, char letter) {
    switch (letter) {
    case 'V': return c.vocab;
    case 'T': return c.seq;
    case 'C': return c.width;
    case 'H': return c.heads;
    case 'K': return c.kv_heads;
    case 'D': return gpt_head_dim(c);
    case 'A': return c.heads * gpt_head_dim(c);
    case 'F': return c.ffn;
    case 'E': return c.experts;
    case 'R': return c.lora.rank;
    case 'c': return 2 * (int64_t)c.width;
    /* latent attention: latents, then elements of a head */
    case 'q': return c.mla.q_rank;
    case 'z': return c.mla.kv_rank;
    case 'y': return c.mla.kv_rank + c.mla.rope_dim;     /* kv_a: latent and shared key */
    case 'x': return c.mla.nope_dim + c.mla.rope_dim;    /* q, k of a head */
    case 'w': return c.mla.nope_dim + c.mla.value_dim;   /* kv_b: k and v of a head */
    case 'o': return (int64_t)c.heads * c.mla.value_dim; /* all heads' output */
    }
    return letter - '0';
}

static inline int gpt_is_letter(char c) { return c != '/' && c != '|' && c != '+'; }

static inline dt_shape gpt_shape(gpt_config c, const gpt_param_row *r, int layer) {
    dt_shape s = DT_SCALAR;
    int shared = r->section == GPT_DENSE && gpt_is_moe(c, layer);
    if ((shared || r->section == GPT_EXPERT) && c.moe_ffn > 0) c.ffn = c.moe_ffn;
    for (const char *letter = r->shape; *letter; letter++)
        if (gpt_is_letter(*letter))
            s.d[s.nd++] = gpt_size(c, *letter) * (shared && *letter == 'F' ? c.shared_experts : 1);
    return s;
}

/* Returns the number of the dimension that `mark`, a '/' or '|', precedes in r->shape; -1 if
   r->shape does not contain the mark. */
static inline int gpt_dim(const gpt_param_row *r, char mark) {
    int dim = 0;
    for (const char *letter = r->shape; *letter && *letter != mark; letter++)
        dim += gpt_is_letter(*letter);
    return strchr(r->shape, mark) ? dim : -1;
}

/* Sets the parameter's shardings and gradient placements over ep and tp. The gradient is partial
   over ranks of tp in three cases. (1) kv heads are copied, and each copy serves only some of the
   query heads. (2) Under sequence parallelism each rank applies a parameter that is not sharded to
   only some of the tokens. (3) Only rank 0 of tp uses its copy of the parameter, or each rank
   applies its copy to its own heads; r->shape of such a parameter begins with '+'. With expert
   folding (2) holds for the routers, and for experts that no group shards. */
static inline void gpt_shard(const gpt *m, const gpt_param_row *r, dt_param_desc *d) {
    int dim = gpt_dim(r, '/'), experts = gpt_dim(r, '|');
    int folded = m->config.expert_tp > 0 && r->section == GPT_EXPERT, N = m->config.expert_tp;
    char letter = dim < 0 ? 0 : strchr(r->shape, '/')[1];
    if (dt_comm_size(m->config.ep) > 1 && experts >= 0)
        d->shards[1] = (dt_shard_spec){ m->config.ep, experts };
    if (folded && experts >= 0 && (N > 1 || d->shards[1].comm)) {
        if (N > 1 && letter) d->shards[0] = (dt_shard_spec){ m->config.expert_tp_group, dim };
        if (N > 1 && !letter)
            d->grad_placements[0] =
                (dt_grad_placement){ m->config.expert_tp_group, DT_GRAD_PARTIAL };
        return;
    }
    if (dt_comm_size(m->config.tp) == 1) return;
    if (folded) {
        d->grad_placements[0] = (dt_grad_placement){ m->config.tp, DT_GRAD_PARTIAL };
        return;
    }
    if (letter == 'K') {
        d->shards[0] = (dt_shard_spec){ m->kv.shard_group, dim };
        d->grad_placements[0] = (dt_grad_placement){ m->kv.replica_group, DT_GRAD_PARTIAL };
    } else if (letter) {
        d->shards[0] = (dt_shard_spec){ m->config.tp, dim };
    } else if (m->config.sp || r->shape[0] == '+') {
        d->grad_placements[0] = (dt_grad_placement){ m->config.tp, DT_GRAD_PARTIAL };
    }
}

/* Returns how many leading dimensions count matrices, for Muon: experts, and gate and up. */
static inline int gpt_matrices(gpt_config c, const gpt_param_row *r, int layer) {
    int n = 0, max = gpt_shape(c, r, layer).nd - 2;
    for (const char *letter = r->shape; *letter && n < max; letter++) {
        if (!gpt_is_letter(*letter)) continue;
        if (*letter != 'E' && *letter != '2') break;
        n++;
    }
    return n;
}

static inline int gpt_is_embedding(const gpt_param_row *r) {
    return r->at == offsetof(gpt, wte) && r->section == GPT_EMBEDDING;
}

/* Returns the field of the model that points to this parameter's tensor. */
static inline dt_tensor **gpt_slot(gpt *m, const gpt_param_row *r, int layer) {
    char *base = gpt_is_in_layer(r) ? (char *)&m->layer[layer] : (char *)m;
    return (dt_tensor **)(void *)(base + r->at);
}

static inline int gpt_top_k(gpt_config c) { return c.top_k > 0 ? c.top_k : c.experts < 2 ? 1 : 2; }

/* Returns how often the model has the parameter: once, or once for each layer that may have it. */
static inline int gpt_copies(gpt_config c, const gpt_param_row *r) {
    return gpt_is_in_layer(r) ? gpt_all_layers(c) : 1;
}

/* Returns the number of elements of all parameters. */
static inline int64_t gpt_param_count(gpt_config c) {
    int64_t sum = 0;
    for (const gpt_param_row *r = gpt_param_rows; r < gpt_param_rows + GPT_PARAM_ROWS; r++)
        for (int i = 0; i < gpt_copies(c, r); i++)
            sum += gpt_has_param(c, r, i) ? dt_count(gpt_shape(c, r, i)) : 0;
    return sum;
}

/* With LoRA only the adapters are trained. */
static inline int gpt_is_frozen(gpt_config c, const gpt_param_row *r) {
    return (c.lora.rank > 0 && !gpt_is_lora(r)) || r->kind == GPT_ROUTER_BIAS;
}

/* Local layers attend to a window of tokens, global layers to all (see gpt_parts). */
static inline int gpt_is_local(gpt_config c, int layer) {
    int every = c.parts.global_every;
    return c.parts.window > 0 && (every == 0 || (layer + 1) % every != 0);
}

/* Returns how many elements of a parameter one token multiplies with: all elements of a matrix, but
   only top_k of the E experts, and none of an embedding, which is looked up. The modules of
   multi-token prediction multiply by the head, too. */
static inline int64_t gpt_multiplied(gpt_config c, const gpt_param_row *r, int layer) {
    int matrix = r->kind == GPT_MATRIX || r->kind == GPT_BRANCH || gpt_is_lora(r);
    int64_t n = matrix && gpt_has_param(c, r, layer) ? dt_count(gpt_shape(c, r, layer)) : 0;
    if (n && gpt_dim(r, '|') >= 0) return n / c.experts * gpt_top_k(c);
    if (gpt_is_embedding(r) && !c.tied) return 0;
    return gpt_is_in_layer(r) ? n : n * (1 + c.mtp);
}

/* Returns the FLOPs of forward and backward per token, without recompute (arXiv:2204.02311,
   appendix B). A product y = x w^T costs 2 FLOPs per element of w and token, dx = dy w the same,
   and dw = dy^T x the same, but a frozen w has no dw:

       6 per element of a trained matrix, 4 per element of a frozen one
       12 H D T per layer: the products of queries with keys and of scores with values, forward and
       twice backward. In a local layer T is at most the window. As usual, the causal mask does not
       count. With latent attention D is the mean of the sizes of a query and of a value */
static inline double gpt_flops_per_token(gpt_config c) {
    double sum = 0, D = c.mla.kv_rank ? 0.5 * (double)(gpt_size(c, 'x') + c.mla.value_dim)
                                      : (double)gpt_head_dim(c);
    for (const gpt_param_row *r = gpt_param_rows; r < gpt_param_rows + GPT_PARAM_ROWS; r++)
        for (int i = 0; i < gpt_copies(c, r); i++)
            sum += (gpt_is_frozen(c, r) ? 4.0 : 6.0) * (double)gpt_multiplied(c, r, i);
    for (int i = 0; i < gpt_all_layers(c); i++) {
        int window = gpt_is_local(c, i) && c.parts.window < c.seq;
        sum += 12.0 * c.heads * D * (window ? c.parts.window : c.seq);
    }
    return sum;
}

/* Returns 1 if config.base is the storage of the parameter. */
static inline int gpt_is_base(const gpt_param_row *r) {
    return (r->kind == GPT_MATRIX || r->kind == GPT_BRANCH) && gpt_is_in_layer(r) &&
           r->section != GPT_EXPERT;
}

static inline dt_tensor *gpt_param(const gpt *m, const gpt_param_row *r, int layer) {
    gpt_config c = m->config;
    /* the standard deviation, scaled as in GPT-2 so that the sum of 2 L residual branches does not
       grow with L */
    double branch = 0.02 / sqrt(2.0 * c.layers);
    dt_shape shape = gpt_shape(c, r, layer);
    /* PEFT's kaiming_uniform with a = sqrt(5) is uniform in 1 / sqrt(inputs); b begins at zero, so
       that the adapter does not change the model at first */
    const dt_init init[] = { DT_ONES, DT_ZEROS, DT_NORMAL(0.01), DT_NORMAL(0.02), DT_NORMAL(branch),
        DT_ZEROS, DT_UNIFORM(1 / sqrt((double)shape.d[shape.nd - 1])), DT_ZEROS };
    int from_zero = r->kind == GPT_GAIN && c.parts.gemma; /* the gain is 1 + weight */
    dt_param_desc d = { .no_decay = r->kind == GPT_GAIN || r->kind == GPT_BIAS, .dtype = c.dtype };
    d.matrices = gpt_matrices(c, r, layer);
    d.frozen = gpt_is_frozen(c, r);
    if (gpt_is_base(r)) d.quant = c.base;
    if (r->kind == GPT_ROUTER_BIAS) d.dtype = c.dtype == DT_F64 ? DT_F64 : DT_F32;
    gpt_shard(m, r, &d);
    if (gpt_is_embedding(r) && m->tied)
        d.grad_placements[1] = (dt_grad_placement){ m->tied, DT_GRAD_PARTIAL };
    if (gpt_is_embedding(r) && (c.tied || c.mtp) && !m->tied) d.shared_stages = 1;
    return dt_param_at(m->ctx, r->name, shape, init[from_zero ? GPT_BIAS : r->kind], d);
}

static inline void gpt_register_section(gpt *m, int section, int layer) {
    for (const gpt_param_row *r = gpt_param_rows; r < gpt_param_rows + GPT_PARAM_ROWS; r++)
        if (gpt_section(r) == section && gpt_has_param(m->config, r, layer))
            *gpt_slot(m, r, layer) = gpt_param(m, r, layer);
}

/* ---- pipeline stages ---- */

static inline int gpt_items(gpt_config c) { return 2 * c.layers + 2; }
static inline int gpt_stages(gpt_config c) { return c.stage_begin ? c.stages : 1; }
/* Returns the first item of a stage. Stage s has items [first(s), first(s + 1)). */
static inline int gpt_stage_first(gpt_config c, int stage) {
    return c.stage_begin ? c.stage_begin[stage] : stage * gpt_items(c);
}
/* Returns the rank of pp that has a stage. */
static inline int gpt_stage_rank(gpt_config c, int stage) {
    return c.stage_rank ? c.stage_rank[stage] : stage % dt_comm_size(c.pp);
}
static inline int gpt_stage_is_mine(const gpt *m, int stage) {
    return gpt_stage_rank(m->config, stage) == dt_comm_rank(m->config.pp);
}
/* A dt_stage_map_fn: returns the chunk-th stage of a rank, in ascending order. */
static inline int gpt_stage_of(int rank, int chunk, void *user) {
    const gpt *m = (const gpt *)user;
    int stage = 0;
    while (gpt_stage_rank(m->config, stage) != rank || chunk-- > 0) stage++;
    return stage;
}

/* The modules of multi-token prediction belong to the head. */
static inline void gpt_register_mtp(gpt *m) {
    static const int sections[] = { GPT_MTP, GPT_ATTENTION, GPT_MLP };
    char scope[32];
    for (int layer = m->config.layers; layer < gpt_all_layers(m->config); layer++) {
        snprintf(scope, sizeof scope, "h.%d.", layer);
        dt_scope(m->ctx, scope);
        for (int i = 0; i < 3; i++) gpt_register_section(m, sections[i], layer);
        dt_scope(m->ctx, NULL);
    }
}

static inline void gpt_register_item(gpt *m, int item) {
    char scope[32];
    int layer = (item - 1) / 2, last = item == gpt_items(m->config) - 1;
    if (item == 0) gpt_register_section(m, GPT_EMBEDDING, 0);
    if (item > 0 && !last) {
        snprintf(scope, sizeof scope, "h.%d.", layer);
        dt_scope(m->ctx, scope);
        gpt_register_section(m, item % 2 ? GPT_ATTENTION : GPT_MLP, layer);
        dt_scope(m->ctx, NULL);
    }
    if (last) gpt_register_section(m, GPT_HEAD, 0);
    if (last) gpt_register_mtp(m);
    if (!last || !(m->config.tied || m->config.mtp)) return;
    /* Tied embeddings: if this rank does not have the embedding, its head is a second copy of wte
       with the same name and values. The gradients of both copies are partial over m->tied. In a V
       this rank has both, and the head uses wte in another stage (dt_param_desc.shared_stages). The
       modules of multi-token prediction read the same copy. */
    dt_tensor *wte = m->wte ? m->wte : gpt_param(m, gpt_param_rows, 0);
    if (m->config.tied) m->head = wte;
    if (m->config.mtp) m->mtp_wte = wte;
}

static inline int gpt_stages_bad(gpt_config c) {
    int stages = gpt_stages(c), bad = 0;
    if (!c.stage_begin) return c.stages > 1;
    for (int i = 0; i < stages && stages <= GPT_MAX_STAGES; i++)
        bad |= c.stage_begin[i] >= c.stage_begin[i + 1];
    for (int p = dt_comm_size(c.pp), rank = 0; c.stage_rank && stages % p == 0 && rank < p;
         rank++) {
        int mine = 0;
        for (int i = 0; i < stages; i++) mine += c.stage_rank[i] == rank;
        bad |= mine != stages / p;
    }
    return bad || stages < 1 || stages > GPT_MAX_STAGES || c.stage_begin[0] != 0 ||
           c.stage_begin[stages] != gpt_items(c);
}

static inline int gpt_config_bad(gpt_config c) {
    return c.layers < 0 || c.layers > GPT_MAX_LAYERS || c.width < 1 || c.heads < 1 ||
           (c.parts.head_dim == 0 && c.width % c.heads != 0) || c.kv_heads < 1 ||
           c.heads % c.kv_heads != 0 || c.ffn < 1 || c.seq < 1 || c.vocab < 1 ||
           c.recompute < GPT_RECOMPUTE_NONE || c.recompute > GPT_RECOMPUTE_FULL ||
           c.recompute_every < 0 || c.arch < GPT_GPT2 || c.arch > GPT_LLAMA ||
           (c.arch == GPT_LLAMA && c.parts.head_dim == 0 && c.width / c.heads % 2 != 0) ||
           !(c.norm_eps >= 0) || !(c.theta >= 0) || !(c.dropout >= 0 && c.dropout < 1) ||
           !(c.smoothing >= 0 && c.smoothing < 1);
}

/* Returns what is wrong with config.parts, or NULL. RoPE scaling is checked by dt_rope. */
static inline const char *gpt_parts_bad(gpt_config c) {
    const gpt_parts *p = &c.parts;
    if (c.arch == GPT_GPT2 &&
        (gpt_model_bits(c) != GPT_ONLY_2 || p->head_dim || p->window || p->rope.kind ||
            p->query_scalar != 0 || p->attn_soft_cap != 0 || p->logit_soft_cap != 0))
        return "only GPT_LLAMA has parts";
    if (p->gemma && c.experts) return "gemma has no experts";
    if (c.mla.kv_rank &&
        (p->head_dim || p->qkv_bias || p->qk_norm || p->gemma || p->local_theta != 0))
        return "latent attention has no head_dim, qkv_bias, qk_norm, local_theta or gemma";
    if (p->head_dim < 0 || p->head_dim % 2 != 0) return "head_dim must be even and above 0";
    if (p->window < 0 || p->global_every < 0) return "window and global_every must be at least 0";
    if (p->window == 0 && (p->global_every > 0 || p->local_theta != 0))
        return "global_every and local_theta need a window";
    if (p->rope.kind < DT_ROPE_UNSCALED || p->rope.kind > DT_ROPE_YARN)
        return "rope.kind is no DT_ROPE_*";
    if (!(p->local_theta >= 0 && p->query_scalar >= 0 && p->attn_soft_cap >= 0 &&
            p->logit_soft_cap >= 0))
        return "local_theta, query_scalar and the soft caps must be at least 0";
    return NULL;
}

static inline int gpt_experts_bad(gpt_config c) {
    if (c.experts == 0) return 0;
    return c.experts < 0 || c.experts % dt_comm_size(c.ep) != 0 || gpt_top_k(c) > c.experts ||
           c.moe_every < 0 || c.shared_experts < 0 || !(c.capacity >= 0) || !(c.balance >= 0) ||
           !(c.z >= 0) || !(c.router_bias >= 0);
}

/* Checks the fields that only models with parts of DeepSeek-V3 use. Returns 0, or an error after
   failing the context with the sizes that do not fit. */
static inline int gpt_deepseek_bad(dt_ctx *ctx, gpt_config c) {
    gpt_mla a = c.mla;
    int groups = c.expert_groups, others = a.q_rank | a.nope_dim | a.rope_dim | a.value_dim;
    int sizes = a.kv_rank < 0 || a.q_rank < 0 || a.nope_dim < 1 || a.rope_dim < 2 ||
                a.rope_dim % 2 != 0 || a.value_dim < 1 || a.value_dim > a.nope_dim + a.rope_dim;
    if (a.kv_rank ? sizes || c.arch != GPT_LLAMA || c.kv_heads != c.heads : others)
        return dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: latent attention of rank %d (queries %d), %d + %d elements of q and k "
            "with an even number in rotary pairs, %d of v, at most as many; arch %d, %d heads and "
            "%d of keys, which must be as many",
            a.kv_rank, a.q_rank, a.nope_dim, a.rope_dim, a.value_dim, c.arch, c.heads, c.kv_heads);
    if (groups < 0 || c.first_dense < 0 || c.moe_ffn < 0 || !(c.gate_scale >= 0) ||
        c.route < DT_ROUTE_SOFTMAX || c.route > DT_ROUTE_SIGMOID ||
        (groups > 0 && c.experts > 0 &&
            (c.experts % groups != 0 || c.top_groups < 1 || c.top_groups > groups ||
                gpt_top_k(c) > c.top_groups * (c.experts / groups))))
        return dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: %d experts in %d groups, of which each token uses %d with %d experts "
            "per token; the first %d layers dense, ffn of an expert %d, route %d, gates times %g",
            c.experts, groups, c.top_groups, gpt_top_k(c), c.first_dense, c.moe_ffn, c.route,
            c.gate_scale);
    if (c.mtp < 0 || c.mtp > GPT_MAX_MTP || c.layers + c.mtp > GPT_MAX_LAYERS ||
        !(c.mtp_weight >= 0) || (c.mtp && c.arch != GPT_LLAMA))
        return dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: %d modules of multi-token prediction (at most %d), weight %g, arch %d",
            c.mtp, GPT_MAX_MTP, c.mtp_weight, c.arch);
    return 0;
}

/* Returns the bits of the modules that can have an adapter. */
static inline unsigned gpt_lora_modules(gpt_config c) {
    unsigned modules = 0;
    for (const gpt_param_row *r = gpt_param_rows; r < gpt_param_rows + GPT_PARAM_ROWS; r++)
        if (gpt_is_lora(r) && r->models >> c.arch & 1) modules |= 1u << gpt_lora_module(r);
    return modules;
}

static inline int gpt_lora_bad(gpt_config c) {
    if (c.lora.rank == 0) return c.base != DT_QUANT_NONE;
    return c.mla.kv_rank > 0 || c.lora.rank < 0 || !(c.lora.alpha >= 0) ||
           !(c.lora.dropout >= 0 && c.lora.dropout < 1) || c.lora.modules == 0 ||
           (c.lora.modules & ~gpt_lora_modules(c)) != 0;
}

/* Checks the sizes of the model. Returns 0, or an error after failing the context with the values
   that do not fit. */
static inline int gpt_model_bad(dt_ctx *ctx, gpt_config c) {
    const gpt_parts *p = &c.parts;
    if (gpt_config_bad(c))
        return dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: layers %d, width %d, heads %d, kv_heads %d, ffn %d, seq %d, vocab %d, "
            "recompute %d every %d, arch %d, norm_eps %g, theta %g, dropout %g, smoothing %g",
            c.layers, c.width, c.heads, c.kv_heads, c.ffn, c.seq, c.vocab, c.recompute,
            c.recompute_every, c.arch, c.norm_eps, c.theta, c.dropout, c.smoothing);
    if (gpt_parts_bad(c))
        return dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: %s (head_dim %d, window %d, global_every %d, rope.kind %d, local_theta "
            "%g, query_scalar %g, soft caps %g and %g)",
            gpt_parts_bad(c), p->head_dim, p->window, p->global_every, p->rope.kind, p->local_theta,
            p->query_scalar, p->attn_soft_cap, p->logit_soft_cap);
    if (gpt_lora_bad(c))
        return dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: LoRA of rank %d, alpha %g, dropout %g on modules %#x, base %s: a base "
            "needs adapters, and %s has modules %#x",
            c.lora.rank, c.lora.alpha, c.lora.dropout, c.lora.modules, dt_quant_name(c.base),
            c.mla.kv_rank         ? "latent attention"
            : c.arch == GPT_LLAMA ? "a Llama"
                                  : "a GPT-2",
            c.mla.kv_rank ? 0 : gpt_lora_modules(c));
    return gpt_deepseek_bad(ctx, c);
}

/* Checks that the model fits the layout, as gpt_model_bad. */
static inline int gpt_layout_bad(dt_ctx *ctx, gpt_config c) {
    int p = dt_comm_size(c.pp), t = dt_comm_size(c.tp);
    if (gpt_experts_bad(c))
        return dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: %d experts over %d ranks of ep, %d per token, in every %d-th layer, "
            "%d shared, capacity %g, side losses %g and %g, router bias rate %g",
            c.experts, dt_comm_size(c.ep), gpt_top_k(c), c.moe_every, c.shared_experts, c.capacity,
            c.balance, c.z, c.router_bias);
    if (gpt_stages_bad(c) || gpt_stages(c) % p != 0)
        return dt_fail(ctx, DT_ERR_ARG,
            "gpt_register: %d stages over %d ranks of pp: stage_begin must rise from 0 to %d, and "
            "stage_rank must give each rank equally many",
            c.stages, p, gpt_items(c));
    if (c.heads % t != 0)
        return dt_fail(ctx, DT_ERR_ARG, "gpt_register: %d heads over %d ranks of tp", c.heads, t);
    return 0;
}

/* [collective: tp and pp] Registers every parameter of this rank's stages. dt_zero_make allocates
   and initializes the parameters later. An invalid config fails the context. */
static inline gpt gpt_register(dt_ctx *ctx, gpt_config c) {
    gpt m = { .config = c, .ctx = ctx };
    int rank = dt_comm_rank(c.pp);
    if (gpt_model_bad(ctx, c) || gpt_layout_bad(ctx, c)) return m;
    m.kv = dt_kv_split(ctx, c.tp, c.kv_heads);
    int first = gpt_stage_rank(c, 0), last = gpt_stage_rank(c, gpt_stages(c) - 1);
    if ((c.tied || c.mtp) && first != last) {
        m.tied = dt_comm_split(c.pp, rank == first || rank == last ? 0 : -1, rank, "tied");
        dt_comm_set_axis(m.tied, DT_AXIS_PP);
    }
    for (int stage = 0; stage < gpt_stages(c); stage++) {
        if (!gpt_stage_is_mine(&m, stage)) continue;
        dt_stage(ctx, stage);
        for (int i = gpt_stage_first(c, stage); i < gpt_stage_first(c, stage + 1); i++)
            gpt_register_item(&m, i);
    }
    dt_stage(ctx, 0);
    return m;
}

// ==== Forward ====================================================================================

/* The tokens of a forward pass: this rank's T/cp tokens of each sequence, in the order of
   dt_cp_token. All tensors are (B,T/cp) i32. The text in brackets is the default, which is used if
   the pointer is NULL. */
typedef struct gpt_tokens {
    dt_tensor *ids;
    /* position of each token in its document, for wpe, rotary embedding and causal mask [position
       in the sequence] */
    dt_tensor *positions;
    /* document number of each token, for sequences that pack several documents [one document per
       sequence] */
    dt_tensor *documents;
    /* index of each token among the step's tokens of all ranks, on which the dropout masks depend
       [index in this batch, from 0 to B T - 1] */
    dt_tensor *index;
    /* Number of sequences of the step over all ranks. The MoE side losses (load-balancing loss and
       z-loss) are means over these sequences. 0 means no side losses. */
    int64_t sequences;
    /* Step number, from 1. The dropout masks depend on it. 0 means no dropout and no label
       smoothing, as in evaluation. */
    uint64_t step;
    /* with cp: the result of dt_cp_make for these documents and positions [made from B, T and
       config.cp_kind] */
    dt_cp *context;
    /* With config.mtp, for each module k = 0, 1, .., as gpt_ahead fills them: next[k] (B,T) i32 is
       the id k + 1 positions after each token, and ahead[k] (B,T) i32 is module k's label, the id
       k + 2 positions after each token. Where ahead[k] is -1, the module has no loss, and next[k]
       may be any id. Modules from the first NULL in ahead on are not trained in this pass. */
    dt_tensor *next[GPT_MAX_MTP], *ahead[GPT_MAX_MTP];
} gpt_tokens;

/* KV cache: the keys and values of all earlier tokens. See section Generation below. */
typedef struct gpt_cache {
    gpt *model;
    dt_schedule *schedule; /* the pipeline's schedule; NULL if there is only one stage */
    int length;            /* tokens in the cache, at most config.seq */
    /* for each layer: shape (1,length,K,D), in memory for (1,seq,K,D); with latent attention k has
       the latents (1,length,1,kv_rank) and v the rotated keys (1,length,1,rope_dim) */
    dt_tensor k[GPT_MAX_LAYERS], v[GPT_MAX_LAYERS];
    void *data;
    size_t bytes;
    int32_t *positions; /* 0, 1, .. seq-1 */
} gpt_cache;

/* The arguments of a forward pass, which every block receives as `user`. */
typedef struct gpt_pass {
    gpt *model;
    int item, end; /* items to run: [item, end), see gpt_config.stage_begin */
    gpt_tokens tokens;
    dt_tensor *positions; /* tokens.positions, or its default if NULL */
    dt_tensor *index;     /* tokens.index of all tokens that tensor-parallel layers have */
    dt_placement outside; /* over tp: placement of activations outside tensor-parallel layers */
    gpt_cache *cache;     /* NULL in training */
} gpt_pass;

static inline int gpt_layer_at(const gpt_pass *r) { return (r->item - 1) / 2; }

/* one step of splitmix64 */
static inline uint64_t gpt_hash(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Dropout. Each place in the model that uses dropout has its own `site`: 0 for the embedding, then
   two numbers for each layer, then one number for each layer's shared experts. */
static inline dt_tensor *gpt_dropout(const gpt_pass *r, dt_tensor *x, int site) {
    double p = r->model->config.dropout;
    if (!x || p == 0 || r->tokens.step == 0) return x;
    uint64_t key =
        gpt_hash(gpt_hash(gpt_hash(dt_ctx_seed(x->ctx)) + r->tokens.step) + (uint64_t)site);
    return dt_dropout(x, p, key, r->tokens.index);
}

static inline dt_tensor *gpt_norm(const gpt *m, dt_tensor *x, dt_tensor *gain, dt_tensor *bias) {
    if (m->config.arch == GPT_GPT2) return dt_layernorm(x, gain, bias, m->config.norm_eps);
    return dt_rmsnorm_at(
        x, gain, (dt_rmsnorm_desc){ m->config.norm_eps, m->config.parts.gemma ? 1 : 0 });
}

/* Returns the LoRA adapter of a module of the current layer; one without `a` if there is none. Its
   dropout depends on the module and, as gpt_dropout, on seed, step and token. */
static inline dt_adapter gpt_adapter(const gpt_pass *r, int module) {
    const gpt_config *c = &r->model->config;
    const gpt_layer *l = &r->model->layer[gpt_layer_at(r)];
    dt_adapter d = { .a = l->lora_a[module], .b = l->lora_b[module] };
    if (!d.a) return d;
    d.scale = c->lora.alpha > 0 ? c->lora.alpha / c->lora.rank : 1;
    d.dropout = r->tokens.step ? c->lora.dropout : 0;
    d.tokens = r->index;
    /* after the sites of gpt_dropout */
    uint64_t site =
        (uint64_t)(3 * GPT_MAX_LAYERS + 1 + GPT_LORA_MODULES * gpt_layer_at(r) + module);
    d.key = gpt_hash(gpt_hash(gpt_hash(dt_ctx_seed(d.a->ctx)) + r->tokens.step) + site);
    return d;
}

/* x w^T + b, with the module's adapter if it has one. */
static inline dt_tensor *gpt_linear(
    const gpt_pass *r, dt_tensor *x, dt_tensor *w, dt_tensor *b, int activation, int module) {
    dt_adapter adapter = gpt_adapter(r, module);
    return dt_linear_at(x, w, b,
        (dt_linear_desc){ .activation = activation, .adapters = adapter.a ? &adapter : NULL });
}

/* Residual branch, x + dropout(norm(h w^T + b)), where `norm` is NULL except for Gemma. Without
   norm and dropout one op computes the product and the addition. */
static inline dt_tensor *gpt_branch(const gpt_pass *r, dt_tensor *x, dt_tensor *h, dt_tensor *w,
    dt_tensor *b, dt_tensor *norm, int module, int site) {
    dt_comm *tp = r->model->config.tp;
    dt_adapter adapter = gpt_adapter(r, module);
    dt_linear_desc d = { .adapters = adapter.a ? &adapter : NULL };
    int plain = r->model->config.dropout == 0 || r->tokens.step == 0;
    if (plain && !norm) d.residual = x;
    h = dt_row_linear_at(h, w, b, d, tp, r->outside);
    if (d.residual) return h;
    if (norm) h = gpt_norm(r->model, h, norm, NULL);
    return dt_add(x, dt_last_use(gpt_dropout(r, dt_last_use(h), site)));
}

static inline dt_tensor *gpt_enter(const gpt_pass *r, dt_tensor *x) {
    return dt_tp_enter(x, r->model->config.tp, r->outside);
}

/* Appends the new keys (or values) `more` to the cached keys (or values) `all`. Returns `all`. */
static inline dt_tensor *gpt_cache_append(gpt_cache *c, dt_tensor *all, dt_tensor *more) {
    if (!more) return NULL;
    const dt_kernels *table = dt_ctx_kernels(more->ctx);
    size_t row = (size_t)(more->shape.d[2] * more->shape.d[3]) * dt_dtype_size(more->dtype);
    char *at = (char *)all->data + (size_t)c->length * row;
    if (table->move(at, more->data, (size_t)more->shape.d[1] * row, dt_ctx_stream(more->ctx)) !=
        DT_OK) {
        dt_fail(more->ctx, DT_ERR_DEVICE, "gpt_cache_append: %lld tokens after %d",
            (long long)more->shape.d[1], c->length);
        return NULL;
    }
    all->shape = more->shape;
    all->shape.d[1] += c->length;
    return all;
}

/* The mask and the scores of a layer; the positions and documents are those of dt_cp_make with
   cp. */
static inline dt_attn_desc gpt_attn_desc(const gpt_pass *r) {
    gpt_config c = r->model->config;
    dt_attn_desc d = { .window = gpt_is_local(c, gpt_layer_at(r)) ? c.parts.window : 0,
        .soft_cap = c.parts.attn_soft_cap };
    if (!r->tokens.context) d.positions = r->tokens.positions, d.documents = r->tokens.documents;
    if (c.parts.query_scalar > 0) d.scale = 1 / sqrt(c.parts.query_scalar);
    return d;
}

/* A tensor of zeros whose dimension 2, the heads, is sharded over tp. */
static inline dt_tensor *gpt_zeros(const gpt *m, dt_shape shape) {
    dt_tensor *t = dt_new(m->ctx, m->config.dtype, shape);
    if (!t) return NULL;
    dt_fill_args a = { .dtype = t->dtype, .out = t->data, .count = (size_t)dt_count(shape) };
    if (dt_ctx_kernels(m->ctx)->fill(&a, dt_ctx_stream(m->ctx)) == DT_OK)
        return dt_place(t, m->config.tp, DT_SHARD(2));
    dt_fail(m->ctx, DT_ERR_DEVICE, "gpt_zeros: %lld elements", (long long)dt_count(shape));
    return NULL;
}

static inline dt_tensor *gpt_join(dt_tensor *a, dt_tensor *b, int dim) {
    dt_tensor *both[2] = { a, b };
    return a && b ? dt_concat(both, 2, dim) : NULL;
}

/* Multi-head latent attention (MLA) without the output projection,
   (B,T,C) -> (B,T,H value_dim/tp). The norm's output n becomes two latents, which every rank of tp
   computes in full, outside of the tensor-parallel region; only the latents enter it, and heads are
   sharded inside:

       n --q_a--> norm --f--> q_b --> q of each head: nope_dim | rope_dim, rotated
       n --kv_a-> latent: norm --f--> kv_b --> k of each head: nope_dim, and v: value_dim
              \-> rope_dim --f--> rotated: the last elements of k, the same for every head

   Elements 2 i and 2 i + 1 of the rope_dim elements are a pair, as in DeepSeek's files;
   transformers computes with the pairs in another order, which changes no score. The scores are
   scaled by 1/sqrt(nope_dim + rope_dim), or by 1/sqrt(parts.query_scalar). v is padded with zeros
   to the size of k, because dt_attention has one size; context parallelism sends the padded v. In
   generation the cache has only latents and rotated keys, and kv_b multiplies all of them for each
   new token. */
static inline dt_tensor *gpt_latent_heads(const gpt_pass *r, dt_tensor *x) {
    const double eps = 1e-6; /* of the latents' norms, as in DeepSeek's code; not config.norm_eps */
    const gpt *m = r->model;
    const gpt_layer *l = &m->layer[gpt_layer_at(r)];
    const gpt_mla a = m->config.mla;
    const dt_rope_desc rope = {
        .theta = m->config.theta, .interleaved = 1, .scaling = m->config.parts.rope
    };
    dt_tensor *n = gpt_norm(m, x, l->ln_1_gain, NULL);
    dt_tensor *q = a.q_rank ? dt_rmsnorm(dt_linear(n, l->q_a, NULL), l->q_a_norm, eps) : n;
    /* (B,T,H,nope_dim + rope_dim) */
    q = dt_linear(gpt_enter(r, q), l->q, NULL);
    q = gpt_join(dt_slice(q, 3, 0, a.nope_dim),
        dt_rope(dt_slice(q, 3, a.nope_dim, a.rope_dim), r->positions, rope), 3);
    dt_tensor *kv = dt_linear(n, l->kv_a, NULL);
    dt_tensor *latent = gpt_enter(r, dt_rmsnorm(dt_slice(kv, 2, 0, a.kv_rank), l->kv_a_norm, eps));
    dt_tensor *shared = gpt_enter(r, dt_slice(kv, 2, a.kv_rank, a.rope_dim));
    if (!q || !latent || !shared) return NULL;
    int64_t B = q->shape.d[0], T = q->shape.d[1], H = q->shape.d[2];
    /* (B,T,1,rope_dim), (B,T,1,kv_rank) */
    shared = dt_rope(dt_reshape(shared, DT_SHAPE(B, T, 1, a.rope_dim)), r->positions, rope);
    latent = dt_reshape(latent, DT_SHAPE(B, T, 1, a.kv_rank));
    if (r->cache) {
        latent = gpt_cache_append(r->cache, &r->cache->k[gpt_layer_at(r)], latent);
        shared = gpt_cache_append(r->cache, &r->cache->v[gpt_layer_at(r)], shared);
    }
    if (!latent || !shared) return NULL;
    int64_t all = latent->shape.d[1], padding = a.nope_dim + a.rope_dim - a.value_dim;
    /* (B,all,H,nope_dim + value_dim) */
    kv = dt_linear(dt_reshape(latent, DT_SHAPE(B, all, a.kv_rank)), l->kv_b, NULL);
    dt_tensor *v = dt_slice(kv, 3, a.nope_dim, a.value_dim);
    dt_tensor *k = gpt_join(dt_slice(kv, 3, 0, a.nope_dim),
        dt_add(shared, gpt_zeros(m, DT_SHAPE(B, all, H, a.rope_dim))), 3);
    if (padding > 0) v = gpt_join(v, gpt_zeros(m, DT_SHAPE(B, all, H, padding)), 3);
    dt_attn_desc desc = gpt_attn_desc(r);
    dt_tensor *heads = r->tokens.context ? dt_cp_attention_at(q, k, v, r->tokens.context, desc)
                                         : dt_attention(q, k, v, desc);
    if (heads && padding > 0) heads = dt_slice(heads, 3, 0, a.value_dim);
    return heads ? dt_reshape(heads, DT_SHAPE(B, T, H * a.value_dim)) : NULL;
}

/* QK-norm and rotary embedding of q or k, (B,T,H,D); `gain` (D) is NULL without QK-norm. */
static inline dt_tensor *gpt_rotate(const gpt_pass *r, dt_tensor *x, dt_tensor *gain) {
    gpt_config c = r->model->config;
    dt_rope_desc d = { .theta = c.theta, .scaling = c.parts.rope };
    if (c.arch == GPT_GPT2) return x;
    if (gain) x = gpt_norm(r->model, x, gain, NULL);
    if (gpt_is_local(c, gpt_layer_at(r)) && c.parts.local_theta > 0)
        d = (dt_rope_desc){ .theta = c.parts.local_theta };
    return dt_rope(dt_last_use(x), r->positions, d);
}

/* A layer's attention without the output projection, (B,T,C) -> (B,T,H*D/tp). Selective recompute
   recomputes this function. In the shapes below, H and K are the numbers of this rank's heads, and
   T is the number of this rank's tokens. */
static inline dt_tensor *gpt_heads(dt_tensor *x, void *user) {
    const gpt_pass *r = (const gpt_pass *)user;
    const gpt *m = r->model;
    const gpt_layer *l = &m->layer[gpt_layer_at(r)];
    if (m->config.mla.kv_rank) return gpt_latent_heads(r, x);
    dt_tensor *n = gpt_enter(r, gpt_norm(m, x, l->ln_1_gain, l->ln_1_bias));
    /* (B,T,H,D) */
    dt_tensor *q = gpt_linear(r, n, l->q, l->q_bias, DT_ACT_NONE, GPT_LORA_Q);
    q = gpt_rotate(r, q, l->q_norm);
    /* (B,T,K,D) */
    dt_tensor *k = gpt_linear(r, n, l->k, l->k_bias, DT_ACT_NONE, GPT_LORA_K);
    dt_tensor *v = gpt_linear(r, n, l->v, l->v_bias, DT_ACT_NONE, GPT_LORA_V);
    k = gpt_rotate(r, k, l->k_norm);
    if (r->cache) {
        /* the keys and values of all tokens so far, (1,length+T,K,D) */
        k = gpt_cache_append(r->cache, &r->cache->k[gpt_layer_at(r)], k);
        v = gpt_cache_append(r->cache, &r->cache->v[gpt_layer_at(r)], v);
    }
    /* (B,T,H,D) */
    dt_tensor *heads = r->tokens.context
                           ? dt_cp_attention_at(q, k, v, r->tokens.context, gpt_attn_desc(r))
                           : dt_attention(q, k, v, gpt_attn_desc(r));
    if (!heads) return NULL;
    const int64_t *d = heads->shape.d;
    /* dt_reshape cannot tell which dimension is sharded if there is one token or one head, but the
       dropout of an adapter needs to know */
    return dt_place(
        dt_reshape(heads, DT_SHAPE(d[0], d[1], d[2] * d[3])), m->config.tp, DT_SHARD(2));
}

/* The MLP's hidden layer, (B,T,C) -> (B,T,F/tp). */
static inline dt_tensor *gpt_hidden(const gpt_pass *r, const gpt_layer *l, dt_tensor *n) {
    if (r->model->config.arch == GPT_GPT2)
        return gpt_linear(r, n, l->fc, l->fc_bias, DT_ACT_GELU, GPT_LORA_FC);
    /* one product computes gate and up, (B,T,2,F) */
    dt_adapter adapters[2] = { gpt_adapter(r, GPT_LORA_GATE), gpt_adapter(r, GPT_LORA_UP) };
    int adapted = adapters[0].a || adapters[1].a;
    dt_tensor *h = dt_linear_at(
        n, l->gate_up, NULL, (dt_linear_desc){ .adapters = adapted ? adapters : NULL, .parts = 2 });
    return r->model->config.parts.gemma ? dt_geglu(h) : dt_swiglu(h);
}

/* The attention half of a layer, (B,T,C) -> (B,T,C). */
static inline dt_tensor *gpt_attention_forward(const gpt_pass *r, dt_tensor *x) {
    const gpt *m = r->model;
    const gpt_layer *l = &m->layer[gpt_layer_at(r)];
    int is_recomputed = m->config.recompute == GPT_RECOMPUTE_SELECTIVE;
    dt_tensor *heads = x && is_recomputed ? dt_block_at(x->ctx, gpt_heads, x, (void *)r,
                                                (dt_block_desc){ .recompute = 1 })
                                          : gpt_heads(x, (void *)r);
    return gpt_branch(r, x, heads, l->attn_proj, l->attn_proj_bias, l->attn_norm, GPT_LORA_O,
        1 + 2 * gpt_layer_at(r));
}

/* Mixture of experts (MoE): router, token dispatch, experts, token combine. n is the output of the
   norm in placement r->outside, and `inside` is the result of gpt_enter(r, n), which expert folding
   does not need. Returns the output of the experts in placement r->outside. Generation has too few
   tokens to shard them over tp: with expert folding all ranks of tp send the same tokens. */
static inline dt_tensor *gpt_moe_forward(
    const gpt_pass *r, gpt_layer *l, dt_tensor *n, dt_tensor *inside) {
    const gpt_config *c = &r->model->config;
    int64_t sequences = r->tokens.sequences;
    int folded = c->expert_tp > 0;
    dt_placement routed = folded && !r->cache ? DT_SHARD(1) : r->outside;
    if (folded) inside = n = dt_redistribute(n, c->tp, r->outside, routed);
    dt_route_desc d = { .k = gpt_top_k(*c),
        .capacity = r->cache ? 0 : c->capacity,
        .balance = sequences ? c->balance : 0,
        .z = sequences ? c->z : 0,
        .sequences = sequences,
        .bias = l->router_bias,
        .tp = c->tp,
        .outside = routed,
        .cp = r->cache ? NULL : c->cp,
        .kind = c->cp_kind,
        .counts = sequences ? &l->route : NULL,
        .scores = c->route,
        .groups = c->expert_groups,
        .top_groups = c->top_groups,
        .raw_gates = c->raw_gates,
        .scale = c->gate_scale,
        .expert_tp = c->expert_tp };
    dt_routing *to = dt_route(n, l->router, d);
    dt_tensor *h = dt_dispatch(inside, to, folded ? c->dispatch : c->ep);
    if (c->arch == GPT_LLAMA)
        h = dt_swiglu(dt_expert_linear(h, to, l->experts_gate_up, NULL, (dt_expert_desc){ 0 }));
    else
        h = dt_expert_linear(h, to, l->experts_fc, l->experts_fc_bias,
            (dt_expert_desc){ .activation = DT_ACT_GELU });
    h = dt_expert_linear(h, to, l->experts_proj, l->experts_proj_bias,
        (dt_expert_desc){ .row_parallel = folded ? c->expert_tp_group : c->tp });
    return dt_redistribute(dt_combine(h, to), c->tp, folded ? routed : DT_PARTIAL, r->outside);
}

/* The MLP half of a layer, dense or MoE, (B,T,C) -> (B,T,C). */
static inline dt_tensor *gpt_mlp_forward(const gpt_pass *r, dt_tensor *x) {
    gpt *m = r->model;
    int layer = gpt_layer_at(r), site = 2 + 2 * layer;
    gpt_layer *l = &m->layer[layer];
    int needs_region =
        !gpt_is_moe(m->config, layer) || m->config.shared_experts > 0 || m->config.expert_tp == 0;
    dt_tensor *n = gpt_norm(m, x, l->ln_2_gain, l->ln_2_bias),
              *inside = needs_region ? gpt_enter(r, n) : NULL;
    if (!gpt_is_moe(m->config, layer))
        return gpt_branch(r, x, gpt_hidden(r, l, inside), l->mlp_proj, l->mlp_proj_bias,
            l->mlp_norm, GPT_LORA_DOWN, site);
    x = dt_add(x, gpt_dropout(r, gpt_moe_forward(r, l, n, inside), site));
    if (m->config.shared_experts == 0) return x;
    site = 2 * gpt_all_layers(m->config) + 1 + layer;
    return gpt_branch(
        r, x, gpt_hidden(r, l, inside), l->mlp_proj, l->mlp_proj_bias, NULL, GPT_LORA_DOWN, site);
}

/* Runs one layer, or only its attention or its MLP if the stage has only this half. dt_block_at
   calls this function. */
static inline dt_tensor *gpt_layer_forward(dt_tensor *x, void *user) {
    gpt_pass *r = (gpt_pass *)user, mlp = *r;
    if (r->item % 2 == 0) return gpt_mlp_forward(r, x);
    x = gpt_attention_forward(r, x);
    mlp.item++;
    return mlp.item < r->end ? gpt_mlp_forward(&mlp, x) : x;
}

/* Runs items [item, end) of the pass, each layer as a block of its own. */
static inline dt_tensor *gpt_layers_forward(dt_tensor *x, void *user) {
    gpt_pass r = *(const gpt_pass *)user;
    int end = r.end;
    for (; x && r.item < end; r.item = r.end) {
        r.end = 2 * gpt_layer_at(&r) + 3 < end ? 2 * gpt_layer_at(&r) + 3 : end;
        x = dt_block_at(
            x->ctx, gpt_layer_forward, x, &r, (dt_block_desc){ .user_bytes = sizeof r });
    }
    return x;
}

/* Returns a tensor (B,T) with an entry for each of this rank's tokens: the token's position in its
   sequence or, if `in_batch` is set, its index among the tokens of all B sequences. */
static inline dt_tensor *gpt_token_positions(const gpt *m, int64_t B, int64_t T, int in_batch) {
    int c = dt_comm_size(m->config.cp);
    int32_t *at = (int32_t *)malloc((size_t)(B * T) * sizeof *at + 1);
    if (!at) {
        dt_fail(m->ctx, DT_ERR_MEM, "gpt_token_positions: %lld sequences of %lld tokens",
            (long long)B, (long long)T);
        return NULL;
    }
    for (int64_t i = 0; i < B * T; i++)
        at[i] =
            (int32_t)(dt_cp_token(m->config.cp_kind, T * c, c, dt_comm_rank(m->config.cp), i % T) +
                      (in_batch ? i / T * T * c : 0));
    dt_tensor *positions = dt_input(m->ctx, DT_I32, DT_SHAPE(B, T), at);
    free(at);
    return positions;
}

/* Token embedding, for GPT-2 plus the position embedding, and dropout: (B,T) -> (B,T,C). Runs as a
   block if memory can be freed when the block ends (see gpt_layers_and_norm). */
static inline dt_tensor *gpt_embed(dt_tensor *x, void *user) {
    const gpt_pass *r = (const gpt_pass *)user;
    gpt *m = r->model;
    (void)x;
    x = dt_vocab_embedding(m->wte, r->tokens.ids, m->config.tp, r->outside);
    if (m->config.parts.gemma) x = dt_affine(x, sqrt((double)m->config.width), 0);
    if (m->config.arch == GPT_GPT2) {
        dt_tensor *here = dt_redistribute(r->positions, m->config.tp, DT_REPLICATE, r->outside);
        x = dt_add(dt_last_use(x), dt_embedding(m->wpe, here));
    }
    return gpt_dropout(r, x, 0);
}

/* Returns the arguments of a forward pass over all items. Replaces NULL fields of the tokens by
   their defaults. Under sp, shards the dropout index over tp. */
static inline gpt_pass gpt_pass_make(gpt *m, gpt_tokens t, gpt_cache *cache) {
    gpt_pass r = { .model = m,
        .end = gpt_items(m->config),
        .tokens = t,
        .positions = t.positions,
        .outside = DT_REPLICATE,
        .cache = cache };
    int64_t B = t.ids->shape.d[0], T = t.ids->shape.d[1];
    if (!cache) dt_place(t.ids, m->config.cp, DT_SHARD(1));
    if (m->config.sp && dt_comm_size(m->config.tp) > 1 && !cache) r.outside = DT_SHARD(1);
    if (!r.positions) r.positions = gpt_token_positions(m, B, T, 0);
    if (dt_comm_size(m->config.cp) > 1 && (t.documents || t.positions) && !t.context && !cache)
        dt_fail(m->ctx, DT_ERR_ARG,
            "gpt: with cp, documents and positions also need a context (dt_cp_make) of all ranks' "
            "tokens");
    if (dt_comm_size(m->config.cp) > 1 && !cache && !t.context) {
        dt_cp_desc d = {
            .kind = m->config.cp_kind, .batch = B, .tokens = T * dt_comm_size(m->config.cp)
        };
        r.tokens.context = dt_cp_make(m->ctx, m->config.cp, d);
    }
    if ((m->config.dropout > 0 || m->config.lora.dropout > 0) && t.step) {
        if (!t.index) r.tokens.index = gpt_token_positions(m, B, T, 1);
        r.index = r.tokens.index;
        r.tokens.index = dt_redistribute(r.tokens.index, m->config.tp, DT_REPLICATE, r.outside);
    }
    return r;
}

/* Runs items [r.item, r.end) (see gpt_config.stage_begin). x is the input of item r.item; it is
   NULL if r.item is 0. Returns the output (B,T,C) of the last of these items; under sp T is
   sharded. Of the head, runs only the final norm, not the matrix product. The embedding runs as a
   block if memory can be freed when the block ends: under tp the rows before their sum over tp, or
   at ZeRO-3 an embedding table that this stage does not also use as its head. With
   GPT_RECOMPUTE_FULL and recompute_every = k, layers i * k to i * k + k - 1 are recomputed
   together; if the stage has only some of these layers, they are recomputed together. */
static inline dt_tensor *gpt_layers_and_norm(gpt_pass r, dt_tensor *x) {
    gpt *m = r.model;
    int block = dt_comm_size(m->config.tp) > 1 || !m->config.tied || gpt_stages(m->config) > 1;
    int full = m->config.recompute == GPT_RECOMPUTE_FULL, every = m->config.recompute_every;
    int last = gpt_items(m->config) - 1, end = r.end < last ? r.end : last, head = r.end > last;
    if (every < 1) every = 1;
    if (r.item == 0) x = block ? dt_block(m->ctx, gpt_embed, NULL, &r) : gpt_embed(NULL, &r);
    if (r.item == 0) r.item++;
    for (; x && r.item < end; r.item = r.end) {
        int next =
            2 * ((full ? gpt_layer_at(&r) / every * every + every : gpt_layer_at(&r) + 1)) + 1;
        r.end = next < end ? next : end;
        int several = gpt_layer_at(&r) != (r.end - 2) / 2;
        x = dt_block_at(m->ctx, several ? gpt_layers_forward : gpt_layer_forward, x, &r,
            (dt_block_desc){ .recompute = full, .user_bytes = sizeof r });
    }
    return head ? gpt_norm(m, x, m->ln_f_gain, m->ln_f_bias) : x;
}

/* The logits of this rank's shard of the vocabulary, soft-capped if config asks for it. */
static inline dt_tensor *gpt_logit_shard(const gpt_pass *r, dt_tensor *x) {
    double cap = r->model->config.parts.logit_soft_cap;
    x = dt_linear(gpt_enter(r, x), r->model->head, NULL);
    return cap > 0 ? dt_affine(dt_tanh(dt_affine(x, 1 / cap, 0)), cap, 0) : x;
}

/* Computes the logits, (..,C) -> (..,V), and gathers their shards along V over tp. */
static inline dt_tensor *gpt_head(const gpt_pass *r, dt_tensor *x) {
    const gpt *m = r->model;
    x = gpt_logit_shard(r, x);
    if (!x || dt_comm_size(m->config.tp) == 1) return x;
    int last = x->shape.nd - 1;
    return dt_slice(
        dt_redistribute(x, m->config.tp, DT_SHARD(last), DT_REPLICATE), last, 0, m->config.vocab);
}

/* Computes the logits (B,T,V) of tokens (B,T), for a model with one stage. */
static inline dt_tensor *gpt_logits_at(gpt *m, gpt_tokens t) {
    if (!t.ids) return NULL;
    gpt_pass r = gpt_pass_make(m, t, NULL);
    return gpt_head(&r, gpt_layers_and_norm(r, NULL));
}

/* The arguments of a module of multi-token prediction. */
typedef struct gpt_mtp_pass {
    gpt_pass pass;  /* whose item is the attention of the module's layer */
    dt_tensor *ids; /* (B,T/cp): gpt_tokens.next[k], the tokens whose embedding the module reads */
} gpt_mtp_pass;

/* Multi-token prediction: module k of D, for k = 0 .. D - 1, (B,T,C) -> (B,T,C). x is the output of
   the final norm, or of module k - 1. The module predicts token i + k + 2 at position i, where the
   model itself predicts token i + 1, so it also gets the embedding e of token i + k + 1:

       x' = layer(eh_proj [enorm(e), hnorm(x)])      logits = head mtp_norm(x')

   Embedding and head are those of the model. The order of the concatenation, and that x has passed
   the final norm, are those of DeepSeek's files and of transformers. */
static inline dt_tensor *gpt_mtp_forward(dt_tensor *x, void *user) {
    gpt_mtp_pass *u = (gpt_mtp_pass *)user;
    gpt *m = u->pass.model;
    const gpt_layer *l = &m->layer[gpt_layer_at(&u->pass)];
    dt_tensor *e = dt_vocab_embedding(m->mtp_wte, u->ids, m->config.tp, u->pass.outside);
    dt_tensor *both = gpt_join(gpt_norm(m, e, l->enorm, NULL), gpt_norm(m, x, l->hnorm, NULL), 2);
    x = gpt_layer_forward(dt_linear(both, l->eh_proj, NULL), &u->pass);
    return gpt_norm(m, x, l->mtp_norm, NULL);
}

/* Attaches the losses of the modules to x, the output of the final norm, with the weight
   mtp_weight / D each, and adds their mean to m->mtp_loss. Each loss is a sum over the labels >= 0
   of the module, divided by `denominator`. Returns x. */
static inline dt_tensor *gpt_mtp_losses(
    gpt_pass r, dt_tensor *x, double denominator, dt_loss_desc d) {
    gpt *m = r.model;
    gpt_config c = m->config;
    dt_tensor *h = x;
    for (int k = 0; k < c.mtp && h && r.tokens.ahead[k]; k++) {
        gpt_mtp_pass u = { r, dt_place(r.tokens.next[k], c.cp, DT_SHARD(1)) };
        u.pass.item = 2 * (c.layers + k) + 1;
        u.pass.end = u.pass.item + 2;
        h = dt_block_at(m->ctx, gpt_mtp_forward, h, &u,
            (dt_block_desc){
                .recompute = c.recompute == GPT_RECOMPUTE_FULL, .user_bytes = sizeof u });
        dt_tensor *loss = dt_vocab_linear_cross_entropy(
            h, m->head, r.tokens.ahead[k], denominator, d, c.tp, r.outside);
        if (!loss || !dt_loss(x, loss, c.mtp_weight / c.mtp)) return NULL;
        m->mtp_loss += dt_item(loss) / c.mtp;
    }
    return h ? x : NULL;
}

/* [local] Fills next and ahead (B,T) for module k from the ids and labels (B,T) of whole sequences
   in host memory: the id and the label k + 1 positions later, or 0 and -1 beyond the end of the
   sequence or of its document. documents (B,T): document numbers as in gpt_tokens, or NULL. Call it
   before dt_cp_shard. */
static inline void gpt_ahead(const int32_t *ids, const int32_t *labels, const int32_t *documents,
    int64_t B, int64_t T, int k, int32_t *next, int32_t *ahead) {
    for (int64_t i = 0; i < B * T; i++) {
        int inside = i % T + k + 1 < T && (!documents || documents[i + k + 1] == documents[i]);
        next[i] = inside ? ids[i + k + 1] : 0;
        ahead[i] = inside ? labels[i + k + 1] : -1;
    }
}

/* Runs one pipeline stage. x is the output of the previous stage, or NULL at stage 0. Returns the
   input of the next stage. The last stage returns the loss instead: the sum of the cross-entropies
   over all labels (B,T) i32 that are >= 0, divided by `denominator`. One op computes head and
   cross-entropy, so the complete logits are never in memory, unless they are soft-capped. The
   losses of multi-token prediction are not in the loss, only in its gradient. */
static inline dt_tensor *gpt_stage_at(
    gpt *m, int stage, dt_tensor *x, gpt_tokens t, dt_tensor *labels, double denominator) {
    dt_loss_desc d = { .smoothing = t.step ? m->config.smoothing : 0 };
    if (!t.ids) return NULL;
    gpt_pass r = gpt_pass_make(m, t, NULL);
    r.item = gpt_stage_first(m->config, stage);
    r.end = gpt_stage_first(m->config, stage + 1);
    /* nothing is known about what dt_pipe_run has received */
    x = dt_place(dt_place(x, m->config.tp, r.outside), m->config.cp, DT_SHARD(1));
    x = gpt_layers_and_norm(r, x);
    if (stage + 1 < gpt_stages(m->config)) return x;
    x = gpt_mtp_losses(r, x, denominator, d);
    if (m->config.parts.logit_soft_cap > 0) {
        d.vocab = m->config.vocab;
        return dt_vocab_cross_entropy(gpt_logit_shard(&r, x), labels, denominator, d, m->config.tp);
    }
    return dt_vocab_linear_cross_entropy(
        x, m->head, labels, denominator, d, m->config.tp, r.outside);
}

/* Returns the loss of a model with one stage. */
static inline dt_tensor *gpt_loss_at(gpt *m, gpt_tokens t, dt_tensor *labels, double denominator) {
    return gpt_stage_at(m, 0, NULL, t, labels, denominator);
}

/* [collective: groups, at ZeRO-3 also the data group] Balances the load of the experts; call it
   after each step if config.router_bias > 0. Lowers the router bias of each expert that got more
   tokens than the mean, and raises the bias of each expert that got fewer. Takes the token counts
   from layer[].route.experts, the caller's arrays (E), and then clears them. `groups` has n
   elements: the groups whose ranks route different tokens, which are mesh.data and, under sp and
   with expert folding, tp. */
static inline dt_status gpt_balance(gpt *m, dt_comm *const *groups, int n) {
    for (int i = 0; i < gpt_all_layers(m->config) && dt_error(m->ctx) == DT_OK; i++) {
        gpt_layer *l = &m->layer[i];
        if (!l->router_bias) continue;
        dt_route_update_bias(l->router_bias, l->route.experts, m->config.router_bias, groups, n);
        memset(l->route.experts, 0, (size_t)m->config.experts * sizeof *l->route.experts);
    }
    return dt_error(m->ctx);
}

/* As gpt_logits_at and gpt_loss_at, for ids (B,T) alone: the tokens have no step number, so there
   is no dropout and no label smoothing. */
static inline dt_tensor *gpt_logits(gpt *m, dt_tensor *ids) {
    return gpt_logits_at(m, (gpt_tokens){ .ids = ids });
}
static inline dt_tensor *gpt_loss(gpt *m, dt_tensor *ids, dt_tensor *labels, double denominator) {
    return gpt_loss_at(m, (gpt_tokens){ .ids = ids }, labels, denominator);
}

// ==== Generation =================================================================================

/* [collective: tp, pp] KV cache. A token's keys and values do not depend on later tokens. So the
   cache keeps the keys and values of all earlier tokens: 2 L seq K D elements, or with latent
   attention L seq (kv_rank + rope_dim) on every rank of tp. For a new token, every matrix product
   then computes only one row, and attention computes only one query:

       keys   [k0 k1 k2 .. k(length-1) | free ..  seq]      the new token's key goes to row `length`

   New rows are written in place into memory that is allocated once. Concatenating tensors would
   copy all rows for every token. Every rank of tp and pp caches the keys and values of its own
   heads and layers, and every rank gets the sampled token. The ranks of cp do not share the work:
   each rank computes all tokens, so it is enough to generate on one rank of cp. Between
   gpt_cache_open and gpt_cache_close the tape records nothing. */
static inline void gpt_cache_close(gpt_cache *c) {
    dt_ctx *ctx = c->model->ctx;
    dt_free(ctx, DT_MEM_ACTS, c->data, c->bytes);
    dt_free(ctx, DT_MEM_HOST, c->positions, (size_t)c->model->config.seq * sizeof(int32_t));
    dt_schedule_free(c->schedule);
    dt_no_grad(ctx, 0);
    c->data = NULL;
    c->positions = NULL;
}

static inline dt_status gpt_cache_open(gpt_cache *c, gpt *m) {
    gpt_config g = m->config;
    int64_t D = g.mla.kv_rank ? gpt_size(g, 'x') : gpt_head_dim(g);
    size_t token = (size_t)g.seq * dt_dtype_size(g.dtype), one[2];
    for (int i = 0; i < 2; i++) one[i] = token * (size_t)(m->kv.heads * D);
    if (g.mla.kv_rank)
        one[0] = token * (size_t)g.mla.kv_rank, one[1] = token * (size_t)g.mla.rope_dim;
    memset(c, 0, sizeof *c);
    c->model = m;
    /* the cache has only the layers of this rank's stages */
    for (int i = 0; i < g.layers; i++) c->bytes += m->layer[i].q ? one[0] + one[1] : 0;
    dt_no_grad(m->ctx, 1);
    c->data = dt_alloc(m->ctx, DT_MEM_ACTS, c->bytes, "keys and values");
    c->positions =
        (int32_t *)dt_alloc(m->ctx, DT_MEM_HOST, (size_t)g.seq * sizeof(int32_t), "positions");
    for (int t = 0; t < g.seq && c->positions; t++) c->positions[t] = t;
    char *at = (char *)c->data;
    for (int i = 0; i < 2 * g.layers; i++) {
        dt_tensor *t = i % 2 ? &c->v[i / 2] : &c->k[i / 2];
        if (!m->layer[i / 2].q || !at) continue;
        *t = (dt_tensor){ .data = at, .dtype = g.dtype, .name = "cache", .ctx = m->ctx };
        at += one[i % 2];
    }
    if (gpt_stages(g) > 1)
        c->schedule = dt_schedule_make(m->ctx, (dt_schedule_desc){ .kind = DT_SCHEDULE_INTERLEAVED,
                                                   .micros = 1,
                                                   .ranks = dt_comm_size(g.pp),
                                                   .chunks = gpt_stages(g) / dt_comm_size(g.pp),
                                                   .stage_of = gpt_stage_of,
                                                   .user = m });
    /* Reserve scratch for attention now, so that generation never allocates. */
    dt_scratch(m->ctx, dt_attention_work(0, D, g.dtype));
    if (dt_error(m->ctx) != DT_OK) gpt_cache_close(c);
    return dt_error(m->ctx);
}

/* Runs one stage on n new tokens, for which the cache must have free rows. x is the output of the
   previous stage, or NULL at stage 0. Returns the input of the next stage. The last stage returns
   instead the logits (V) that follow the last token. */
static inline dt_tensor *gpt_cache_stage(
    gpt_cache *c, int stage, dt_tensor *x, const int32_t *ids, int n) {
    gpt *m = c->model;
    int64_t C = m->config.width;
    if (n < 1 || n > m->config.seq - c->length) {
        dt_fail(m->ctx, DT_ERR_ARG, "gpt_cache_stage: %d tokens after %d of %d", n, c->length,
            m->config.seq);
        return NULL;
    }
    gpt_tokens t = { .ids = dt_input(m->ctx, DT_I32, DT_SHAPE(1, n), ids) };
    t.positions = dt_input(m->ctx, DT_I32, DT_SHAPE(1, n), c->positions + c->length);
    if (!t.ids) return NULL;
    gpt_pass r = gpt_pass_make(m, t, c);
    r.item = gpt_stage_first(m->config, stage);
    r.end = gpt_stage_first(m->config, stage + 1);
    /* (1,n,C) */
    x = gpt_layers_and_norm(r, x);
    if (!x || stage + 1 < gpt_stages(m->config)) return x;
    x = gpt_head(&r, dt_slice(dt_reshape(x, DT_SHAPE(n, C)), 0, n - 1, 1));
    return x ? dt_reshape(x, DT_SHAPE(m->config.vocab)) : NULL;
}

/* gpt_cache_stage for a model with one stage; also advances c->length. The logits are valid until
   dt_reset. */
static inline dt_tensor *gpt_cache_logits(gpt_cache *c, const int32_t *ids, int n) {
    dt_tensor *x = gpt_cache_stage(c, 0, NULL, ids, n);
    c->length += n;
    return x;
}

/* How to sample a token from softmax(logits / temperature). If `temperature` is 0, the token with
   the largest logit is taken. If `limit` > 0, only ids below `limit` are sampled. If `top_k` > 0,
   only the top_k largest logits are sampled. If 0 < top_p < 1, only the smallest set of the largest
   of these whose probabilities have a sum of at least top_p (nucleus sampling, arXiv:1904.09751).
   Logits that equal the smallest of a set belong to it. */
typedef struct gpt_sampling {
    double temperature;
    int top_k, limit;
    uint64_t seed;
    double top_p;
    /* NULL, or a function that gets the n tokens so far, the given ones included, after each new
       token. If it returns 1, this token is the last one. Every rank calls it, and it must return
       the same on all ranks. */
    int (*stop)(const int32_t *ids, int n, void *user);
    void *user;
} gpt_sampling;

/* Returns the largest of n logits that are numbers; -INFINITY if there are none. Eight maxima of
   every eighth logit, which the compiler keeps in vectors. */
static inline float gpt_largest(const float *logits, int n) {
    float of[8], all = -INFINITY;
    for (int j = 0; j < 8; j++) of[j] = -INFINITY;
    for (int i = 0; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) of[j] = logits[i + j] > of[j] ? logits[i + j] : of[j];
    for (int i = n / 8 * 8; i < n; i++) all = logits[i] > all ? logits[i] : all;
    for (int j = 0; j < 8; j++) all = of[j] > all ? of[j] : all;
    return all;
}

/* In a heap of n logits, a parent (n - 1) / 2 is at least as large as its children 2 n + 1 and
   2 n + 2. Moves the logit at `at` down to where this holds, if it holds below. */
static inline void gpt_heap_sink(float *heap, int n, int at) {
    float x = heap[at];
    for (int child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && heap[child + 1] > heap[child]) child++;
        if (!(heap[child] > x)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = x;
}

/* Moves the largest logit of a heap to its end, where the heap then ends. Returns this logit. */
static inline float gpt_heap_pop(float *heap, int *n) {
    float x = heap[0];
    heap[0] = heap[--*n];
    gpt_heap_sink(heap, *n, 0);
    return heap[*n] = x;
}

static inline float gpt_weight(float logit, float largest, gpt_sampling s) {
    return expf((float)(((double)logit - (double)largest) / s.temperature));
}

/* Returns the smallest of n logits that top_k and top_p leave; -INFINITY if they leave all. Few
   tokens of a large vocabulary are left, so it does not sort all logits but takes the largest ones
   from a heap (`heap` has n elements), as heapsort does. */
static inline float gpt_threshold(
    const float *logits, float largest, int n, gpt_sampling s, float *heap) {
    int k = s.top_k > 0 && s.top_k < n ? s.top_k : n, nucleus = s.top_p > 0 && s.top_p < 1;
    int rest = n; /* elements of the heap; those after it are in ascending order */
    float least = largest;
    double sum = 0, mass = 0;
    if (k == n && !nucleus) return -INFINITY;
    memcpy(heap, logits, (size_t)n * sizeof *heap);
    for (int i = n / 2 - 1; i >= 0; i--) gpt_heap_sink(heap, n, i);
    while (k < n && rest > 0 && (n - rest < k || heap[0] == least))
        least = gpt_heap_pop(heap, &rest);
    if (!nucleus) return least;
    int first = k < n ? rest : 0; /* of the logits that top_k leaves */
    for (int i = first; i < n; i++) sum += gpt_weight(heap[i], largest, s);
    least = largest;
    for (int i = n - 1; i >= first && mass < s.top_p * sum; i--) {
        least = i >= rest ? heap[i] : gpt_heap_pop(heap, &rest);
        mass += gpt_weight(least, largest, s);
    }
    return least;
}

/* Samples an id below n, by inverting the cumulative distribution at u in [0,1). `room` is a buffer
   of n elements. */
static inline int32_t gpt_sample(
    const float *logits, int n, gpt_sampling s, double u, float *room) {
    float largest = gpt_largest(logits, n);
    int32_t best = 0;
    double sum = 0;
    while (best + 1 < n && logits[best] != largest) best++;
    if (s.temperature <= 0) return logits[best] == largest ? best : 0;
    float threshold = gpt_threshold(logits, largest, n, s, room);
    for (int i = 0; i < n; i++) {
        room[i] = logits[i] >= threshold ? gpt_weight(logits[i], largest, s) : 0;
        sum += room[i];
    }
    u *= sum;
    for (int i = 0; i < n; i++) {
        u -= room[i];
        if (u < 0) return i;
    }
    return best;
}

/* Empties a full cache. Returns how many of the newest tokens the model must process again: seq/2,
   at least 1. Dropping only the oldest token would not be cheaper: every token's position would
   change, so all keys would be computed again for each new token. */
static inline int gpt_cache_restart(gpt_cache *c) {
    c->length = 0;
    return c->model->config.seq / 2 > 0 ? c->model->config.seq / 2 : 1;
}

/* Arguments and result of sampling one token. */
typedef struct gpt_next_token {
    gpt_cache *cache;
    const int32_t *ids;
    int n;         /* number of `ids`, the tokens that are not in the cache yet */
    float *logits; /* (2,V): logits, and a buffer for sampling */
    gpt_sampling s;
    /* `at` is a random number in [0,1). `token` is the sampled id on the rank of the last stage,
       and 0 on the other ranks of pp. */
    double at, token;
} gpt_next_token;

static inline dt_tensor *gpt_next_token_stage(dt_tensor *x, int stage, int micro, void *user) {
    gpt_next_token *d = (gpt_next_token *)user;
    gpt *m = d->cache->model;
    int V = m->config.vocab, limit = d->s.limit > 0 && d->s.limit < V ? d->s.limit : V;
    (void)micro;
    x = gpt_cache_stage(d->cache, stage, x, d->ids, d->n);
    if (stage + 1 < gpt_stages(m->config)) return x;
    x = dt_cast(x, DT_F32);
    if (x && dt_read(x, d->logits) == DT_OK)
        d->token = gpt_sample(d->logits, limit, d->s, d->at, d->logits + V);
    return x;
}

/* Runs all stages and returns the sampled token on all ranks of pp. */
static inline int32_t gpt_generate_token(gpt_next_token *d) {
    gpt *m = d->cache->model;
    d->token = 0;
    if (d->cache->schedule)
        dt_pipe_run(m->ctx, (dt_pipe_desc){ .schedule = d->cache->schedule,
                                .comm = m->config.pp,
                                .run = gpt_next_token_stage,
                                .user = d,
                                .forward_micros = 1 });
    else
        gpt_next_token_stage(NULL, 0, 0, d);
    d->cache->length += d->n;
    dt_sum_doubles(m->config.pp, &d->token, 1);
    dt_reset(m->ctx);
    return (int32_t)d->token;
}

/* Generates text: `ids` begins with `given` >= 1 tokens, and the function appends tokens until
   there are `total` or s.stop ends it. Once there are more than seq tokens, the model sees only the
   newest tokens, between seq/2 and seq of them. */
static inline dt_status gpt_generate(gpt *m, int32_t *ids, int given, int total, gpt_sampling s) {
    size_t bytes = 2 * (size_t)m->config.vocab * sizeof(float);
    gpt_cache *c = (gpt_cache *)dt_alloc(m->ctx, DT_MEM_HOST, sizeof *c, "gpt_generate");
    gpt_next_token d = {
        .cache = c, .logits = (float *)dt_alloc(m->ctx, DT_MEM_HOST, bytes, "gpt_generate"), .s = s
    };
    if (given < 1)
        dt_fail(
            m->ctx, DT_ERR_ARG, "gpt_generate: %d tokens are given; at least one is needed", given);
    if (c && d.logits && given > 0 && gpt_cache_open(c, m) == DT_OK) {
        d.n = given < m->config.seq ? given : m->config.seq;
        for (int at = given; at < total && dt_error(m->ctx) == DT_OK; at++, d.n = 1) {
            if (c->length + d.n > m->config.seq) d.n = gpt_cache_restart(c);
            d.ids = ids + at - d.n;
            d.at = (double)(gpt_hash(gpt_hash(s.seed) + (uint64_t)at) >> 11) / 9007199254740992.0;
            int32_t token = gpt_generate_token(&d);
            if (dt_error(m->ctx) != DT_OK) break;
            ids[at] = token;
            if (s.stop && s.stop(ids, at + 1, s.user)) break;
        }
        gpt_cache_close(c);
    }
    dt_free(m->ctx, DT_MEM_HOST, d.logits, bytes);
    dt_free(m->ctx, DT_MEM_HOST, c, sizeof *c);
    return dt_error(m->ctx);
}

#endif /* GPT_H */
