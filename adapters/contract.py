"""The words that a trainer and an engine share: requests, results, traces, versions, manifests, errors.

Both sides import this module and nothing of each other. It knows no model, no tensor library and no transport: what a
trace means is the provider's business, what carries a message is the engine's.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

SEED_LIMIT = 1 << 63
FinishReason = Literal["stop", "length", "abort", "error"]
LogprobMode = Literal["processed", "raw"]


class EngineError(RuntimeError):
    """The engine could not do what was asked. Subclasses say whether it still lives and what it serves."""


class EngineDead(EngineError):
    """The engine process is gone. Start another one; the old version can be published to it."""


class EngineStartFailed(EngineDead):
    """The engine process ended before it served: a wrong directory, wrong settings, no room for the weights."""


class PluginMissing(EngineStartFailed):
    """vLLM came up without Tether's plugin: it would have served another model without a trace."""


class EngineOutOfMemory(EngineDead):
    """The engine process ran out of memory, on the host or the device, and ended."""


class EngineTimeout(EngineError):
    """The engine did not answer within the deadline, or its heart stopped. Its state is unknown until `health`."""


class EngineBlocked(EngineError):
    """No whole version is loaded: generation is refused until a newer full version commits."""


class PublicationRefused(EngineError):
    """The offered version was rejected before anything changed. The old version serves on."""


class PublicationFailed(EngineError):
    """Commit failed and was rolled back. The old version serves on."""


def new_seed() -> int:
    """A seed from the operating system's entropy, in [0, 2**63)."""
    return secrets.randbelow(SEED_LIMIT)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) hashed from its parts, so that neighbouring parts give unrelated seeds.

    The first 8 bytes of BLAKE2b over the parts' decimal or UTF-8 text, each ended by a zero byte, big-endian,
    without the top bit. Equal parts give equal seeds on every machine.
    """
    text = b"".join(str(part).encode() + b"\0" for part in parts)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class Version(msgspec.Struct, frozen=True, order=True):
    """Names one set of weights. `update` only grows within an incarnation; a start or a resume opens a new one."""

    incarnation: int
    update: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.update}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens. temperature 0 is greedy; top_k 0 means off. Fields mean what they mean in vLLM."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        rules = {
            "max_tokens": (self.max_tokens >= 1, "an integer >= 1"),
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "a finite number >= 0"),
            "top_k": (self.top_k >= 0, "0 (off) or a count >= 1"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]"),
        }
        for name, (holds, want) in rules.items():
            if not holds:
                raise ValueError(f"sampling {name}: got {getattr(self, name)!r}, expected {want}")

    def check_trainable(self) -> None:
        """Raises ValueError if the selected log-probs would not be those of the policy that is trained."""
        bad = {
            "temperature": self.temperature > 0,
            "top_k": self.top_k == 0,
            "top_p": self.top_p == 1,
            "min_p": self.min_p == 0,
        }
        if offending := [f"{name}={getattr(self, name)!r}" for name, fine in bad.items() if not fine]:
            raise ValueError(
                f"sampling {', '.join(offending)}: cannot be trained on: the trainer recomputes log-probs over the "
                "whole vocabulary at a temperature > 0; use temperature > 0, top_k=0, top_p=1, min_p=0"
            )


class Trace(msgspec.Struct, frozen=True):
    """What really ran, one row per input token: loops (shape [tokens]) or experts (shape [tokens, layers, top_k]).

    `data` holds unsigned bytes, row-major. Providers define the kinds; the adapters only carry them.
    """

    kind: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != math.prod(self.shape):
            raise ValueError(f"trace {self.kind!r}: got {len(self.data)} values, expected shape {self.shape!r}")


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, one sample. `seed` None draws one from OS entropy at creation.

    `execution` is the provider's text for how much of the model a token runs, such as "fixed:3"; None takes the
    engine's. `trace` says what the first tokens of the prompt ran before and must run again, when they were generated
    in an earlier turn: at most a row per prompt token, the others run as a prompt does.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int | None = None
    execution: str | None = None
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if self.seed is None:
            msgspec.structs.force_setattr(self, "seed", new_seed())
        if not 0 <= self.seed < SEED_LIMIT:  # type: ignore[operator]
            raise ValueError(f"request {self.request_id!r}: seed {self.seed!r} is outside [0, 2**63)")

    @property
    def effective_seed(self) -> int:
        assert self.seed is not None
        return self.seed


def sample_requests(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """n requests for n samples of one prompt: ids `{id}/{index}`, seeds `derive_seed(seed, index)`."""
    if n < 1:
        raise ValueError(f"request {request.request_id!r}: got n={n!r}, expected an integer >= 1")
    return [
        msgspec.structs.replace(
            request, request_id=f"{request.request_id}/{i}", seed=derive_seed(request.effective_seed, i)
        )
        for i in range(n)
    ]


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one request became. An error or an abort keeps the seed and whatever tokens there are.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution it was drawn from (processed). The
    trace has a row for each of the P + n - 1 tokens that were inputs: the last generated token never was one.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    seed: int
    version: Version
    finish_reason: FinishReason
    trace: Trace | None = None
    error: str | None = None
    kv_bytes: int = 0
    """Bytes of keys and values that came for it from another worker; 0 where one engine does it all."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens to score from `num_prompt_tokens` on; with a trace (of len(token_ids) - 1 rows) they run as it says."""

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    temperature: float = 1.0
    mode: LogprobMode = "processed"
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_prompt_tokens < len(self.token_ids):
            raise ValueError(
                f"score {self.request_id!r}: got num_prompt_tokens={self.num_prompt_tokens!r} of {len(self.token_ids)} "
                "tokens, expected at least one prompt token and one token to score"
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"score {self.request_id!r}: got temperature {self.temperature!r}, expected > 0")


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """One log-prob per scored token, or the reason why there are none."""

    request_id: str
    logprobs: tuple[float, ...]
    version: Version
    error: str | None = None


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One physical tensor as published: its Hugging Face name, global shape, dtype ("float32") and content digest."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """Everything a version consists of."""

    tensors: tuple[TensorSpec, ...]

    @property
    def digest(self) -> str:
        """One digest over all names, shapes, dtypes and contents; independent of the order of the tensors."""
        lines = sorted(f"{t.name} {t.shape} {t.dtype} {t.digest}" for t in self.tensors)
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """A publication that committed, with the seconds of its phases and the fingerprint read from the live weights."""

    version: Version
    manifest_digest: str
    num_bytes: int
    seconds: dict[str, float]
    """Of phases that follow one another; which ones there are is the engine's own."""


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One process of an engine of several. `state` is what its own health says, or "dead" or "silent"."""

    role: str
    pid: int
    state: str
    version: Version | None
    num_running: int = 0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`state` is "serving", "publishing" or "blocked"; a blocked engine says why in `reason`.

    An engine of several processes lists them in `workers`, and serves while it can do without those that are gone.
    """

    state: Literal["serving", "publishing", "blocked"]
    version: Version
    num_running: int
    pid: int
    reason: str | None = None
    workers: tuple[WorkerHealth, ...] = ()


