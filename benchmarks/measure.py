"""Measures one piece of work on this machine: seconds, peak memory, and what device and host spend the time on."""

from __future__ import annotations

import cProfile
import math
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record


def is_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda" if is_cuda() else "cpu")


def synchronize() -> None:
    if is_cuda():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], *, repeats: int, warmup: int = 1) -> dict[str, float]:
    """Spread of the wall-clock seconds of a call, until the device is done; the first `warmup` calls are dropped."""
    taken = []
    for turn in range(warmup + repeats):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        if turn >= warmup:
            taken.append(time.perf_counter() - started)
    return record.spread(taken)


def peak_bytes(work: Callable[[], Any]) -> dict[str, int] | None:
    """Device memory of a call: allocated before it, and the most while it ran. None on the CPU, where it runs too."""
    if is_cuda():
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    work()
    synchronize()
    if not is_cuda():
        return None
    most = torch.cuda.max_memory_allocated()
    return {"before": before, "peak": most, "extra": most - before}


def top_kernels(work: Callable[[], Any], *, count: int = 15) -> dict[str, Any]:
    """Of one call: the device's kernels (on the CPU: operators) that took longest, in milliseconds, and their sum.

    What the wall clock has beyond the sum of all kernels, the device waited for.
    """
    kind = torch.profiler.ProfilerActivity.CUDA if is_cuda() else torch.profiler.ProfilerActivity.CPU
    synchronize()
    with torch.profiler.profile(activities=[kind]) as profile:
        started = time.perf_counter()
        work()
        synchronize()
        wall = time.perf_counter() - started
    cuda = torch.autograd.DeviceType.CUDA
    rows = [
        (event.key, (event.self_device_time_total if is_cuda() else event.self_cpu_time_total) / 1e3, event.count)
        for event in profile.key_averages()
        if not is_cuda() or event.device_type == cuda
    ]
    rows = sorted(rows, key=lambda row: -row[1])
    return {
        "wall_ms": wall * 1e3,
        "kernels_ms": sum(row[1] for row in rows),
        "top": [{"name": name[:160], "ms": round(ms, 3), "calls": calls} for name, ms, calls in rows[:count]],
    }


def top_functions(work: Callable[[], Any], *, count: int = 15) -> list[dict[str, Any]]:
    """Of one call, in this thread: the functions that took longest by themselves, in milliseconds, waiting among it.

    Python's profiler makes every call of a function slower, by about a microsecond.
    """
    profile = cProfile.Profile()
    profile.runcall(work)
    own = sorted(pstats.Stats(profile).stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
    return [
        {"name": f"{'/'.join(Path(file).parts[-2:])}:{line} {name}", "ms": round(1e3 * seconds, 3), "calls": calls}
        for (file, line, name), (calls, _, seconds, *_) in own[:count]
    ]


@torch.no_grad()
def fill_randomly(parameters: dict[str, Tensor], *, seed: int = 0) -> None:
    """Matrices of standard deviation 0.02, norms 1, made where they are."""
    generator = torch.Generator(device()).manual_seed(seed)
    for name, parameter in parameters.items():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def drop_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def rounded(value: Any, digits: int = 5) -> Any:
    """The same, floats cut to significant digits."""
    if isinstance(value, dict):
        return {name: rounded(each, digits) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each, digits) for each in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return value
