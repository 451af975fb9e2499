"""Turns a Hugging Face directory into the Megatron checkpoint that a run would have started from."""

from __future__ import annotations

from pathlib import Path

from adapters.hf_convert.directory import HFDirectory
from adapters.hf_convert.dtypes import DTYPES
from adapters.megatron import checkpoint_files
from providers.registry import provider
from tether.stored import Weights


def import_weights(weights: Weights, destination: Path) -> Path:
    """Writes a Hugging Face directory as a checkpoint of update 0, in the dtype in which it is stored.

    The trainer itself loads and saves it. Under torchrun every rank writes its part; a checkpoint of one parallel
    layout loads under another.

    Returns:
        The checkpoint's directory, destination/iter_0000000.

    Raises:
        ValueError: the destination holds checkpoints already, or the directory is not one model in one dtype.
    """
    if checkpoint_files.latest(destination):
        raise ValueError(f"{destination}: holds checkpoints already; choose another directory")
    if not isinstance(weights.reader, HFDirectory):
        raise ValueError(f"{weights.path}: got a checkpoint, expected a Hugging Face directory")
    dtypes = sorted(set(weights.dtypes.values()))
    if len(dtypes) != 1 or dtypes[0] not in DTYPES:
        raise ValueError(
            f"{weights.path}: got tensors in {', '.join(dtypes)}, expected all in one of {', '.join(DTYPES)}"
        )
    weights.reader.check(weights.expected())

    # Megatron-Core takes seconds to import, and nothing above needs it.
    from adapters.megatron import checkpoint, runtime
    from adapters.megatron.optimizer import OptimizerSettings
    from adapters.megatron.trainer import Trainer

    runtime.initialize(runtime.RuntimeSettings())
    try:
        model = provider(weights.model_type, "model").build(weights.config(), dtype=DTYPES[dtypes[0]])
        # The checkpoint keeps neither: a run brings its own settings.
        trainer = Trainer(model, optimizer=OptimizerSettings(learning_rate=1e-6), tokens_per_microbatch=1)
        trainer.load_hf(weights.reader)
        return checkpoint.save(destination, trainer, {"model": str(weights.path.resolve())}, update=0)
    finally:
        runtime.shutdown()
