"""The reference policy in an engine of its own, started from the model's directory: `reference_scorer=engine`.

What `adapters.megatron.reference` does in the trainer, without exchanging the trainer's weights for every update: the
price is the memory of another engine. Nothing is ever published to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adapters.contract import Engine, EngineError, ScoreRequest, Trace
from tether.prepare import Job
from tether.ranks import from_rank_zero
from tether.recovery import with_restarts

if TYPE_CHECKING:
    from adapters.megatron.packing import TrainSample


class EngineReference:
    """What the model that a run began with says of samples.

    Args:
        engine: serves the weights of the model's directory; None on every rank but 0.
    """

    def __init__(self, job: Job, engine: Engine | None) -> None:
        self.job, self.engine = job, engine

    def score(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probs of every response token, by sample, run as the samples' traces say. Collective.

        Raises:
            EngineError: the engine is lost for good, or could not score a sample.
        """
        return from_rank_zero(lambda: self._score(samples))

    def _score(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        engine = self.engine
        assert engine is not None
        requests = [self._request(i, sample) for i, sample in enumerate(samples)]
        results = with_restarts(engine, lambda: engine.score(requests))
        if failed := [f"{result.request_id}: {result.error}" for result in results if result.error is not None]:
            raise EngineError(f"{len(failed)} samples could not be scored, the first: {'; '.join(failed[:10])}")
        return [list(result.logprobs) for result in results]

    def _request(self, index: int, sample: TrainSample) -> ScoreRequest:
        rows = None if sample.trace is None else sample.trace.numpy().astype("uint8")
        kind = self.job.part("trace").KIND
        return ScoreRequest(
            request_id=f"reference/{index}",
            token_ids=(*sample.prompt_token_ids, *sample.response_token_ids),
            num_prompt_tokens=len(sample.prompt_token_ids),
            temperature=sample.temperature,
            trace=None if rows is None else Trace(kind, rows.shape, rows.tobytes()),
        )
