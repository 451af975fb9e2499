"""The whole depth matrix: every engine x every policy, coin policies, and all mutations. Part of make test-all.

    python -m tests.contracts.depth.matrix

Writes benchmarks/results/depth_matrix_cpu.json and exits 1 if a cell fails.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from tests.oracle import Oracle
from tests.tiny import write_ouro

from .checks import check_against_oracle, check_rows, differing, what_noticed
from .harness import COIN, ENGINES, MIXED, POLICIES, Outcome, rollouts
from .test_depth import CATCH, LOOPS


def main() -> int:
    record.commit()
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_ouro(Path(folder))
        oracle = Oracle(model)
        plain = _outcomes(rollouts(model, "plain", (*POLICIES, MIXED)))
        for engine in ENGINES:
            policies = (*POLICIES, MIXED, COIN)
            outcomes = _outcomes(rollouts(model, engine, policies, repeat=True))
            for policy in policies:
                cells.append(_show(_cell(engine, policy, outcomes[policy], plain.get(policy), oracle)))
        for mutation, (engine, policy) in CATCH.items():
            got = rollouts(model, engine, (policy,), mutation=mutation)
            caught = what_noticed(got, policy, plain, oracle)
            cells.append(
                _show(
                    {
                        "mutation": mutation,
                        "engine": engine,
                        "policy": policy,
                        "noticed": str(caught)[:200],
                        "ok": caught is not None,
                    }
                )
            )
    failed = [cell for cell in cells if not cell["ok"]]
    path = record.write(
        "depth_matrix_cpu",
        command="python -m tests.contracts.depth.matrix",
        settings={"model": "tiny Ouro, std 0.02, fp32", "bound": 2e-6},
        results={"cells": cells, "passed": len(cells) - len(failed), "failed": len(failed)},
    )
    print(f"{len(cells) - len(failed)} passed, {len(failed)} failed: {path}")
    return bool(failed)


def _outcomes(got: dict[str, Outcome] | str) -> dict[str, Outcome]:
    if isinstance(got, str):
        raise RuntimeError(got)
    return got


def _cell(engine: str, policy: str, outcome: Outcome, plain: Outcome | None, oracle: Oracle) -> dict[str, Any]:
    cell: dict[str, Any] = {"engine": engine, "policy": policy, "tokens": sum(len(r.tokens) for r in outcome.rows)}
    try:
        check_rows(outcome.rows, LOOPS)
        cell["max_difference_to_fp64"] = check_against_oracle(outcome.rows, oracle, rule=policy != COIN)
        cell["ok"] = plain is None or differing(outcome.rows, plain.rows) == []
    except AssertionError as error:
        cell |= {"ok": False, "error": str(error)[:300]}
    depths = [d for r in outcome.rows for d in r.loops[len(r.prompt) :]]
    histogram = [depths.count(loops) for loops in range(1, LOOPS + 1)]
    return cell | {"histogram": histogram, "preempted": outcome.preempted, "cached_tokens": outcome.cached_tokens}


def _show(cell: dict[str, Any]) -> dict[str, Any]:
    print(cell, flush=True)
    return cell


if __name__ == "__main__":
    sys.exit(main())
