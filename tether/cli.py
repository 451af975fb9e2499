"""The `tether` command: the modules' subcommands under one name; `tether train` is `python -m tether.train`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": ("tether.train", "train a model by GRPO: rollouts, updates, publication, checkpoints, export"),
    "launch": ("tether.launch", "the same in several processes, on one machine or several, restarted when it fails"),
    "checkpoint": ("tether.checkpoint", "list, show, compare and verify the checkpoints of a run"),
    "memory": ("tether.memory", "say what a run takes of a device, whether it fits, and what to change"),
    "report": ("tether.report", "write one page about a run: figures, phases, sample responses"),
    "convert": ("tether.convert", "import, export and verify Hugging Face directories"),
}


def usage() -> str:
    lines = [f"  {name:<10}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["usage: tether COMMAND [ARGUMENTS]", "", *lines, "", "`tether COMMAND --help` says more."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code; an unknown one prints the usage and returns 2."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command not in COMMANDS:
        print(f"tether: unknown command {command!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[command]
    return int(importlib.import_module(module).main(rest) or 0)


if __name__ == "__main__":
    sys.exit(main())
