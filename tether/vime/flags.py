"""The framework's flags for a model and for our hooks, so that a launch script repeats neither.

    python -m tether.vime.flags MODEL [--save DIR] [--settings FILE key=value ...]

prints them one a line, and writes FILE for --custom-config-path: our own settings, and the weight version from which a
run that DIR continues counts on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tether.vime.arguments import ModelFacts, read_facts
from tether.vime.versions import START, version_to_go_on_from

HOOKS = {
    "--custom-model-provider-path": "model_provider",
    "--custom-megatron-init-path": "init",
    "--custom-megatron-before-log-prob-hook-path": "before_log_prob",
    "--custom-megatron-before-train-step-hook-path": "before_train_step",
    "--rollout-data-postprocess-path": "check_scores",
    "--custom-generate-function-path": "generate",
    "--custom-convert-samples-to-train-data-path": "convert_samples",
    "--custom-update-weight-post-write-path": "after_publication",
}
LOCAL = (
    *("--transformer-impl", "local", "--attention-backend", "unfused", "--no-rope-fusion", "--no-bias-swiglu-fusion"),
    *("--no-bias-dropout-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"),
    "--no-gradient-accumulation-fusion",
)
"""The model brings its own layers: nothing is asked of Transformer Engine or apex."""
OWN = "tether_"
"""How the names of our own settings begin; see `engines` and `hooks`."""


def hook_flags() -> list[str]:
    """Every flag that names a function of ours."""
    return [word for flag, name in HOOKS.items() for word in (flag, f"tether.vime.{name}")]


def model_flags(facts: ModelFacts) -> list[str]:
    """The sizes that the framework reads, as `arguments.check_arguments` will compare them."""
    c = facts.config
    sizes = {
        "--num-layers": c.num_layers,
        "--hidden-size": c.hidden_size,
        "--ffn-hidden-size": c.intermediate_size,
        "--num-attention-heads": c.num_heads,
        "--kv-channels": c.head_dim,
        "--seq-length": c.max_position_embeddings,
        "--max-position-embeddings": c.max_position_embeddings,
        "--expert-tensor-parallel-size": 1,  # Megatron's default is the tensor-parallel size, with or without experts
        "--vocab-size": c.vocab_size,
        "--make-vocab-size-divisible-by": 1,
        "--norm-epsilon": c.rms_norm_eps,
        "--rotary-base": int(c.rope_theta),
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
    }
    switches = ["--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    if c.num_kv_heads != c.num_heads:
        switches.append("--group-query-attention")
        sizes["--num-query-groups"] = c.num_kv_heads
    if facts.has_experts:
        switches += ["--moe-router-pre-softmax", "--use-rollout-routing-replay"]
        sizes |= {
            "--moe-ffn-hidden-size": c.intermediate_size,
            "--num-experts": c.num_experts,
            "--moe-router-topk": c.top_k,
            "--moe-aux-loss-coeff": 0.0,
            "--moe-router-load-balancing-type": "none",
            "--moe-token-dispatcher-type": "alltoall",
        }
    return [*(str(word) for item in sizes.items() for word in item), *switches, *LOCAL]


def settings_of(pairs: list[str]) -> dict[str, Any]:
    """Our own settings of key=value. Raises ValueError for one that is not ours."""
    settings = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found or not name.startswith(OWN):
            raise ValueError(
                f"settings: got {pair!r}, expected {OWN}...=VALUE; flags of the framework go to it directly"
            )
        settings[name] = int(value) if value.isdigit() else value
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--settings", type=Path)
    parser.add_argument("pairs", nargs="*")
    arguments = parser.parse_intermixed_args()
    flags = [*model_flags(read_facts(arguments.model)), *hook_flags()]
    if arguments.settings is not None:
        settings = settings_of(arguments.pairs)
        version = version_to_go_on_from(SimpleNamespace(load=arguments.save))
        if version is not None:
            settings[START] = version
        arguments.settings.parent.mkdir(parents=True, exist_ok=True)
        arguments.settings.write_text(json.dumps(settings, indent=2) + "\n")  # JSON is YAML
        flags += ["--custom-config-path", str(arguments.settings)]
    print("\n".join(flags))


if __name__ == "__main__":
    main()
