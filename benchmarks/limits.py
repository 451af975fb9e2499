"""What this machine can do at most: the bandwidth of a large copy, and the rate of a large matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def measure() -> dict[str, float]:
    """bytes_per_second, read and written, of a copy; flops_per_second of a product [8192, 8192] @ [8192, 8192] in bf16.

    On CPU both are small ones, so that a trial run has figures at all. The best of five after a warm-up.
    """
    cuda = torch.cuda.is_available()
    device, size, width = ("cuda", 1 << 32, 8192) if cuda else ("cpu", 1 << 26, 512)
    return {
        "bytes_per_second": 2 * size / _copy_seconds(size, device),
        "flops_per_second": 2 * width**3 / _product_seconds(width, device),
    }


def _copy_seconds(size: int, device: str) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _best(lambda: target.copy_(source))


def _product_seconds(width: int, device: str) -> float:
    a, b = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return _best(lambda: torch.mm(a, b, out=out))


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(6):
        _wait()
        started = time.perf_counter()
        run()
        _wait()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
