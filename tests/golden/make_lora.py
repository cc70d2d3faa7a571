"""make_lora.py - makes the LoRA test files: a tiny Llama, an adapter of PEFT and its training losses, NF4 blocks
Public domain or MIT, at your choice; see LICENSE.

Run:    python3 make_lora.py OUT               writes the folder lora/ below into folder OUT
        python3 make_lora.py --check DIR TOKENS  DIR has base/, and adapter/ and merged/ as train_gpt --save-model writes
                                               them: PEFT's logits of base/ with adapter/ equal those of merged/, and the
                                               loss of TOKENS' first sequences is printed
        python3 make_lora.py --train DIR TOKENS  trains an adapter with PEFT from DIR/adapter, as below; writes TOKENS, a
                                                 token shard, and prints the losses
Needs transformers 5, peft, safetensors and torch, and bitsandbytes for the NF4 blocks.

FILES
    lora/base/          Llama, 2 layers, f32
    lora/adapter/       adapter of rank 4 on all seven modules as PEFT saves it, with B = 0
    lora/vectors.bin    arrays in make_gpt2.py's format:
        ids (STEPS * B, T + 1)   sequences of the steps, in order
        losses (STEPS)           PEFT's losses under AdamW, in float32
        nf4.in (N)               values, with zeros, ties between two codes and extreme blocks
        nf4.codes (N / 2)        bitsandbytes' packed codes on the CPU, blocks of 64
        nf4.absmax (N / 64)      and the blocks' scales
        nf4.out (N)              and the values that it reads back
"""
import os
import sys

import numpy as np
import torch
from make_gpt2 import write_golden

B, T, STEPS, RANK, ALPHA = 4, 16, 20, 4, 6.0


def base_model():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((1 if p.dim() == 1 else 0) + torch.randn(p.shape) * 0.2)
    return model


def adapted(model):
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(6)
    return get_peft_model(model, LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]))


def train(model, ids, lr=1e-2):
    """Losses of one AdamW step for each B sequences of ids (STEPS * B, T + 1)."""
    torch.set_num_threads(1)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    losses = []
    for rows in ids.split(B):
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def write_tokens(path):
    """An llm.c token shard of 1,500 tokens that can be learnt."""
    with open(path, "wb") as f:
        f.write(np.array([20240520, 1, 1500] + [0] * 253, dtype="<i4").tobytes())
        f.write(np.array([i * i // 7 % 67 for i in range(1500)], dtype="<u2").tobytes())


def text_ids(path):
    data = np.fromfile(path, dtype=np.uint16)[512:].astype(np.int64)    # after the shard's header
    sequences = (len(data) - 1) // T
    return torch.from_numpy(np.stack([data[i % sequences * T:i % sequences * T + T + 1] for i in range(STEPS * B)]))


def nf4_vectors():
    import bitsandbytes.functional as F
    rng = np.random.default_rng(3)
    x = rng.standard_normal((24, 64)).astype(np.float32) * 10.0 ** rng.integers(-6, 6, (24, 1)).astype(np.float32)
    table = F.get_4bit_type("nf4", device="cpu").numpy()
    x[0] = 0
    x[1, :16], x[1, 16:31] = table, (table[:-1] + table[1:]) / 2    # exact codes, and ties between two
    x[2] = np.float32(3e38) * np.sign(x[2])
    x = np.ascontiguousarray(x, dtype=np.float32)
    packed, state = F.quantize_4bit(torch.from_numpy(x), blocksize=64, quant_type="nf4", compress_statistics=False)
    out = F.dequantize_4bit(packed, state)
    return {"nf4.in": x.ravel(), "nf4.codes": packed.numpy().ravel().astype(np.int32),
            "nf4.absmax": state.absmax.numpy().ravel(), "nf4.out": out.numpy().ravel()}


def make(out):
    folder = os.path.join(out, "lora")
    model = base_model()
    model.save_pretrained(os.path.join(folder, "base"))
    peft = adapted(model)
    peft.save_pretrained(os.path.join(folder, "adapter"))
    os.remove(os.path.join(folder, "adapter", "README.md"))
    rng = np.random.default_rng(9)
    start = rng.integers(0, 67, (STEPS * B, 1))
    ids = (start + np.arange(T + 1) * (1 + start % 3)) % 67      # sequences that can be learnt
    losses = train(peft, torch.from_numpy(ids))
    print(losses)
    write_golden(os.path.join(folder, "vectors.bin"), {
        "ids": ids.astype(np.int32), "losses": np.array(losses, dtype=np.float64), **nf4_vectors()})


def load(folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    base = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "base"), dtype=torch.float32)
    return PeftModel.from_pretrained(base, os.path.join(folder, "adapter"), is_trainable=True)


def check(folder, text):
    from transformers import AutoModelForCausalLM
    ids = text_ids(text)[:B]
    with torch.no_grad():
        ours = load(folder).double()(input_ids=ids[:, :-1]).logits
        merged = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "merged"), dtype=torch.float32)
        theirs = merged.double()(input_ids=ids[:, :-1]).logits
    wrong = ((ours - theirs).norm() / theirs.norm()).item()
    print("%s merged and adapter differ by %.2e" % ("ok" if wrong < 1e-6 else "WRONG", wrong))
    print("loss %.12g" % torch.nn.functional.cross_entropy(ours.flatten(0, 1), ids[:, 1:].flatten()).item())


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(sys.argv[2], sys.argv[3])
    elif sys.argv[1] == "--train":
        write_tokens(sys.argv[3])
        for loss in train(load(sys.argv[2]), text_ids(sys.argv[3])):
            print("%.9g" % loss)
    else:
        make(sys.argv[1])
