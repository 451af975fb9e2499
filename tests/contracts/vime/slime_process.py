"""One training process of slime with our hooks, on CPU: what an optional test starts in each rank.

Everything of slime and of Megatron-LM's training code is theirs, unmodified. What is put in their place here is what a
machine without CUDA lacks: the packages sglang, sglang_router and torch_memory_saver (never called on this way), an
accelerator for CPU in slime's own registry, and Ray's object store (`ray.get` gives what it is given).

    python -m tests.contracts.vime.slime_process STAGE --folder DIR --model HF_DIR [--mutate NAME] -- FLAGS OF SLIME

Stages: `look`, `train`, `resume`, below.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import faulthandler
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

ABSENT = ("sglang", "sglang_router", "torch_memory_saver")
"""Packages that cannot be installed without CUDA."""


class _Nothing(ModuleType):
    """A package that is not there: every name in it is a class that does nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None, "__call__": lambda self, *_, **__: None})()


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def make_cpu_slime() -> None:
    """Lets slime run here. Call before anything of it is imported."""
    sys.meta_path.append(_Absent())
    from adapters.megatron import cpu_runtime

    cpu_runtime.install()
    cpu_runtime.define_missing_te_names()
    import ray
    from slime.utils import accelerator
    from slime.utils.accelerator.torch_accelerator import TorchAccelerator

    class Cpu(TorchAccelerator):
        name = device_type = "cpu"
        communication_backend_name = "nccl"  # groups of another backend are not wrapped for being rebuilt

        def _module(self) -> Any:
            return torch.cuda  # cpu_runtime's

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def device(self, _index: Any = None) -> torch.device:
            return torch.device("cpu")

        def ipc_collect(self) -> None: ...

        def process_group_backend(self, _asked: Any = None) -> str:
            return "gloo"

        def mem_get_info(self, *_: Any) -> tuple[int, int]:
            return 0, 0

        def supports(self, _capability: str) -> bool:
            return False

    accelerator.register_accelerator("cpu", Cpu, lambda: True)
    ray.get = lambda value, **_: value
    # TP: an architecture for which Megatron asks no CUDA setting of its environment.
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=10, minor=0, name="cpu", total_memory=0)


def load_in_fp32() -> None:
    """Lets Megatron's distributed optimizer load a checkpoint of fp32 parameters, whose masters are views of them.

    slime trains in bf16, where masters are tensors of their own; fp32 is for comparing exactly.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    DistributedOptimizer.load_state_dict = torch.no_grad()(DistributedOptimizer.load_state_dict)


@dataclasses.dataclass
class Given:
    """Stands where Ray's reference to an object stands."""

    inner: Any


def start_actor(flags: list[str]) -> tuple[Any, Any, int]:
    """slime's own training actor, its arguments parsed by its own parser; and the rollout that it goes on with."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.utils.arguments import parse_args

    sys.argv = ["train.py", *flags]
    args = parse_args()
    actor = MegatronTrainRayActor.__new__(MegatronTrainRayActor)
    actor._rank, actor._world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = actor.init(args, "actor")
    return actor, args, start if args.start_rollout_id is None else args.start_rollout_id


def to_train_data(args: Any, actor: Any, samples: list[Any]) -> list[Any]:
    """Samples through our conversion hook, loaded by slime's loader, and slime's own split over ranks."""
    from slime.ray.rollout import RolloutManager
    from slime.utils.misc import load_function

    manager = RolloutManager.__ray_metadata__.modified_class
    stand = manager.__new__(manager)
    stand.args, stand.train_parallel_config = args, actor.train_parallel_config
    import ray

    ray.put = lambda value, **_: value
    stand.custom_reward_post_process_func = None
    stand.custom_convert_samples_to_train_data_func = load_function(args.custom_convert_samples_to_train_data_path)
    return stand._split_train_data_by_dp(stand._convert_samples_to_train_data(samples))


def make_samples(args: Any, rollout_id: int, folder: Path) -> list[Any]:
    """slime's samples of what the test recorded for this rollout."""
    from slime.utils.types import Sample

    samples = []
    for index, record in enumerate(json.loads((folder / f"samples_{rollout_id}.json").read_text())):
        sample = Sample(index=index, group_index=record["group"], tokens=record["tokens"], reward=record["reward"])
        sample.rollout_id = index
        sample.response_length, sample.rollout_log_probs = record["response_length"], record["logprobs"]
        sample.status = Sample.Status(record["status"])
        if "depths" in record:
            depths = torch.tensor(record["depths"])
            sample.multimodal_train_inputs = {
                "execution_depths": depths,
                "execution_lengths": torch.tensor([len(depths)]),
            }
        if "experts" in record:
            sample.rollout_routed_experts = torch.tensor(record["experts"], dtype=torch.int32)
        sample.weight_versions = [str(rollout_id + 1)]
        samples.append(sample)
    return samples


