"""The recipe at a real shape with random weights, as a user would run it: updates, resume, export, verification.

    python -m benchmarks.full_size --model ouro-1.4b   [--part recipe|one-slot|updates|all] [--folder DIR ...]
    python -m benchmarks.full_size --model olmoe-1b-7b                              (olmoe-1b-7b-ep2: two devices)

recipe    GRPO updates by the driver; it is killed in the middle and a fresh process resumes; the export, verified; and
          how far trainer and engine are apart in each update, beside the trainer's own error in bf16
          (`benchmarks.yardstick`).
one-slot  two updates in one go against one and a resumed one, with one sample at a time in the engine: every stored
          tensor, every sample and every metric bitwise.
updates   four updates and nothing beside them, for the time that their phases take; not among "all".

Writes one JSON, after every step anew, so that what was measured stays if a later step fails; it is incomplete then.
What it cannot say is anything about the real weights' behaviour. tiny-ouro and tiny-olmoe run the same on a CPU in
minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record
from benchmarks.full_size_plans import PLANS
from benchmarks.full_size_steps import Steps, one_slot, recipe, updates
from benchmarks.shapes import SHAPES

PARTS = {"recipe": recipe, "one-slot": one_slot, "updates": updates}
ALL = ("recipe", "one-slot")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(PLANS), default="ouro-1.4b")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="recipe")
    parser.add_argument("--folder", type=Path, nargs="+", default=[], help="the first one with room is used")
    parser.add_argument("--limit-seconds", type=float, default=500, help="all of it; what is not done then is an error")
    parser.add_argument("--name", help="of the JSON; full_size_MODEL[_one_slot or _updates] if left out")
    parser.add_argument("--commit", help="of a working tree without git")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the plan's settings")
    parser.add_argument("--no-record", action="store_true", help="print only; the working tree may differ from HEAD")
    arguments = parser.parse_args(argv)
    plan = PLANS[arguments.model]
    suffix = "" if arguments.part in ("recipe", "all") else f"_{arguments.part.replace('-', '_')}"
    name = arguments.name or f"full_size_{arguments.model.replace('-', '_').replace('.', '_')}{suffix}"
    recording = record.Recording(
        name,
        command=f"python -m benchmarks.full_size --model {arguments.model} --part {arguments.part}",
        settings={
            "recipe": plan.recipe,
            "one_slot": plan.one_slot,
            "set": arguments.set,
            "model": SHAPES[plan.model],
        },
        commit_id=arguments.commit,
        is_kept=not arguments.no_record,
    )
    with tempfile.TemporaryDirectory(prefix="full_size_", dir=roomy(arguments.folder, plan.disk_bytes)) as folder:
        steps = Steps(
            plan,
            Path(folder),
            more=arguments.set,
            limit_seconds=arguments.limit_seconds,
            write=lambda results: recording.save(**results),
        )
        signal.signal(signal.SIGTERM, lambda *_: steps.stop())
        for part in ALL if arguments.part == "all" else [arguments.part]:
            PARTS[part](steps)
    print(json.dumps(steps.results, indent=1))
    print(f"failed: {steps.failed or 'none'}")
    if not steps.failed:
        recording.finish()
    return int(bool(steps.failed))


def roomy(folders: Sequence[Path], needed: int) -> Path:
    """The first of the folders, or of the system's temporary ones, with room.

    Raises:
        OSError: none has; says what each has.
    """
    folders = list(folders) or [Path(tempfile.gettempdir())]
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    for folder, size in free.items():
        if size >= needed:
            return folder
    raise OSError(f"needs {needed / 2**30:.0f} GiB, free: {', '.join(f'{f} {s / 2**30:.0f}' for f, s in free.items())}")


if __name__ == "__main__":
    sys.exit(main())
