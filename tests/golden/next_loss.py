"""next_loss.py DIR TEXT SEQ FIRST COUNT - prints transformers' loss of a checkpoint that train_gpt has saved

The loss of COUNT sequences of SEQ bytes each, from number FIRST on, as train_gpt reads them from TEXT."""
import sys
import torch
from transformers import AutoModelForCausalLM

folder, text, seq, first, count = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
data = torch.tensor(list(open(text, "rb").read()), dtype=torch.long)
model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
model = model.double().eval()
total = (len(data) - 1) // seq
rows = [(first + i) % total * seq for i in range(count)]
ids = torch.stack([data[r:r + seq] for r in rows])
labels = torch.stack([data[r + 1:r + seq + 1] for r in rows])
with torch.no_grad():
    logits = model(ids).logits
print("%.12g" % torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
