"""Loads a directory as its users do, samples from it, and compares its log-probs with the trainer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters.hf_convert.directory import HFDirectory
from providers.registry import provider, remote_code
from tether.checks import Check, check
from tether.data import load_tokenizer

if TYPE_CHECKING:
    from tether.stored import Weights

NUM_TOKENS = 48
NEW_TOKENS, END_AT = 12, 5
RELATIVE_BOUND = 4e-6
"""Of the largest logit, or of 1 if that is larger: fp32 rounds what it adds up, and the logits say how much that is. A
std-0.02 checkpoint stays at 1e-6, trained weights with logits of 25 may reach 1e-4; a wrong tensor is far above."""
ROUNDINGS = 4
"""How many times as far apart two ways to compute may be as the last bit of the embeddings moves the log-probs. That is
0.5 to 2.3 times fp32's own error, at widths of 128 to 2,048 and with 2 to 24 layers, four loops each: random weights
double it in every loop. The last bit of bf16 moves them 65,536 times as far."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a directory may be run."""

    trust_remote_code: bool = False
    """Run the directory's own code even if it is not ours."""


def run_checks(weights: Weights, config: Any, *, truth: Mapping[str, Any], options: RunOptions) -> list[Check]:
    """The lines `loads`, `greedy sample` and `log-probs`.

    Args:
        config: the provider's config of the directory.
        truth: config.json as it should be, parsed; the trainer follows it.
    """
    refused = _untrusted_code(weights) and not options.trust_remote_code
    if refused:
        detail = "the directory carries code that is not ours; --trust-remote-code runs it"
        return [Check(name="loads", passed=None, detail=detail)]
    try:
        model, what = _load(weights)
    except Exception as error:  # whatever its users would meet
        return [check("loads", [f"{type(error).__name__}: {error}"], "")]
    checks = [check("loads", [], what), _greedy(weights.path, model)]
    return [*checks, _logprobs(weights, model, config, truth)]


def _untrusted_code(weights: Weights) -> bool:
    """True if config.json names code, and not all Python files are ours to the byte."""
    if "auto_map" not in weights.source.config:
        return False
    ours = remote_code(weights.model_type)
    known = {name: (ours.FOLDER / name).read_bytes() for name in ours.FILES} if ours else {}
    return any(known.get(file.name) != file.read_bytes() for file in weights.path.glob("*.py"))


