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
# other types, other metadata; all 256 numbers of the 8-bit floats, and what PyTorch makes of them
bits = torch.arange(256, dtype=torch.uint8)
other = {
    "mask": torch.tensor([True, False, True]),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "i8": torch.tensor([-128, 7, 127], dtype=torch.int8),
    "i16": torch.tensor([-32768, 7, 32767], dtype=torch.int16),
    "u16": torch.tensor([0, 65535], dtype=torch.uint16),
    "u32": torch.tensor([7, 2**32 - 1], dtype=torch.uint32),
    "u64": torch.tensor([7, 2**63 - 1, 2**63], dtype=torch.uint64),
    "long": torch.tensor([-(2**31), 2**31 - 1, 2**31], dtype=torch.int64),
    "complex": torch.zeros(2, dtype=torch.complex64),
    "w": ramp(torch.float32, 2, 2),
}
for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
    other[name] = bits.clone().view(dtype)
    other[name + ".f32"] = bits.view(dtype).to(torch.float32)
save_file(
    other,
    os.path.join(here, "files_types.safetensors"),
    metadata={"format": "pt", "made by": "the reference library", "empty": ""},
)
