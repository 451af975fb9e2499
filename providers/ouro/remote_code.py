"""Ouro's code for transformers, which has no Ouro of its own: where it lies, and how config.json names it."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "hf"
FILES = ("configuration_ouro.py", "modeling_ouro.py")
AUTO_MAP = {
    "AutoConfig": "configuration_ouro.OuroConfig",
    "AutoModel": "modeling_ouro.OuroModel",
    "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM",
}


def register(*, config_only: bool = False) -> None:
    """Makes transformers' Auto classes load directories of this model by the code here. Idempotent.

    Args:
        config_only: leave out the model classes, which take long to import; enough for tokenizers.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from providers.ouro.hf.configuration_ouro import OuroConfig

    AutoConfig.register(OuroConfig.model_type, OuroConfig, exist_ok=True)
    if config_only:
        return
    from providers.ouro.hf.modeling_ouro import OuroForCausalLM, OuroModel

    AutoModel.register(OuroConfig, OuroModel, exist_ok=True)
    AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
