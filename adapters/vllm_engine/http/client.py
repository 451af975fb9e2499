"""A vLLM server as `HttpEngine` sees it: its endpoints, our workers behind one of them, and errors by kind."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import msgspec

from adapters.contract import EngineDead, EngineError, EngineTimeout
from adapters.vllm_engine.http.messages import WeightStep, encode

logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request
DEVELOPMENT = "VLLM_SERVER_DEV_MODE=1"


class Server:
    """Calls with deadlines. Generation may be called from several threads."""

    def __init__(self, url: str, *, deadline_seconds: float, connections: int) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=connections + 4, max_keepalive_connections=connections + 4)
        self._client = httpx.Client(base_url=url, timeout=deadline_seconds, limits=limits, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def is_healthy(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            return self._client.get("/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        """
        Raises:
            EngineDead: nobody answers, or the server's engine has ended.
            EngineTimeout: no answer within the deadline.
            ValueError: the server refused what it was sent.
            EngineError: it failed; the message holds its own.
        """
        try:
            response = self._client.post(path, json=body, params=query)
        except httpx.TimeoutException as error:
            raise EngineTimeout(f"{self.url}{path}: no answer within the deadline: {error!r}") from error
        except httpx.HTTPError as error:
            raise EngineDead(f"{self.url}{path}: {error!r}") from error
        if response.status_code == 404:
            raise EngineError(f"{self.url}{path}: not there; start the server with {DEVELOPMENT} in its environment")
        if response.is_client_error:
            raise ValueError(_reason(response))
        if response.is_error:
            kind = EngineError if self.is_healthy() else EngineDead
            raise kind(f"{self.url}{path}: {response.status_code}: {_reason(response)}")
        return response.json() if response.content else None

    def ask_workers(self, message: Any) -> list[Any]:
        """What every worker answers to a message of `http_messages`."""
        answers = self.post("/collective_rpc", {"method": "tether_http", "args": [encode(message)]})["results"]
        for answer in answers:
            if "error" in answer:
                raise ValueError(f"{self.url}: {answer['message']}")
        return [answer["value"] for answer in answers]

    def weight_step(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a step of the weight transaction on every worker, as `Publication` does."""
        raw = msgspec.Raw(msgspec.json.encode(arguments[0] if arguments else None))
        answers = self.ask_workers(WeightStep(method=method, argument=raw))
        if method in ("commit", "rollback", "fingerprint"):
            return [{name: tuple(part) for name, part in answer.items()} for answer in answers]
        return answers


def _reason(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
