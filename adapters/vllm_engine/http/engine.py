"""HttpEngine: a vLLM server that somebody else started, behind the engine contract.

The server needs our plugin, our worker (`http_worker`) and its development endpoints; `http_settings.server_command`
says how it is started. Weights go through a directory that the server sees too. The transaction is run from here
(`Publication`); what it has committed is remembered by the workers, so that a client which comes later finds it.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from adapters.clock import Clock
from adapters.contract import (
    EngineDead,
    EngineStartFailed,
    EngineTimeout,
    GenerationRequest,
    GenerationResult,
    Health,
    ScoreRequest,
    ScoreResult,
    Version,
    distinct_ids,
)
from adapters.vllm_engine.client.offers import InFlight, Offer, PublishingEngine
from adapters.vllm_engine.http.client import Server
from adapters.vllm_engine.http.messages import Attach, CheckPolicy, Facts, GetCounters, Take
from adapters.vllm_engine.http.requests import Sent
from adapters.vllm_engine.http.settings import HttpSettings
from adapters.vllm_engine.memory import leftovers
from adapters.vllm_engine.memory.shared_memory import SharedFileStore
from adapters.vllm_engine.process.outcomes import failed
from adapters.vllm_engine.process.publication import Publication
from adapters.vllm_engine.process.request_rules import Parameters, RequestRules
from adapters.vllm_engine.worker.records import Record

POLL_SECONDS = 0.5
INTERNAL_PREFIX = "generate-tokens-"
"""What vLLM's endpoint puts before the id that it is given."""


