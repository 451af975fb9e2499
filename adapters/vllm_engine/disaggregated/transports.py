"""Which transports UCX can really use here: found by moving bytes between two processes, before any engine starts.

A list of transports may name some that this machine lacks, or that fail only when they are used. UCX is told through
the environment of the processes that use it; the environment of the caller is never changed.

    python -m adapters.vllm_engine.disaggregated.transports --role source|reader --directory DIR --device cpu|cuda \
        --transports LIST
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from adapters.contract import EngineStartFailed
from adapters.vllm_engine.client.launch import Process, start_process
from adapters.vllm_engine.memory import leftovers
from adapters.vllm_engine.process.main import end_with_parent
from adapters.vllm_engine.worker import patches

PROBE_SECONDS = 60.0
NUM_BYTES = 1 << 16
CANDIDATES = {
    "cpu": ("tcp,self,sm", "tcp,self"),
    "cuda": ("cuda_ipc,cuda_copy,tcp,self,sm", "cuda_copy,tcp,self", "tcp,cuda_copy"),
}
"""By device, what is tried when nothing is asked for: the fastest first."""
AUTO = "auto"

logger = logging.getLogger(__name__)


def choose(wanted: str = AUTO, *, start_seconds: float = 300.0) -> str:
    """The first list of transports that moves bytes: the wanted one, or UCX_TLS of the caller, then `CANDIDATES`.

    Args:
        start_seconds: longest wait for a process to start; `PROBE_SECONDS` count from there.

    Raises:
        EngineStartFailed: none of them works; says what each one met.
    """
    asked = os.environ.get("UCX_TLS", "") if wanted == AUTO else wanted
    return _choose(asked, "cuda" if torch.cuda.is_available() else "cpu", start_seconds)


@functools.cache
def _choose(asked: str, device: str, start_seconds: float) -> str:
    candidates = [asked] if asked else []
    candidates += [c for c in CANDIDATES[device] if c != asked]
    met = {}
    for transports in candidates:
        problem, remarks = probe(transports, device, start_seconds)
        if problem is None:
            if met or remarks:
                failed = "; ".join(f"{names}: {why}" for names, why in met.items())
                logger.warning("transports: using %r. %s", transports, " ".join([failed, *remarks]).strip())
            return transports
        met[transports] = problem
    raise EngineStartFailed("no transport works: " + "; ".join(f"{names}: {why}" for names, why in met.items()))


def probe(transports: str, device: str, start_seconds: float) -> tuple[str | None, list[str]]:
    """Moves bytes from one process to another -> None or what went wrong, and what UCX had to remark."""
    directory = Path(tempfile.gettempdir()) / leftovers.owned_name(leftovers.ENGINE)
    directory.mkdir(mode=0o700)
    log = directory / "log"
    processes: list[Process] = []
    try:
        for role in ("source", "reader"):
            arguments = ["--role", role, "--directory", str(directory), "--device", device, "--transports", transports]
            processes.append(start_process(__name__, arguments, log_path=log, start_method=None, seconds=start_seconds))
        deadline = time.monotonic() + PROBE_SECONDS
        while (status := processes[1].poll()) is None and time.monotonic() < deadline:
            if processes[0].poll() is not None and not (directory / "source").exists():
                status = processes[0].poll()
                break
            time.sleep(0.02)
        text = log.read_text(errors="replace")
        remarks = [line.strip() for line in re.findall(r"UCX\s+WARN\s+(.*)", text)]
        if status == 0:
            return None, sorted(set(remarks))
        last = text.strip().splitlines()[-1:] or ["no output"]
        return (f"nothing arrived in {PROBE_SECONDS:.0f} s" if status is None else last[0]), remarks
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=PROBE_SECONDS)
            if process.stdin:
                process.stdin.close()
        shutil.rmtree(directory, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """One end of a probe. The source exposes bytes and waits to be ended; the reader reads them and says so."""
    parser = argparse.ArgumentParser()
    for name in ("--role", "--directory", "--device", "--transports"):
        parser.add_argument(name, required=True)
    options = parser.parse_args(arguments)
    end_with_parent()
    os.environ["UCX_TLS"] = options.transports
    ends = {"source": _source, "reader": _read}
    ends[options.role](Path(options.directory), options.device)


def _agent(name: str, device: str, value: int) -> tuple[object, torch.Tensor, list[tuple[int, int, int]], str]:
    from nixl._api import nixl_agent, nixl_agent_config

    patches.rest_between_progress()
    agent = nixl_agent(name, nixl_agent_config(num_threads=0))
    memory = torch.full((NUM_BYTES,), value, dtype=torch.uint8, device=device)
    kind, index = ("DRAM", 0) if device == "cpu" else ("VRAM", memory.device.index or 0)
    agent.register_memory([(memory.data_ptr(), NUM_BYTES, index, "")], kind)
    return agent, memory, [(memory.data_ptr(), NUM_BYTES, index)], kind


def _source(directory: Path, device: str) -> None:
    agent, _memory, ((address, _, index),), _ = _agent("source", device, 1)
    staging = directory / "source.new"
    staging.write_bytes(f"{address} {index}\n".encode() + agent.get_agent_metadata())  # type: ignore[attr-defined]
    staging.rename(directory / "source")
    time.sleep(PROBE_SECONDS)


def _read(directory: Path, device: str) -> None:
    agent, memory, here, kind = _agent("reader", device, 0)
    while not (directory / "source").exists():
        time.sleep(0.01)
    place, _, metadata = (directory / "source").read_bytes().partition(b"\n")
    address, index = map(int, place.split())
    peer = agent.add_remote_agent(metadata)  # type: ignore[attr-defined]
    near = agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, kind)  # type: ignore[attr-defined]
    far = agent.prep_xfer_dlist(peer, [(address, NUM_BYTES, index)], kind)  # type: ignore[attr-defined]
    handle = agent.make_prepped_xfer("READ", near, [0], far, [0])  # type: ignore[attr-defined]
    state = agent.transfer(handle)  # type: ignore[attr-defined]
    while state == "PROC":
        time.sleep(0.001)
        state = agent.check_xfer_state(handle)  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        agent.release_xfer_handle(handle)  # type: ignore[attr-defined]
    if state != "DONE" or not bool((memory == 1).all()):
        raise SystemExit(f"the transfer ended as {state}, {int((memory == 1).sum())} of {NUM_BYTES} bytes arrived")
    os._exit(0)


if __name__ == "__main__":
    main()
