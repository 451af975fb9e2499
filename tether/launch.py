"""Starts the trainer processes of a run, on one machine or on its share of several, and restarts them when they fail.

    python -m tether.launch --model M --data D --out O --updates N [--set train_devices=4] [--max-restarts 5] ...
    python -m tether.launch ... --set train_devices=16 --nodes 2 --node-rank 0 --rendezvous HOST:PORT

What it does not know itself goes to `tether.train`. Several processes are torchrun's; of several machines each starts
its share, with its own --node-rank, and all see the same OUT. A run that fails is started again from its newest
checkpoint, as often as asked and only while it gets further in between.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapters.megatron import checkpoint_files
from tether import settings
from tether.progress import say
from tether.run_directory import RunDirectory

USAGE_ERROR = 2
"""Exit code of a run whose input cannot be used: starting it again would not help."""
SHUTDOWN_SECONDS = 24 * 3600
"""torchrun's patience with workers that finish their update after a signal; a second signal ends them at once."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """This machine's place among several."""

    count: int = 1
    """Machines."""
    rank: int = 0
    """This one's number; the first one runs the engine."""
    rendezvous: str = ""
    """HOST:PORT of the first one."""

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            raise ValueError(f"--nodes {self.count} --node-rank {self.rank}: expected 0 <= node-rank < nodes")
        if self.count > 1 and not all(self.rendezvous.rpartition(":")[::2]):
            raise ValueError(f"--rendezvous: got {self.rendezvous!r}, expected HOST:PORT of the first of the nodes")


def main(argv: Sequence[str] | None = None) -> int:
    """One command line. Returns the exit code of the last attempt."""
    parser = _parser()
    own, rest = parser.parse_known_args(argv)
    if {"-h", "--help"} & set(rest):
        print(parser.format_help())
    arguments = settings.parse(rest, prog="python -m tether.launch")
    try:
        nodes = Nodes(count=own.nodes, rank=own.node_rank, rendezvous=own.rendezvous)
        launcher = command(arguments.settings.train_devices, nodes) if not arguments.dry_run else command(1, Nodes())
    except ValueError as error:
        say(f"tether launch: {error}")
        return USAGE_ERROR
    directory = RunDirectory(arguments.out)
    begun = progress(directory) if arguments.resume_from is None else arguments.resume_from
    return Supervisor(launcher, rest, directory=directory, max_restarts=own.max_restarts, begun=begun).run()


def progress(directory: RunDirectory) -> int:
    """Update of the newest complete checkpoint, -1 before the first one."""
    complete = checkpoint_files.complete_checkpoints(directory.checkpoints)
    return checkpoint_files.number(complete[-1]) if complete else -1


def command(num_processes: int, nodes: Nodes) -> list[str]:
    """The command, without the run's own arguments, that starts this machine's processes.

    Raises:
        ValueError: the processes cannot be divided among the machines.
    """
    if num_processes == 1 and nodes.count == 1:
        return [sys.executable, "-m", "tether.train"]
    if num_processes % nodes.count:
        raise ValueError(f"--nodes {nodes.count}: expected a divisor of train_devices = {num_processes}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes // nodes.count)]
    if nodes.count == 1:
        return [*torchrun, "--standalone", "-m", "tether.train"]
    host, _, port = nodes.rendezvous.rpartition(":")
    where = ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank), "--master-addr", host, "--master-port", port]
    return [*torchrun, *where, "-m", "tether.train"]


class Supervisor:
    """Runs a command until it succeeds, is asked to stop, or fails too often or without getting any further."""

    def __init__(
        self,
        launcher: Sequence[str],
        arguments: Sequence[str],
        *,
        directory: RunDirectory,
        max_restarts: int,
        begun: int = -1,
    ) -> None:
        self._launcher, self._arguments = list(launcher), list(arguments)
        self._directory, self._max_restarts, self._begun = directory, max_restarts, begun
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_stopping = False

    def run(self) -> int:
        """Returns the exit code of the last attempt."""
        old = {each: signal.signal(each, self._forward) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._run()
        finally:
            for each, handler in old.items():
                signal.signal(each, handler)

    def _run(self) -> int:
        arguments, restarts, before = self._arguments, 0, self._begun
        while True:
            code = self._once(arguments)
            if code in (0, USAGE_ERROR) or self._is_stopping:
                return code
            after = progress(self._directory)
            if why := self._gives_up(restarts, before, after):
                say(f"tether launch: the run ended with {code}; {why}")
                return code
            restarts, before = restarts + 1, after
            say(f"tether launch: the run ended with {code}; restart {restarts} of at most {self._max_restarts}, "
                f"from update {after}")  # fmt: skip
            # Whatever the first start went back to or was allowed to change is in the run by now.
            arguments = [*_without(self._arguments, "--resume-from", "--allow-change"), "--resume"]

    def _gives_up(self, restarts: int, before: int, after: int) -> str | None:
        if restarts >= self._max_restarts:
            return (
                f"it was restarted {restarts} time(s), as often as --max-restarts allows"
                if restarts
                else "not restarted"
            )
        if after <= before:
            return "it had got no further since it was started, so starting it again would not help"
        return None

    def _once(self, arguments: Sequence[str]) -> int:
        environment = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS)}
        with self._lock:
            if self._is_stopping:
                return 128 + signal.SIGTERM
            # A session of its own: a Ctrl-C reaches this process alone, which passes it on to the workers once.
            self._process = subprocess.Popen(
                [*self._launcher, *arguments], env=environment, start_new_session=True, preexec_fn=end_with_parent
            )
        return self._process.wait()

    def _forward(self, number: int, _frame: Any) -> None:
        """To the trainers themselves: torchrun would report a failure although every one of them ends well."""
        self._is_stopping = True
        if self._process is not None:
            for pid in _trainers(self._process.pid):
                os.kill(pid, number)


def _trainers(pid: int) -> list[int]:
    """The process that was started, or if that is torchrun the workers that it started."""
    import psutil

    try:
        children = psutil.Process(pid).children()
        workers = [child.pid for child in children if "tether.train" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []
    return workers or [pid]


def end_with_parent() -> None:
    """Between fork and exec: the kernel sends SIGTERM when the supervisor dies, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """The arguments without some options and their values, and without --resume."""
    kept, is_value = [], False
    for text in arguments:
        if is_value:
            is_value = False
        elif text in options:
            is_value = True
        elif text != "--resume" and not text.startswith(tuple(f"{option}=" for option in options)):
            kept.append(text)
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tether.launch",
        add_help=False,
        allow_abbrev=False,
        description="Starts the processes of a run and restarts them when they fail. All else is tether.train's:",
    )
    restarts = "restarts of a run that fails, each only if it got further since the last one (default: 0)"
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help=restarts)
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="machines; OUT is on all of them (default: 1)"
    )
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="number of this machine, from 0")
    parser.add_argument("--rendezvous", default="", metavar="HOST:PORT", help="where machine 0 can be reached")
    return parser


if __name__ == "__main__":
    sys.exit(main())