def weights_of(args: Any, actor: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint through slime's own walk (TP and EP gathers, conversion)."""
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct import HfWeightIteratorDirect

    iterator = HfWeightIteratorDirect(
        args=args, model=actor.model, model_name=actor.weight_updater.model_name, quantization_config=None
    )
    local = dict(named_params_and_buffers(args, actor.model, convert_to_global_name=True))
    return {name: tensor.clone() for chunk in iterator.get_hf_weight_chunks(local) for name, tensor in chunk}


def nccl_walk(args: Any, actor: Any) -> dict[str, torch.Tensor]:
    """The same through the walk of slime's NCCL updater: one pass over what is no expert, one over experts."""
    from megatron.core import mpu
    from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import UpdateWeightFromDistributed

    updater = UpdateWeightFromDistributed(
        args, actor.model, None, model_name=actor.weight_updater.model_name, quantization_config=None
    )
    updater._is_pp_src_rank = mpu.get_data_parallel_rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0
    found: dict[str, torch.Tensor] = {}
    for chunks in (updater._iter_non_expert_chunks(), updater._iter_expert_chunks()):
        for chunk in chunks:
            assert not found.keys() & dict(chunk).keys(), "a tensor is sent twice"
            found |= {name: tensor.clone() for name, tensor in chunk}
    return found


class Observed:
    """What slime's training steps say, taken from its own logger and from the data after a rollout."""

    def __init__(self) -> None:
        from slime.observability import logging_utils

        self.steps: list[dict[str, float]] = []
        own = logging_utils.log

        def log(args: Any, metrics: dict[str, Any], step_key: str) -> None:
            if step_key == "train/step":
                self.steps.append(dict(metrics))
            own(args, metrics, step_key)

        logging_utils.log = log


def rollout_data(args: Any, actor: Any, rollout_id: int, folder: Path) -> dict[str, Any]:
    """This rank's part of a rollout, as slime's actor reads it."""
    refs = to_train_data(args, actor, make_samples(args, rollout_id, folder))
    return actor._get_rollout_data([Given(ref.inner) for ref in refs])


def one_rollout(args: Any, actor: Any, rollout_id: int, folder: Path) -> list[tuple[int, list[float]]]:
    """Trains on a rollout; this rank's log-probs before it, by the sample's place in the rollout."""
    data = rollout_data(args, actor, rollout_id, folder)
    actor.train_actor(rollout_id, data)
    return _by_place(data)


def _by_place(data: dict[str, Any]) -> list[tuple[int, list[float]]]:
    return [(place, values.tolist()) for place, values in zip(data["partition"], data["log_probs"], strict=True)]


def parse(folder: Path, flags: list[str]) -> dict[str, Any]:
    """slime's parser on a launch script's flags: what became of them, by the names of the hooks' arguments."""
    from slime.utils.arguments import parse_args

    from tether.vime.arguments import check_arguments, facts_of
    from tether.vime.flags import HOOKS

    sys.argv = ["train.py", *flags, "--debug-train-only"]
    args = parse_args()
    check_arguments(args, facts_of(args))
    names = [flag.removeprefix("--").replace("-", "_") for flag in HOOKS]
    return {name: getattr(args, name) for name in (*names, "load", "tether_execution", "update_weight_transport")}


def generate(folder: Path, flags: list[str]) -> dict[str, Any]:
    """slime's own `generate_and_rm` with our hook, on an engine of our seam's; then its split into training data."""
    from slime.rollout.sglang_rollout import GenerateState, generate_and_rm
    from slime.utils.arguments import parse_args
    from slime.utils.types import Sample

    from tests.contracts.vime.test_rollout import Engine
    from tether.vime import rollout

    sys.argv = ["train.py", *flags, "--rollout-max-response-len", "6"]
    args = parse_args()
    args.sglang_server_concurrency, args.sglang_dp_size, args.rollout_num_gpus = 8, 1, 1
    rollout.start_engine = lambda args: Engine({2: "length", 3: "abort"})
    samples = [Sample(index=i, group_index=i // 2, prompt="t5 t6", reward=float(i % 2)) for i in range(4)]
    params = GenerateState(args).sampling_params

    async def draw() -> list[Any]:
        return await asyncio.gather(*(generate_and_rm(args, sample, dict(params)) for sample in samples))

    drawn = asyncio.run(draw())
    rollout.close_session()
    config = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    (ref,) = to_train_data(args, SimpleNamespace(train_parallel_config=config), drawn)
    data = ref.inner
    return {
        "status": sorted(sample.status.name for sample in drawn),
        "responses": {tuple(sample.response.split()) for sample in drawn},
        "versions": {version for sample in drawn for version in sample.weight_versions},
        "trained": sorted(int(mask.sum()) for mask in data["loss_masks"]),
        "depths": [len(side["execution_depths"]) for side in data["multimodal_train_inputs"]],
        "tokens": [len(tokens) for tokens in data["tokens"]],
    }


def look(folder: Path, flags: list[str]) -> dict[str, Any]:
    """Loads the checkpoint, scores a rollout, walks the weights; trains nothing."""
    from slime.backends.megatron_utils.data import get_data_iterator

    actor, args, _ = start_actor(flags)
    data = rollout_data(args, actor, 0, folder)
    iterator = get_data_iterator(data)
    if args.use_rollout_routing_replay:
        actor.fill_routing_replay(iterator, data["num_microbatches"], data)
        os.environ["ROUTING_REPLAY_STAGE"] = "replay_forward"
    data |= actor.compute_log_prob(iterator, data["num_microbatches"], store_prefix="")
    return {
        "loaded": weights_of(args, actor),
        "nccl": nccl_walk(args, actor),
        "scores": _gathered(_by_place(data)),
        "model_name": actor.weight_updater.model_name,
    }


def train(folder: Path, flags: list[str]) -> dict[str, Any]:
    """Two steps, a checkpoint and a publication; then another rollout, which a fresh process has to repeat."""
    actor, args, start = start_actor(flags)
    observed = Observed()
    scores = one_rollout(args, actor, start, folder)
    actor.save_model(start)
    actor.weight_updater.connect_rollout_engines([], None)
    actor.weight_updater.update_weights()
    found = {"start": start, "scores": _gathered(scores), "trained": weights_of(args, actor)}
    one_rollout(args, actor, start + 1, folder)
    version = actor.weight_updater.weight_version
    return found | {"steps": observed.steps, "continued": weights_of(args, actor), "version": version}


def resume(folder: Path, flags: list[str]) -> dict[str, Any]:
    """A fresh process goes on from the checkpoint of `train`."""
    actor, args, start = start_actor(flags)
    observed = Observed()
    found = {"start": start, "loaded": weights_of(args, actor), "version": actor.weight_updater.weight_version}
    one_rollout(args, actor, start, folder)
    return found | {"steps": observed.steps, "continued": weights_of(args, actor)}


def _gathered(scores: list[tuple[int, list[float]]]) -> dict[int, list[float]]:
    """Of all ranks."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, scores)
    return dict(pair for rank in every for pair in rank)


STAGES: dict[str, Callable[[Path, list[str]], dict[str, Any]]] = {
    "parse": parse,
    "generate": generate,
    "look": look,
    "train": train,
    "resume": resume,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mutate", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--deadline", type=float, default=240)
    own = sys.argv[1 : sys.argv.index("--")]
    flags = sys.argv[sys.argv.index("--") + 1 :]
    arguments = parser.parse_args(own)
    faulthandler.dump_traceback_later(arguments.deadline, exit=True)
    torch.set_num_threads(1)
    make_cpu_slime()
    load_in_fp32()
    if arguments.mutate:
        from tests.contracts.vime import mutations

        getattr(mutations, arguments.mutate)()
    found = STAGES[arguments.stage](arguments.folder, flags)
    if int(os.environ["RANK"]) == 0:
        torch.save(found, arguments.folder / arguments.out)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
