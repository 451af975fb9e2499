"""Starts the processes of a multi-rank test, and is what runs in them.

A test folder's `ranks.py` has the stages: functions of a folder. `launch` runs `python -m MODULE STAGE... --folder DIR`
in several processes and waits for them; there `run` starts the runtime with each stage's layout, does the stage and
writes rank 0's findings to DIR/STAGE.pt. A stage that fails ends its process with an error.

The processes meet as torchrun's do: in a store that whoever starts them holds. It has its port before they start, so
nobody can take the port in between.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parents[1]


def launch(module: str, stages: list[str], *, folder: Path, world: int, deadline_seconds: float = 240) -> None:
    """Runs a module's stages one after another in `world` processes; AssertionError with the output of a failed one."""
    command = [sys.executable, "-m", module, *stages, "--folder", str(folder)]
    # One each stage, so that no rank can meet another's previous stage.
    stores = [torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in stages]
    processes = []
    for rank in range(world):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "STAGE_DEADLINE": str(deadline_seconds)}
        environment |= {"STAGE_PORTS": ",".join(str(store.port) for store in stores)}
        with (folder / f"{stages[0]}.{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=deadline_seconds + 30) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, code in enumerate(codes):
        output = (folder / f"{stages[0]}.{rank}.log").read_text()
        assert code == 0, f"rank {rank} of {stages} ended with {code}:\n{output[-6000:]}"


def findings(folder: Path, stage: str) -> dict[str, Any]:
    return torch.load(folder / f"{stage}.pt", weights_only=False)


def error_of(action: Callable[[], Any]) -> str:
    """The error an action raises, as text. On every rank: the ranks' texts, joined."""
    try:
        action()
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    texts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    return " | ".join(texts)


def run(stages: Mapping[str, Callable[[Path], Any]], layouts: Mapping[str, Mapping[str, int]]) -> None:
    """The main function of a stage process. `layouts`: RuntimeSettings of the stages that need others than one rank."""
    from adapters.megatron.runtime import RuntimeSettings, initialize, shutdown

    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(float(os.environ["STAGE_DEADLINE"]), exit=True)  # a hang says where
    for name, port in zip(arguments.stages, os.environ["STAGE_PORTS"].split(","), strict=True):
        os.environ["MASTER_PORT"] = port
        initialize(RuntimeSettings(**{"seed": 7, "deadline_seconds": 60, **layouts.get(name, {})}))
        found = stages[name](arguments.folder)
        if torch.distributed.get_rank() == 0:
            torch.save(found, arguments.folder / f"{name}.pt")
        torch.distributed.barrier()
        shutdown()
