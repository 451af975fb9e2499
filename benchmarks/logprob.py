"""Selected-token log-probs, forward and backward: our chunks against plain PyTorch, Liger, and the products alone.

    python -m benchmarks.logprob [--tiny] [--repeats 10] [--profile] [--commit ID]

16,384 rows, hidden 2048, vocabulary 49,152, bf16. The limit is the time of the three matrix products (logits, and the
gradients of states and weight), measured in the same run. Liger is measured where it is installed. --tiny is for a
machine without CUDA: it prints and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adapters.megatron import runtime
from adapters.megatron.logprobs import selected_logprobs
from adapters.megatron.parallel import Column, transformer_config
from benchmarks import measure, record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--chunk-rows", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--name", default="logprob_cuda")
    parser.add_argument("--commit", help="of a working tree without git")
    a = parser.parse_args()
    rows, hidden, vocab = (64, 32, 96) if a.tiny else (16384, 2048, 49152)
    settings = {"rows": rows, "hidden": hidden, "vocabulary": vocab, "dtype": "bfloat16", "repeats": a.repeats}
    command = "python -m benchmarks.logprob " + " ".join(sys.argv[1:])
    recording = record.Recording(a.name, command=command, settings=settings, commit_id=a.commit, is_kept=not a.tiny)
    runtime.initialize(runtime.RuntimeSettings())
    work = Work(rows, hidden, vocab)

    def add(name: str, row: dict[str, Any]) -> None:
        recording.save(**{name: measure.rounded(row)})
        print(name, json.dumps({k: v for k, v in recording.results[name].items() if k != "kernels"}), flush=True)

    add("its three matrix products", timed(work.products, work, a))
    for chunk in a.chunk_rows:
        add(f"ours, {chunk} rows", timed(lambda chunk=chunk: work.ours(chunk), work, a))
    add("ours, 2048 rows, with entropies", timed(lambda: work.ours(2048, with_entropy=True), work, a))
    torch.use_deterministic_algorithms(False)  # of the others nothing is asked
    add("plain PyTorch", timed(work.plain, work, a))
    if importlib.util.find_spec("liger_kernel") and measure.is_cuda():
        add("Liger, sum", liger(work, a))
    recording.finish()


class Work:
    """The same states, weight and targets for everyone."""

    def __init__(self, rows: int, hidden: int, vocab: int) -> None:
        shape = transformer_config(
            dtype=torch.bfloat16, num_layers=1, hidden_size=hidden, num_attention_heads=1, ffn_hidden_size=hidden
        )
        self.head = Column(shape, hidden, vocab).to(measure.device())
        measure.fill_randomly(dict(self.head.named_parameters()))
        self.weight = self.head.weight
        device = measure.device()
        self.states = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.targets = torch.randint(vocab, (rows,), device=device)
        self.upstream = torch.randn(rows, device=device)

    def forget(self) -> None:
        self.states.grad = self.weight.grad = None

    def ours(self, chunk_rows: int, *, with_entropy: bool = False) -> None:
        found = selected_logprobs(
            self.states, self.head, self.targets, chunk_rows=chunk_rows, with_entropy=with_entropy
        )
        (found * self.upstream).sum().backward()

    def plain(self) -> None:
        logprobs = F.linear(self.states, self.weight).float().log_softmax(-1)
        (logprobs.gather(1, self.targets[:, None])[:, 0] * self.upstream).sum().backward()

    def liger(self) -> None:
        """Its fused linear cross-entropy, summed: it has no gradient of single rows to pass on."""
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found = liger_fused_linear_cross_entropy(self.states, self.weight, self.targets, reduction="sum")
        (found[0] if isinstance(found, tuple) else found).backward()

    @torch.no_grad()
    def products(self) -> None:
        logits: Tensor = F.linear(self.states, self.weight)
        torch.mm(logits, self.weight)
        torch.mm(logits.t(), self.states)


def liger(work: Work, a: argparse.Namespace) -> dict[str, Any]:
    """Its row; the error in its place if it does not run with these versions."""
    try:
        return timed(work.liger, work, a) | {"version": importlib.metadata.version("liger-kernel")}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def timed(call: Callable[[], None], work: Work, a: argparse.Namespace) -> dict[str, Any]:
    def step() -> None:
        work.forget()
        call()

    row: dict[str, Any] = {"seconds": measure.seconds(step, repeats=a.repeats, warmup=2)}
    work.forget()
    row["memory_bytes"] = measure.peak_bytes(call)
    work.forget()
    if a.profile:
        row["kernels"] = measure.top_kernels(step)
    return row


if __name__ == "__main__":
    main()
