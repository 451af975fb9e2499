"""The router against workers that only write down what they are asked: placement, back-pressure, retries, release."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from adapters.contract import EngineDead, GenerationRequest, GenerationResult, SamplingParams, Version, sample_requests
from adapters.vllm_engine.disaggregated.fleet import Fleet, Worker, with_role
from adapters.vllm_engine.disaggregated.router import MAX_ATTEMPTS, Router
from adapters.vllm_engine.process import messages
from adapters.vllm_engine.settings import EngineSettings

SERVED = Version(1, 1)


class Written:
    """A connection that writes calls down. The test says what the worker answers, with `events` and `results`."""

    socket = None

    def __init__(self, num_cache_tokens: int) -> None:
        self.ready = messages.Ready(
            pid=1, trace_kind="loops", engine_id=str(id(self)), num_cache_tokens=num_cache_tokens
        )
        self.events: deque[Any] = deque()
        self.results: deque[GenerationResult] = deque()
        self.posted: list[tuple[type, dict[str, Any]]] = []
        self.pid, self.dead = 1, False

    def post(self, call: type, **fields: Any) -> None:
        if self.dead:
            raise EngineDead("gone")
        self.posted.append((call, fields))

    call = post

    def read(self, milliseconds: int) -> bool:
        return False

    def begin_wait(self) -> None: ...

    def take_failure(self) -> None: ...

    def check_wait(self, what: str) -> None:
        if self.dead:
            raise EngineDead("gone")

    def close(self, *, ask: bool = True) -> None: ...

    def asked(self, kind: type) -> list[dict[str, Any]]:
        """Fields of the calls of a kind since the last time, which are forgotten."""
        found = [fields for call, fields in self.posted if call is kind]
        self.posted = [entry for entry in self.posted if entry[0] is not kind]
        return found


class Bench:
    """A router over such workers, without waiting for sockets."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, prefill: int = 1, decode: int = 1, seats: int = 4, cache: int = 10_000
    ) -> None:
        monkeypatch.setattr(
            "adapters.vllm_engine.disaggregated.router.zmq.Poller",
            lambda: type("NoSockets", (), {"register": lambda *_: None, "poll": lambda *_: []})(),
        )
        common = EngineSettings(model=Path("m"), log_path=Path("l"), max_model_len=256, max_num_seqs=seats)
        self.fleet = Fleet.__new__(Fleet)
        self.fleet.workers = [
            Worker(settings=with_role(common, role, "tcp"), connection=Written(cache))  # type: ignore[arg-type]
            for role in ["prefill"] * prefill + ["decode"] * decode
        ]
        self.fleet.prefill, self.fleet.decode = self.fleet.workers[:prefill], self.fleet.workers[prefill:]
        self.router = Router(self.fleet)
        self.router.version = SERVED

    def prefilled(self, worker: Worker) -> list[str]:
        """Every prompt that was asked for is computed -> their ids."""
        names = [call["requests"][0].request_id for call in worker.connection.asked(messages.Prefill)]
        for name in names:
            handover = messages.Handover(prefill_id=name, version=SERVED, params={}, rows=None)
            worker.connection.events.append(messages.Prefilled(request_id=name, handover=handover))
        self.router.pump()
        return names

    def decoding(self, worker: Worker) -> list[str]:
        """Requests that were sent to a decode worker since the last time."""
        self.router.pump()
        return [call["requests"][0].request_id for call in worker.connection.asked(messages.Decode)]

    def arrive(self, worker: Worker, *names: str) -> None:
        worker.connection.events.extend(messages.Arrived(request_id=name, num_bytes=1) for name in names)
        self.router.pump()

    def finish(self, worker: Worker, *names: str) -> None:
        for name in names:
            worker.connection.results.append(
                GenerationResult(
                    request_id=name, token_ids=(1,), logprobs=(-1.0,), seed=7, version=SERVED, finish_reason="length"
                )
            )
        self.router.pump()

    def results(self) -> dict[str, GenerationResult]:
        return {result.request_id: result for result in self.router.results}


def request(name: str, length: int = 3, *, first: int = 5) -> GenerationRequest:
    prompt = tuple(range(first, first + length))
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2), seed=7)


