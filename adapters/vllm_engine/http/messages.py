"""What `HttpEngine` says to the workers of a vLLM server, as JSON through the server's own `/collective_rpc`."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.contract import Manifest, Version
from adapters.vllm_engine.memory.buckets import Bucket
from adapters.vllm_engine.worker.model_interface import TraceLayout


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a client. What an earlier client began and did not finish is taken back."""

    execution: str | None


class CheckPolicy(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    text: str


class Take(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Records of ended requests, each once, by the ids that the client gave them."""

    request_ids: tuple[str, ...]


class GetCounters(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class WeightStep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A method of `LiveWeights`."""

    method: str
    argument: msgspec.Raw = msgspec.Raw(b"null")


Message = Attach | CheckPolicy | Take | GetCounters | WeightStep
ARGUMENTS: dict[str, Any] = {
    "stage": Bucket,
    "prepare": Manifest,
    "commit": Version,
    "rollback": Version,
    "settle": None,
    "discard": None,
    "fingerprint": None,
}
"""Methods of `LiveWeights` that a client may call, and what they take."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is."""

    layout: TraceLayout
    tensors: dict[str, tuple[int, ...]]
    """Name and shape of every physical tensor."""
    dtype: str
    max_model_len: int
    vocab_size: int
    pid: int
    version: Version
    manifest_digest: str | None
    """Of the version that is served; None for what the server started with."""
    problems: tuple[str, ...]
    """What about the server breaks the contract, each with the option that mends it."""


def encode(message: Any) -> str:
    return msgspec.json.encode(message).decode()
