"""Writes the digest of every tensor of a checkpoint, parameters and optimizer, as JSON.

python -m benchmarks.full_size_digests CHECKPOINT OUTPUT [--parameters]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from adapters.hf_convert.digest import tensor_digest
from adapters.megatron.checkpoint_reader import CheckpointReader
from tether.stored import OPTIMIZER_PREFIX


def main() -> int:
    checkpoint, output = map(Path, sys.argv[1:3])
    only_parameters = "--parameters" in sys.argv[3:]
    reader = CheckpointReader(checkpoint)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [name for name in sorted(reader.shapes) if not (only_parameters and name.startswith(OPTIMIZER_PREFIX))]
    output.write_text(json.dumps({name: tensor_digest(tensor.to(device)) for name, tensor in reader.read(names)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