def test_one_prefill_for_all_samples_and_the_first_of_them_reads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples: one Prefill; one Decode until its keys and values have come, then the rest; readers is four."""
    bench = Bench(monkeypatch)
    (prefill,), (decode,) = bench.fleet.prefill, bench.fleet.decode
    bench.router.submit(sample_requests(request("g"), 4))
    bench.router.pump()
    assert len(bench.prefilled(prefill)) == 1
    bench.router.pump()
    (call,) = decode.connection.asked(messages.Decode)
    assert call["requests"][0].request_id == "g/0" and call["readers"] == 4
    assert bench.decoding(decode) == []
    bench.arrive(decode, "g/0")
    assert bench.decoding(decode) == ["g/1", "g/2", "g/3"]
    bench.arrive(decode, "g/1", "g/2", "g/3")
    assert prefill.held_tokens == 0 and prefill.connection.asked(messages.Release) == [], "the notices free it"
    bench.finish(decode, "g/0", "g/1", "g/2", "g/3")
    assert set(bench.results()) == {"g/0", "g/1", "g/2", "g/3"} and bench.router.num_running == 0


def test_prompts_wait_until_the_prefill_cache_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of three blocks takes a prompt of one and a block for its token; the next waits until that is read."""
    bench = Bench(monkeypatch, cache=96)
    (prefill,), (decode,) = bench.fleet.prefill, bench.fleet.decode
    bench.router.submit([request("a"), request("b", first=50)])
    bench.router.pump()
    (first,) = bench.prefilled(prefill)
    assert bench.decoding(decode) == ["a"] and prefill.connection.asked(messages.Prefill) == []
    bench.arrive(decode, "a")
    bench.router.pump()
    assert bench.prefilled(prefill) != [first]
    assert bench.decoding(decode) == ["b"]


@pytest.mark.parametrize(("seats", "sent"), [(4, 4), (1, 2)])
def test_requests_go_to_the_emptier_worker_and_wait_for_a_seat(
    monkeypatch: pytest.MonkeyPatch, seats: int, sent: int
) -> None:
    """Four prompts alternate between two decode workers; with a seat each, two of them wait until one is free."""
    bench = Bench(monkeypatch, prefill=2, decode=2, seats=seats)
    one, two = bench.fleet.decode
    bench.router.submit([request(str(i), first=10 * i + 5) for i in range(4)])
    for _ in range(4):
        bench.router.pump()
        counts = [len(bench.prefilled(worker)) for worker in bench.fleet.prefill]
        assert abs(counts[0] - counts[1]) <= 1, "prompts alternate too"
    first, second = bench.decoding(one), bench.decoding(two)
    assert len(first) == len(second) == sent / 2
    bench.arrive(one, *first)
    bench.finish(one, *first)
    for worker in bench.fleet.prefill:
        bench.prefilled(worker)
    assert len(bench.decoding(one)) == (seats == 1) and bench.decoding(two) == []


def test_samples_spill_to_another_worker_when_theirs_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples, two seats: the third is continued elsewhere, from the same prefill."""
    bench = Bench(monkeypatch, decode=2, seats=2)
    (prefill,), (one, two) = bench.fleet.prefill, bench.fleet.decode
    bench.router.submit(sample_requests(request("g"), 3))
    bench.router.pump()
    bench.prefilled(prefill)
    assert bench.decoding(one) == ["g/0"] and bench.decoding(two) == []
    bench.arrive(one, "g/0")
    assert bench.decoding(one) == ["g/1"] and bench.decoding(two) == ["g/2"]
    assert prefill.connection.asked(messages.Prefill) == []


def test_a_lost_decode_worker_costs_a_new_prefill_and_keeps_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are computed again, prompt included, on the other one; the old prompt is let go."""
    bench = Bench(monkeypatch, decode=2)
    (prefill,), (one, two) = bench.fleet.prefill, bench.fleet.decode
    bench.router.submit(sample_requests(request("g"), 2))
    bench.router.pump()
    (old,) = bench.prefilled(prefill)
    assert bench.decoding(one) == ["g/0"]
    one.connection.dead = True
    bench.router.pump()
    bench.router.pump()
    assert not one.usable
    assert bench.decoding(two) == ["g/1"], "it had not been sent yet, and still uses the old prefill"
    bench.arrive(two, "g/1")
    assert [call["prefill_ids"] for call in prefill.connection.asked(messages.Release)] == [(old,)]
    bench.router.pump()
    (again,) = bench.prefilled(prefill)
    assert again != old
    bench.router.pump()
    (call,) = two.connection.asked(messages.Decode)
    assert call["requests"] == (sample_requests(request("g"), 2)[0],), "the same request, seed included"


