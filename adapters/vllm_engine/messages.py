"""What travels between an engine's client and its process: typed, one msgpack frame a message.

A call carries an id and gets exactly one `Reply` or `Failure`; results of generation come as `Result`s of their own.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from adapters import contract
from adapters.contract import GenerationRequest, GenerationResult, Manifest, ScoreRequest, Version

from .buckets import Bucket


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything a client asks."""

    call_id: int


class Generate(Call, frozen=True, kw_only=True, tag=True):
    requests: tuple[GenerationRequest, ...]


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


class AbortPublication(Call, frozen=True, kw_only=True, tag=True):
    pass


class GetHealth(Call, frozen=True, kw_only=True, tag=True):
    pass


class GetCounters(Call, frozen=True, kw_only=True, tag=True):
    pass


class Shutdown(Call, frozen=True, kw_only=True, tag=True):
    pass


AnyCall = (
    Generate | Abort | Score | Begin | Stage | Prepare | Commit | AbortPublication | GetHealth | GetCounters | Shutdown
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


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent once, when the engine serves."""

    pid: int
    trace_kind: str


AnyAnswer = Reply | Failure | Result | Ready

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
