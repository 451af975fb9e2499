"""What travels between an engine's client and its process: typed, one msgpack frame a message.

A call carries an id and gets exactly one `Reply` or `Failure`; results of generation come as `Result`s of their own.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from adapters import contract
from adapters.contract import GenerationRequest, GenerationResult, Manifest, ScoreRequest, Version
from adapters.vllm_engine.memory.buckets import Bucket


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything a client asks."""

    call_id: int


class Generate(Call, frozen=True, kw_only=True, tag=True):
    requests: tuple[GenerationRequest, ...]


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt whose keys and values wait in a prefill worker for those who go on from it."""

    prefill_id: str
    version: Version
    params: dict[str, Any]
    """What vLLM's connector needs to find them, unchanged."""
    rows: bytes | None
    """What each prompt token ran, where that is seen only by running it; else None."""


class Prefill(Call, frozen=True, kw_only=True, tag=True):
    """Computes the prompt of each request and keeps it until it is read or released. Each ends as a `Prefilled`."""

    requests: tuple[GenerationRequest, ...]


class Decode(Call, frozen=True, kw_only=True, tag=True):
    """Goes on from handed over prompts, one handover a request. Each begins with `Arrived` or ends as `Lost`."""

    requests: tuple[GenerationRequest, ...]
    handovers: tuple[Handover, ...]
    readers: int
    """How many requests, in this and other calls, read each of these prompts."""


class Release(Call, frozen=True, kw_only=True, tag=True):
    """Lets go of prompts that nobody will read any more. Unknown ones are ignored."""

    prefill_ids: tuple[str, ...]


class ForgetPeer(Call, frozen=True, kw_only=True, tag=True):
    """Drops what is known of an engine that has ended."""

    engine_id: str


class Settle(Call, frozen=True, kw_only=True, tag=True):
    """Every worker committed: the version counts, and what served before is let go. Idempotent."""


class Revert(Call, frozen=True, kw_only=True, tag=True):
    """Another worker could not commit: goes back to what served before. Idempotent."""


class Abort(Call, frozen=True, kw_only=True, tag=True):
    request_ids: tuple[str, ...]


class Score(Call, frozen=True, kw_only=True, tag=True):
    requests: tuple[ScoreRequest, ...]


class Begin(Call, frozen=True, kw_only=True, tag=True):
    """Replies True if the version is already served with this very manifest: nothing more to do."""

    version: Version
    manifest: Manifest


class Stage(Call, frozen=True, kw_only=True, tag=True):
    bucket: Bucket


class Prepare(Call, frozen=True, kw_only=True, tag=True):
    pass


class Commit(Call, frozen=True, kw_only=True, tag=True):
    in_flight: Literal["drain", "abort"]
    hold: bool = False
    """Load and verify, but serve nothing until Settle or Revert: other workers have to commit too."""


class AbortPublication(Call, frozen=True, kw_only=True, tag=True):
    pass


class GetHealth(Call, frozen=True, kw_only=True, tag=True):
    pass


class GetCounters(Call, frozen=True, kw_only=True, tag=True):
    pass


class Shutdown(Call, frozen=True, kw_only=True, tag=True):
    pass


AnyCall = (
    Generate
    | Prefill
    | Decode
    | Release
    | ForgetPeer
    | Abort
    | Score
    | Begin
    | Stage
    | Prepare
    | Commit
    | Settle
    | Revert
    | AbortPublication
    | GetHealth
    | GetCounters
    | Shutdown
)


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int
    value: Any = None


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`error` is the name of a contract error, or of another exception that became an EngineError."""

    call_id: int
    error: str
    message: str


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    result: GenerationResult


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prompt was computed; without a handover it was aborted, or failed for the reason in `error`."""

    request_id: str
    handover: Handover | None = None
    error: str | None = None


class Arrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The keys and values of a request's prompt are here: this many bytes came for it from another worker."""

    request_id: str
    num_bytes: int


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A handed over prompt could not be used: nothing was generated, and it must be computed again."""

    request_id: str
    reason: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent once, when the engine serves."""

    pid: int
    trace_kind: str
    engine_id: str | None = None
    """Names the engine among those that pass keys and values on."""
    num_cache_tokens: int = 0
    """Tokens whose keys and values its cache can hold."""


Event = Result | Prefilled | Arrived | Lost
AnyAnswer = Reply | Failure | Ready | Event

encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(AnyCall).decode
decode_answer = msgspec.msgpack.Decoder(AnyAnswer).decode


def raise_failure(failure: Failure) -> None:
    """Raises the contract error that a failure names; anything else is an EngineError that says what it was."""
    kind = getattr(contract, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, contract.EngineError):
        raise kind(failure.message)
    if failure.error == "ValueError":
        raise ValueError(failure.message)
    raise contract.EngineError(f"{failure.error}: {failure.message}")
