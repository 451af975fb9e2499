"""Writes the digest of every tensor of a checkpoint, parameters and optimizer, as JSON.

python -m benchmarks.full_size_digests CHECKPOINT OUTPUT [--parameters]
"""

from __future__ import annotations

import json
import math
import sys
import threading
from pathlib import Path

import torch

from adapters import threads
from adapters.hf_convert.digest import tensor_digest
from adapters.megatron.checkpoint_reader import CheckpointReader
from tether.stored import OPTIMIZER_PREFIX


def main() -> int:
    checkpoint, output = map(Path, sys.argv[1:3])
    only_parameters = "--parameters" in sys.argv[3:]
    reader, one_at_a_time = CheckpointReader(checkpoint), threading.Lock()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def digest(name: str) -> str:
        [(_, tensor)] = reader.read([name])  # which takes the time
        with one_at_a_time:
            return tensor_digest(tensor.to(device))

    names = [name for name in sorted(reader.shapes) if not (only_parameters and name.startswith(OPTIMIZER_PREFIX))]
    sizes = [math.prod(reader.shapes[name]) * reader.dtypes[name].itemsize for name in names]
    output.write_text(json.dumps(dict(zip(names, threads.spread(digest, names, sizes=sizes), strict=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