def distinct_ids(call: str, requests: Sequence[GenerationRequest | ScoreRequest]) -> set[str]:
    """The ids of a call's requests. Raises ValueError if two share one."""
    ids = {request.request_id for request in requests}
    if len(ids) != len(requests):
        raise ValueError(f"{call}: two requests share an id; results could not be told apart")
    return ids


class Engine(Protocol):
    """What every engine offers. Results may come in any order; every call ends within its deadline."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yields one result per request as it finishes. A bad request fails alone, as a result with an error.

        Raises:
            ValueError: two requests share an id.
            EngineDead, EngineTimeout, EngineBlocked: nothing more will come.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests early; `generate` yields them with finish_reason "abort" and the tokens there are."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Selected-token log-probs of given tokens, in the order of the requests."""
        ...

    def publish(self, version: Version, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> PublishReport:
        """Makes the engine serve these weights, whole, or leaves it as it was.

        Raises:
            PublicationRefused: the version, a name, shape, dtype, digest or value is wrong; nothing changed.
            PublicationFailed: commit failed; the old version serves again.
            EngineBlocked: commit failed and so did the way back.
        """
        ...

    def republish(self) -> PublishReport:
        """Offers again what EngineDead or EngineTimeout interrupted, without the caller's tensors."""
        ...

    def restart(self) -> None:
        """Brings the engine back, in whatever state it is, at the version that was committed last."""
        ...

    def weight_version(self) -> Version: ...

    def health(self) -> Health: ...

    def close(self) -> None:
        """Stops everything the engine started. Idempotent."""
        ...