def _load(weights: Weights) -> tuple[Any, str]:
    """The model in fp32 as transformers makes it, and what was loaded."""
    from transformers import GenerationConfig

    options = {"local_files_only": True, "dtype": torch.float32, "output_loading_info": True}
    auto_map, ours = weights.source.config.get("auto_map"), remote_code(weights.model_type)
    model_class, more = _own_classes(weights.path, auto_map) if auto_map else _auto_class(ours)
    model, info = model_class.from_pretrained(weights.path, **options, **more)
    if wrong := {kind: sorted(keys)[:10] for kind, keys in info.items() if keys}:
        raise ValueError(f"transformers reports {wrong!r}")
    if (weights.path / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(weights.path, local_files_only=True).validate(strict=True)
    code = "the directory's code" if auto_map else "our code" if ours else "its own code"
    return model.eval(), f"config, tokenizer and {type(model).__name__} by transformers, {code}"


def _own_classes(directory: Path, auto_map: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
    """The class that the directory brings, and its config. By name: Auto classes prefer one that is registered."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module as get

    where = str(directory)
    config = get(auto_map["AutoConfig"], where, local_files_only=True).from_pretrained(where, local_files_only=True)
    return get(auto_map["AutoModelForCausalLM"], where, local_files_only=True), {"config": config}


def _auto_class(ours: Any) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    if ours is not None:
        ours.register()
    return AutoModelForCausalLM, {}


def _greedy(directory: Path, model: Any) -> Check:
    """A greedy sample into which the tokenizer's end token is forced: it must end there, and not go on."""
    from transformers import LogitsProcessor, LogitsProcessorList

    try:
        end = load_tokenizer(directory).eos_token_id
    except ValueError as error:
        return check("greedy sample", [str(error)], "")
    if end is None:
        return Check(name="greedy sample", passed=None, detail="the tokenizer has no end token")

    class ForceEnd(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] - prompt.shape[1] == END_AT - 1:
                scores = torch.full_like(scores, -torch.inf)
                scores[:, end] = 0
            return scores

    prompt = _tokens(model.config.vocab_size)[None, :8]
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        logits_processor=LogitsProcessorList([ForceEnd()]),
    )
    new = output[0, prompt.shape[1] :].tolist()
    problems = []
    if end in new and new.index(end) != len(new) - 1:
        named = model.generation_config.eos_token_id
        problems.append(f"goes on after the end token {end}: eos_token_id is {named!r} in the configs")
    elif end not in new:
        problems.append(f"ended before the end token {end}, at {new[-1]}: the configs name another")
    return check("greedy sample", problems, f"stops at the end token {end}")


def _logprobs(weights: Weights, model: Any, config: Any, truth: Mapping[str, Any]) -> Check:
    """Log-probs of fixed random tokens by transformers and by the trainer, at the directory's depth and whole."""
    from adapters.megatron.runtime import device

    tokens = _tokens(config.vocab_size)
    runs: list[tuple[str, float, float]] = []
    with _trainer_model(weights, truth) as trainer, torch.no_grad():
        for options in ({}, {"depth": "full"}):
            output = model(tokens[None], **options)
            loops = getattr(output, "exit_depths", None)
            trace = None if loops is None else loops[0]
            logits = trainer(tokens.to(device()), torch.tensor([0, len(tokens)]), trace).cpu()
            mine, theirs = (_chosen(x, tokens) for x in (output.logits[0], logits))
            where = "" if loops is None else f" at {options.get('depth', 'the default')} depth"
            runs.append((where, float((mine - theirs).abs().max()), float(logits.abs().max())))
            if loops is None:
                break
        rounding = _rounding(model, tokens, mine, options)  # of the deepest run
    problems, seen = [], []
    for where, difference, largest in runs:
        bound = max(RELATIVE_BOUND * max(1.0, largest), ROUNDINGS * rounding)
        seen.append(f"{difference:.1e}{where}")
        if not difference <= bound:
            problems.append(f"{seen[-1]} from the trainer's, expected at most {bound:.1e} (fp32 rounding)")
    fine = f"{len(tokens)} tokens, from the trainer's at most {', '.join(seen)}; {bound:.1e} allowed"
    return check("log-probs", problems, fine)


def _chosen(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs [T] of each next token, of logits [T, V]; of the first one behind the last."""
    return logits.log_softmax(-1).gather(1, tokens.roll(-1)[:, None])[:, 0]


def _rounding(model: Any, tokens: torch.Tensor, still: torch.Tensor, options: Mapping[str, Any]) -> float:
    """The largest change of log-probs `still` when every embedded value moves by one in its last bit, up or down."""
    generator = torch.Generator().manual_seed(1)

    def move(_module: Any, _inputs: Any, states: torch.Tensor) -> torch.Tensor:
        signs = 2 * torch.randint(2, states.shape, generator=generator) - 1
        return states * (1 + signs * torch.finfo(states.dtype).eps)

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        moved = _chosen(model(tokens[None], **options).logits[0], tokens)
    finally:
        hook.remove()
    return float((moved - still).abs().max())


@contextmanager
def _trainer_model(weights: Weights, truth: Mapping[str, Any]) -> Iterator[Any]:
    """The training model in fp32 with the directory's weights and the config that it should have."""
    from adapters.megatron import runtime

    assert isinstance(weights.reader, HFDirectory)
    config = provider(weights.model_type, "config").Config.from_hf(truth)
    runtime.initialize(runtime.RuntimeSettings())
    try:
        model = provider(weights.model_type, "model").build(config, dtype=torch.float32)
        with torch.no_grad():
            for name, own in model.local_parts():
                own.copy_(weights.reader.read(name))
        yield model
    finally:
        runtime.shutdown()


def _tokens(vocab_size: int) -> torch.Tensor:
    """[NUM_TOKENS] int64, always the same."""
    return torch.randint(vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
