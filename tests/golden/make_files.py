#!/usr/bin/env python3
"""Makes tests/golden/files_*.safetensors with the reference library, for tests/tensor/test_files.c.

    python3 -m venv venv && venv/bin/pip install safetensors torch && venv/bin/python tests/golden/make_files.py
"""
import os

import torch
from safetensors.torch import save_file

here = os.path.dirname(os.path.abspath(__file__))


def ramp(dtype, *shape):
    n = 1
    for d in shape:
        n *= d
    return (torch.arange(n, dtype=torch.float64) * 0.37 - 3).reshape(shape).to(dtype)


# test_files.c writes the same tensors and expects the same bytes
save_file(
    {
        "zz": ramp(torch.bfloat16, 2, 3),
        "h.0.w": ramp(torch.float32, 4, 5),
        "h.0.b": ramp(torch.float32, 5),
        "ids": torch.arange(7, dtype=torch.int32),
        "half": ramp(torch.float16, 3, 1, 2),
        "wide": ramp(torch.float64, 2),
        "one": torch.tensor(2.5, dtype=torch.float32),
        "none": torch.zeros(0, 3, dtype=torch.float32),
        'a "quoted"\n\tnäme': ramp(torch.float32, 1),
    },
    os.path.join(here, "files_pt.safetensors"),
    metadata={"format": "pt"},
)
# types that dt can only list, and other metadata
save_file(
    {
        "mask": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "long": torch.arange(2, dtype=torch.int64),
        "w": ramp(torch.float32, 2, 2),
    },
    os.path.join(here, "files_types.safetensors"),
    metadata={"format": "pt", "made by": "the reference library", "empty": ""},
)
