"""next_loss.py TEXT SEQ FIRST COUNT DIR... - prints transformers' loss of each checkpoint or model that train_gpt has saved

The loss of COUNT sequences of SEQ bytes each, from number FIRST on, as train_gpt reads them from TEXT; "none" for a
folder that cannot be loaded."""
import sys
import torch
from transformers import AutoModelForCausalLM


def loss(folder, ids, labels):
    # the fused products of experts do not take float64
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, experts_implementation="eager")
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    with torch.no_grad():
        logits = model.double().eval()(ids).logits
    return "%.12g" % torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


text, seq, first, count = sys.argv[1], *map(int, sys.argv[2:5])
data = torch.tensor(list(open(text, "rb").read()), dtype=torch.long)
total = (len(data) - 1) // seq
rows = [(first + i) % total * seq for i in range(count)]
ids = torch.stack([data[r:r + seq] for r in rows])
labels = torch.stack([data[r + 1:r + seq + 1] for r in rows])
for folder in sys.argv[5:]:
    try:
        print(loss(folder, ids, labels))
    except Exception as error:
        print("none")
        print(f"{folder}: {error}", file=sys.stderr)
