"""Writes the digest of every tensor of a checkpoint, parameters and optimizer, as JSON.

python -m benchmarks.full_size_digests CHECKPOINT OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from adapters.hf_convert.digest import tensor_digest
from adapters.megatron.checkpoint_reader import CheckpointReader


def main() -> int:
    checkpoint, output = map(Path, sys.argv[1:])
    reader = CheckpointReader(checkpoint)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {name: tensor_digest(tensor.to(device)) for name, tensor in reader.read(sorted(reader.shapes))}
    output.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