class HttpEngine(PublishingEngine):
    """A server in use. Use as a context manager, or call `close`, which leaves the server running.

    Not for use from several threads. One client at a time: what another one publishes meanwhile is not noticed.
    """

    def __init__(self, settings: HttpSettings) -> None:
        """Waits until the server is healthy.

        Raises:
            EngineTimeout: it was not within `settings.start_seconds`.
            EngineStartFailed: it lacks what the contract needs; all of it is named.
        """
        super().__init__(SharedFileStore(settings.directory))
        self.settings = settings
        leftovers.remove_abandoned(*([settings.directory] if settings.directory else []))
        self._server = Server(
            settings.url, deadline_seconds=settings.deadline_seconds, connections=settings.max_concurrent
        )
        self._pool = concurrent.futures.ThreadPoolExecutor(settings.max_concurrent, thread_name_prefix="http-engine")
        self._running: dict[str, Sent] = {}
        self._publication: Publication | None = None
        self._name, self._numbers = f"tether-{secrets.token_hex(4)}", itertools.count()
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the server's first worker."""
        return self._facts.pid

    @property
    def trace_kind(self) -> str:
        return self._facts.layout.kind

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """See `contract.Engine.generate`. Sent when iteration starts; what is not consumed is aborted."""
        wanted = distinct_ids("generate", requests)
        self._attached().check_serving()
        self._drop_unread()
        yield from [failed for request in requests if (failed := self._send_generation(request)) is not None]
        try:
            yield from self._collect(wanted)
        finally:
            self._drop_unread()

    def abort(self, request_ids: Iterable[str]) -> None:
        running = [self._running[r] for r in request_ids if r in self._running]
        sent = [each.sent_id for each in running if not each.future.cancel()]  # the others still wait for a connection
        if sent:
            self._server.post("/abort_requests", {"request_ids": [INTERNAL_PREFIX + s for s in sent]})

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        wanted = distinct_ids("score", requests)
        publication = self._attached()
        publication.check_serving()
        done: dict[str, Any] = {}
        for request in requests:
            try:
                parameters = self._rules.score(request)
            except ValueError as error:
                done[request.request_id] = failed(request, error, publication.version)
            else:
                self._send(request, request.token_ids[:-1], parameters, own_cache=True)
        done |= {result.request_id: result for result in self._collect(wanted)}
        return [done[r.request_id] for r in requests]

    def weight_version(self) -> Version:
        return self._attached().version

    def health(self) -> Health:
        """
        Raises:
            EngineDead: the server does not answer.
        """
        if not self._server.is_healthy():
            raise EngineDead(f"{self.settings.url}: not healthy")
        publication = self._attached()
        return Health(
            state="blocked" if publication.blocked else "serving",
            version=publication.version,
            num_running=len(self._running),
            pid=self.pid,
            reason=publication.blocked,
        )

    def counters(self) -> dict[str, int]:
        """Layer executions, tokens in them and records held, of the first worker since its start."""
        return self._server.ask_workers(GetCounters())[0]

    def restart(self) -> None:
        """Waits for the server, which others start again, and makes it serve the version that was committed last."""
        self._forget_running()
        self._publication = None
        self._attach()
        assert self._publication is not None
        if self._committed is not None and self._publication.version != self._committed.version:
            self._transact(self._committed, "drain", Clock())

    def close(self) -> None:
        """Lets the server go; it runs on with what it serves. Removes every file of ours. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._server.close()
        self._forget_offers()

    def _attach(self) -> None:
        deadline = time.monotonic() + self.settings.start_seconds
        while not self._server.is_healthy():
            if time.monotonic() > deadline:
                raise EngineTimeout(f"{self.settings.url}: not healthy within {self.settings.start_seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        answers = self._server.ask_workers(Attach(execution=self.settings.execution))
        self._facts = facts = msgspec.convert(answers[0], Facts)
        problems = list(facts.problems)
        if facts.max_model_len < self.settings.max_model_len:
            problems.append(f"--max-model-len {self.settings.max_model_len} (it has {facts.max_model_len})")
        if problems:
            raise EngineStartFailed(
                f"{self.settings.url}: the server was started without {', '.join(problems)}; start it as "
                "adapters.vllm_engine.http.settings.server_command says"
            )
        self._rules = RequestRules(
            layout=facts.layout,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            policy_problem=lambda text: self._server.ask_workers(CheckPolicy(text=text))[0],
        )
        self._publication = Publication(
            self._server.weight_step,
            expected=facts.tensors,
            dtype=facts.dtype,
            version=facts.version,
            manifest_digest=facts.manifest_digest,
        )

    def _attached(self) -> Publication:
        """The publication state, learned again after a transaction whose end was not seen."""
        if self._publication is None:
            self._attach()
        assert self._publication is not None
        return self._publication

    def _transact(self, offered: Offer, in_flight: InFlight, clock: Clock) -> None:
        publication = self._attached()
        try:
            if publication.begin(offered.version, offered.manifest):
                return
            for bucket in offered.buckets:
                publication.stage(bucket)
            clock.lap("stage")
            publication.prepare()
            clock.lap("prepare")
            self._end(in_flight)
            self._server.post("/pause", mode="abort" if in_flight == "abort" else "wait")
            try:
                publication.commit(self._drop_caches)
            finally:
                if not publication.blocked:
                    self._server.post("/resume")
            clock.lap("commit")
        except (EngineDead, EngineTimeout):
            self._publication = None
            raise

    def _drop_caches(self) -> None:
        self._server.post("/reset_prefix_cache")

    def _send_generation(self, request: GenerationRequest) -> Any:
        """Sends a request; one that cannot run is its result."""
        try:
            parameters = self._rules.generation(request)
        except ValueError as error:
            return failed(request, error, self._attached().version)
        # Blocks of a continued response hold what its tokens ran, not what a prompt's do: they are nobody else's.
        self._send(request, request.prompt_token_ids, parameters, own_cache=request.trace is not None)
        return None

    def _send(
        self,
        request: GenerationRequest | ScoreRequest,
        tokens: Sequence[int],
        parameters: Parameters,
        own_cache: bool = False,
    ) -> None:
        sent_id = f"{self._name}-{next(self._numbers)}"
        body = {"request_id": sent_id, "token_ids": list(tokens), "sampling_params": parameters}
        if own_cache:
            body["cache_salt"] = sent_id
        future = self._pool.submit(self._server.post, "/inference/v1/generate", body)
        version = self._attached().version
        self._running[request.request_id] = Sent(request, sent_id, version, future)

    def _collect(self, request_ids: set[str]) -> Iterator[Any]:
        """Results of these requests as they end."""
        while waiting := [self._running[r] for r in request_ids if r in self._running]:
            ended, _ = concurrent.futures.wait(
                [sent.future for sent in waiting],
                timeout=self.settings.deadline_seconds,
                return_when=concurrent.futures.FIRST_COMPLETED,
            )
            if not ended:
                self._forget_running()
                raise EngineTimeout(f"{self.settings.url}: no result within {self.settings.deadline_seconds:.0f} s")
            yield from self._finish([sent for sent in waiting if sent.future in ended])

    def _finish(self, ended: Sequence[Sent]) -> list[Any]:
        """What ended requests became. An error of the server ends them all, one of a request only that one."""
        for sent in ended:
            del self._running[sent.request.request_id]
        try:
            answers = [sent.answer() for sent in ended]
        except (EngineDead, EngineTimeout):
            self._forget_running()
            raise
        good = [sent for sent, answer in zip(ended, answers, strict=True) if not isinstance(answer, ValueError)]
        taken = self._server.ask_workers(Take(request_ids=tuple(INTERNAL_PREFIX + s.sent_id for s in good)))[0]
        records = dict(zip([sent.sent_id for sent in good], msgspec.convert(taken, list[Record | None]), strict=True))
        return [
            failed(sent.request, answer, sent.version)
            if isinstance(answer, ValueError)
            else sent.outcome(answer, records[sent.sent_id], self._facts.layout)
            for sent, answer in zip(ended, answers, strict=True)
        ]

    def _end(self, in_flight: InFlight) -> None:
        """Lets what runs finish or ends it; its results wait in their futures for who reads them, or are dropped."""
        if in_flight == "abort" and self._running:
            self.abort(list(self._running))
        pending = [sent.future for sent in self._running.values()]
        _, late = concurrent.futures.wait(pending, timeout=self.settings.deadline_seconds)
        if late:
            raise EngineTimeout(f"{self.settings.url}: {len(late)} requests did not end before the deadline")

    def _drop_unread(self) -> None:
        """Ends what nobody reads any more."""
        if self._running:
            self._end("abort")
            self._finish(list(self._running.values()))  # with what the workers remember of it

    def _forget_running(self) -> None:
        for sent in self._running.values():
            sent.future.cancel()
        self._running.clear()