def test_attempts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose prompt is lost every time ends with an error, after MAX_ATTEMPTS prefills."""
    bench = Bench(monkeypatch)
    (prefill,), (decode,) = bench.fleet.prefill, bench.fleet.decode
    bench.router.submit([request("a")])
    prefills = 0
    for _ in range(3 * MAX_ATTEMPTS):
        bench.router.pump()
        prefills += len(bench.prefilled(prefill))
        if bench.decoding(decode):
            decode.connection.events.append(messages.Lost(request_id="a", reason="test"))
            bench.router.pump()
    assert prefills == MAX_ATTEMPTS
    assert bench.results()["a"].finish_reason == "error" and "attempts" in str(bench.results()["a"].error)
    assert bench.results()["a"].seed == 7 and prefill.held_tokens == 0


def test_without_a_worker_of_a_role_its_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last prefill worker is gone: waiting requests are no business of `generate` any more."""
    bench = Bench(monkeypatch)
    bench.router.submit([request("a")])
    bench.fleet.prefill[0].connection.dead = True
    with pytest.raises(EngineDead):
        for _ in range(3):
            bench.router.pump()


def test_aborted_requests_end_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued, being prefilled, waiting for a seat: each ends at once, and prompts that nobody reads are let go."""
    bench = Bench(monkeypatch, seats=1, cache=96)
    (prefill,), (decode,) = bench.fleet.prefill, bench.fleet.decode
    bench.router.submit([*sample_requests(request("g"), 2), request("queued", first=60)])
    bench.router.pump()
    bench.prefilled(prefill)
    assert bench.decoding(decode) == ["g/0"]
    bench.router.abort(["g/1", "queued", "unknown"])
    assert {name: r.finish_reason for name, r in bench.results().items()} == {"g/1": "abort", "queued": "abort"}
    bench.arrive(decode, "g/0")
    assert len(prefill.connection.asked(messages.Release)) == 1, "one of two readers will never read"
    assert prefill.held_tokens == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_samples_of_a_lost_worker_begin_again_together(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """Their prompt is computed once more, for all of them, and none is left out."""
    bench = Bench(monkeypatch, prefill=2, decode=2)
    bench.router.submit(sample_requests(request("a"), 4))
    bench.router.pump()
    lost = next(worker for worker in bench.fleet.prefill if worker.outstanding)
    left = next(worker for worker in bench.fleet.prefill if worker is not lost)
    if role == "decode":
        bench.prefilled(lost)
        bench.router.pump()
        lost, left = next(worker for worker in bench.fleet.decode if worker.outstanding), lost
        for _ in range(2):  # the first of them reads alone, then the others
            bench.arrive(lost, *bench.decoding(lost))
        assert len(lost.outstanding) == 4
    lost.connection.dead = True
    bench.router.pump()
    bench.router.pump()
    assert len(bench.prefilled(left)) == 1
    done: list[str] = []
    while len(done) < 4:
        found = [(decode, name) for decode in bench.fleet.decode if decode.usable for name in bench.decoding(decode)]
        assert found, done
        for decode, name in found:
            bench.arrive(decode, name)
            bench.finish(decode, name)
            done.append(name)
    assert sorted(bench.results()) == sorted(done) and all(not r.error for r in bench.results().values())


def test_a_request_that_is_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the router ends in an error, not in waiting for ever."""
    bench = Bench(monkeypatch)
    bench.router.submit([request("a")])
    bench.router.pump()
    bench.fleet.prefill[0].outstanding.clear()
    with pytest.raises(RuntimeError, match="lost track of 1 request"):
        bench.router.pump()
