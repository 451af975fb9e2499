"""What a router keeps of each prompt: its requests, where its keys and values are, and who still has to read them.

Requests of one call with the same prompt are one `Group`: one prefill serves them all, on whichever workers they are
continued. On each decode worker the first one reads the whole prompt; the others follow when it has arrived and find
it in that worker's prefix cache, except for the last block, which they read too: only full blocks are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from adapters.contract import GenerationRequest, GenerationResult, SamplingParams, Version
from adapters.vllm_engine.disaggregated.fleet import Worker
from adapters.vllm_engine.process.messages import Handover


@dataclass(kw_only=True, eq=False)
class Task:
    """One request on its way to a result.

    Attributes:
        worker: where it decodes, once it was sent there.
        arrived: whether the prompt's keys and values have come there.
        attempts: how often it was sent to a prefill worker.
    """

    request: GenerationRequest
    group: Group
    worker: Worker | None = None
    arrived: bool = False
    attempts: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def ended(self, reason: str, version: Version, error: str | None = None) -> GenerationResult:
        """A result without tokens."""
        return GenerationResult(
            request_id=self.request_id,
            token_ids=(),
            logprobs=(),
            seed=self.request.effective_seed,
            version=version,
            finish_reason=reason,  # type: ignore[arg-type]
            error=error,
        )


@dataclass(kw_only=True, eq=False)
class Group:
    """Requests that share a prompt, and one prefill of it.

    Attributes:
        waiting: not yet sent to a decode worker.
        reading: sent, and their keys and values have not come.
        again: came back, because a worker was lost or their handover was no good.
        readers: of this prefill, fixed when the first of them is sent.
        num_read: of those that have read it.
        leading: by decode worker the task that reads the whole prompt; None when it has arrived.
    """

    prefill_id: str
    prompt: tuple[int, ...]
    waiting: list[Task] = field(default_factory=list)
    reading: list[Task] = field(default_factory=list)
    again: list[Task] = field(default_factory=list)
    prefill_worker: Worker | None = None
    handover: Handover | None = None
    readers: int = 0
    num_read: int = 0
    leading: dict[Worker, Task | None] = field(default_factory=dict)

    def prefill_request(self) -> GenerationRequest:
        """Only the prompt: what is wrong with one of the requests fails that one alone, where it decodes.

        A prompt with a trace is one request's own, and runs as the trace says and as deep as that request may read.
        """
        first = self.waiting[0].request
        return GenerationRequest(
            request_id=self.prefill_id,
            prompt_token_ids=self.prompt,
            sampling=SamplingParams(max_tokens=1),
            seed=0,
            trace=first.trace,
            execution=first.execution if first.trace is not None else None,
        )

    def held(self, block_size: int) -> int:
        """Tokens of the blocks that its prompt takes, and of one more for the token that is drawn."""
        return (-(-len(self.prompt) // block_size) + 1) * block_size

    def next_for(self, worker: Worker) -> Task | None:
        """The task to send to a worker now; None while that worker's first one still reads."""
        if not self.waiting or self.leading.get(worker) is not None:
            return None
        return self.waiting[0]


def grouped(requests: Sequence[GenerationRequest], name: str) -> list[Group]:
    """Groups in the order of their first requests; their prefill ids begin with `name`."""
    groups: dict[object, Group] = {}
    for request in requests:
        prompt = request.prompt_token_ids
        key = prompt if request.trace is None else request.request_id
        group = groups.setdefault(key, Group(prefill_id=f"{name}/{len(groups)}", prompt=prompt))
        group.waiting.append(Task(request=request, group=group))
    return list(groups.values())
