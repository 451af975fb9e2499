"""Lets Megatron-Core run on gloo where no CUDA device exists. With a CUDA device it changes nothing.

Megatron-Core writes "cuda" as a literal in many places. Each patch below is one function with its reason; it checks
that what it replaces still exists, so that an upstream move is an error at start and not a wrong result. Written for
Megatron-Core 0.16.1, holds for 0.17 to 0.19. The patches are process-wide: install them in trainer processes only.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_undo = contextlib.ExitStack()
_installed = False


def install() -> bool:
    """Patches torch.cuda and Megatron-Core for CPU. Idempotent; `uninstall` takes everything back.

    Returns:
        Whether the process now runs Megatron-Core on CPU; False, with nothing changed, when a CUDA device exists.

    Raises:
        ImportError: a patched name no longer exists, naming it and the Megatron-Core version.
    """
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        _compile_nothing()
        _stand_in_for_torch_cuda()
        _read_rng_states_from_cpu()
        _give_splits_as_numpy()
        _undo.enter_context(_CudaMeansCpu())
        _installed = True
    return True


def uninstall() -> None:
    """Takes every patch back, for a process that goes on with other work (tests)."""
    global _installed
    _undo.close()
    _installed = False


def define_missing_te_names() -> None:
    """Defines what `moe_utils` of 0.16 imports from Transformer Engine and then uses without it (on GPU too)."""
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    for name in _TE_NAMES:
        if not hasattr(module, name):
            setattr(module, name, None)


class _CudaMeansCpu(TorchFunctionMode):
    """Reads device="cuda" as "cpu" in factories and `.to`, ignores `.cuda()`, and names types as on a GPU.

    The last is for the distributed optimizer, which accepts only `torch.cuda.FloatTensor` and its kin.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        return func(*args, **kwargs)


class _NoStream:
    """A stream or event where everything is already done."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 0.0


def _compile_nothing() -> None:
    """Megatron's jit_fuser is torch.compile, which takes seconds a function on CPU.

    Modules imported later are not decorated; functions decorated earlier run eagerly.
    """
    module = _megatron("jit")
    _replace(module, jit_fuser=module.noop_decorator)
    _undo.enter_context(torch.compiler.set_stance("force_eager"))


def _stand_in_for_torch_cuda() -> None:
    """Megatron asks torch.cuda for the device, its streams, its memory and its random state."""
    _replace(torch.cuda, current_device=lambda: CPU, device_count=lambda: 1)
    _replace(torch.cuda, **_constants(None, "set_device", "synchronize", "empty_cache", "manual_seed_all"))
    _replace(torch.cuda, **_constants(0, "memory_allocated", "max_memory_allocated", "memory_reserved"))
    _replace(torch.cuda, Stream=_NoStream, Event=_NoStream, stream=lambda *_: contextlib.nullcontext())
    _replace(torch.cuda, **_constants(_NoStream(), "current_stream", "default_stream"))
    _replace(torch.cuda, manual_seed=torch.default_generator.manual_seed)
    states = {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state}
    _replace(torch.cuda, **states)
    _replace(torch.cuda.random, **states)
    _replace(torch.cuda.nvtx, **_constants(None, "range_push", "range_pop"))
    _replace(torch.cuda.nvtx, range=lambda *_, **__: contextlib.nullcontext())
    _replace(torch.Tensor, **_constants(None, "record_stream"))


def _read_rng_states_from_cpu() -> None:
    """Megatron's RNG tracker reads the CUDA generator itself; on CPU the default generator takes its part."""
    module = _megatron("tensor_parallel.random")
    _replace(
        module,
        _get_cuda_rng_state=lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    )
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _give_splits_as_numpy() -> None:
    """The token dispatcher converts all-to-all splits to numpy only when they are on a CUDA device."""

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _replace(_megatron("transformer.moe.token_dispatcher"), maybe_move_tensor_to_cpu=maybe_move_tensor_to_cpu)


def _megatron(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.core.{name}")


def _replace(owner: Any, **replacements: Any) -> None:
    for name, value in replacements.items():
        if not hasattr(owner, name):
            raise ImportError(
                f"cpu_runtime: {getattr(owner, '__name__', owner)}.{name} does not exist in Megatron-Core "
                f"{version('megatron-core')} with torch {torch.__version__}; the patch of this name has to follow it"
            )
        _undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _names_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _constants(value: Any, *names: str) -> dict[str, Any]:
    """Functions of any arguments that return the value; one each, because dynamo tells functions by identity."""
    return {name: lambda *_args, **_kwargs: value for name in names}


_TE_NAMES = (
    "te_general_gemm",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_topk_with_score_function",
    "fused_unpermute",
)
