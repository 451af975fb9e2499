"""Places requests on prefill and decode workers, and sees each of them to a result.

A prompt goes to the prefill worker that holds the least; its requests to the decode worker that has the fewest, all of
one prompt to the same one while it has room. Nothing is sent that a worker could not take up: prompts only as many as
the cache of a prefill worker holds until they are read, requests only as many as a decode worker runs at once.

A worker that ends, falls silent or finishes nothing within its deadline is given up and ended. What it had is done
again on another, at most `MAX_ATTEMPTS` times in all, with the same seeds, so with the same result. Only when no worker
of a role is left is that an error of the whole engine.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Sequence

import zmq

from adapters.contract import EngineDead, EngineTimeout, GenerationRequest, GenerationResult, Version
from adapters.vllm_engine.disaggregated.fleet import Fleet, Worker
from adapters.vllm_engine.disaggregated.placement import Group, Task, grouped
from adapters.vllm_engine.process import messages

MAX_ATTEMPTS = 3
POLL_MILLISECONDS = 100

logger = logging.getLogger(__name__)


class Router:
    """
    Attributes:
        results: finished requests, for `generate` to hand out.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        fleet.on_lost = self._lost
        self.results: deque[GenerationResult] = deque()
        self.version = Version(0, 0)
        self._tasks: dict[str, Task] = {}
        self._queue: deque[Group] = deque()
        self._ready: list[Group] = []
        self._calls = itertools.count(1)

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Takes requests on. Raises ValueError if one with the same id is still running."""
        if running := sorted(r.request_id for r in requests if r.request_id in self._tasks):
            raise ValueError(f"generate: requests are running already: {running[:10]}")
        for group in grouped(requests, f"prefill-{next(self._calls)}"):
            self._queue.append(group)
            self._tasks |= {task.request_id: task for task in group.waiting}

    def pump(self) -> None:
        """Sends what can be sent, waits a moment, and takes what has come.

        Raises:
            EngineDead, EngineTimeout: requests wait for workers of a role that has none left.
        """
        self._send_prefills()
        self._send_decodes()
        usable = [worker for worker in self._fleet.workers if worker.usable]
        poller = zmq.Poller()
        for worker in usable:
            poller.register(worker.connection.socket, zmq.POLLIN)
        buffered = any(worker.connection.events or worker.connection.results for worker in usable)
        poller.poll(0 if buffered or self.results else POLL_MILLISECONDS)
        for worker in usable:
            self._read(worker)
        self._check_placed()

    def _check_placed(self) -> None:
        """Raises RuntimeError if requests are nowhere: a fault of the router, which would wait for them for ever."""
        if not self._queue and not self._ready and not any(worker.outstanding for worker in self._fleet.workers):
            if nowhere := sorted(self._tasks):
                raise RuntimeError(f"router: lost track of {len(nowhere)} request(s): {nowhere[:10]}")

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests with what they have. Those that were not sent yet end at once."""
        wanted = list(request_ids)
        while tasks := [self._tasks[r] for r in wanted if r in self._tasks]:
            sent: dict[Worker, list[str]] = {}
            for task in tasks:
                if task.worker is not None and task.worker.outstanding.get(task.request_id) is task:
                    sent.setdefault(task.worker, []).append(task.request_id)
                else:
                    self._abort_unsent(task, sent)
            for worker, names in sent.items():  # a worker that is lost meanwhile leaves its requests for another round
                self._fleet.call(worker, messages.Abort, request_ids=tuple(names))
                self._take(worker)

    def abort_all(self) -> None:
        self.abort(list(self._tasks))

    def _abort_unsent(self, task: Task, sent: dict[Worker, list[str]]) -> None:
        group = task.group
        for tasks in (group.waiting, group.again):
            if task in tasks:
                tasks.remove(task)
        self._finish(task, task.ended("abort", self.version))
        self._after_reading(group)
        if not group.waiting and group.handover is None and group.prefill_worker is not None:
            sent.setdefault(group.prefill_worker, []).append(group.prefill_id)

    def _read(self, worker: Worker) -> None:
        """Takes what a worker says, and gives it up if it has ended or should have said something."""
        try:
            while worker.connection.read(0):
                pass
            worker.connection.take_failure()
            if worker.outstanding:
                worker.connection.check_wait("requests")
        except (EngineDead, EngineTimeout) as error:
            self._fleet.give_up(worker, error)
        else:
            self._take(worker)

    def finish(self, in_flight: str) -> None:
        """Waits ("drain") until every request has finished, or ends them ("abort"). Their results can be read then."""
        if in_flight == "abort":
            self.abort_all()
        while self._tasks:
            self.pump()

    def forget(self) -> None:
        """Drops every request. Workers that go on have been told to end theirs, and are told to let go of prompts."""
        for worker in self._fleet.workers:
            events, worker.connection.results = worker.connection.events, deque()
            handovers = [event.handover for event in events if isinstance(event, messages.Prefilled)]
            handovers += [group.handover for group in self._ready if group.prefill_worker is worker]
            prefill_ids = tuple(handover.prefill_id for handover in handovers if handover is not None)
            if prefill_ids and worker.usable:
                self._fleet.post(worker, messages.Release, prefill_ids=prefill_ids)
            events.clear()
            worker.outstanding, worker.held_tokens = {}, 0
        self._tasks.clear()
        self._queue.clear()
        self._ready.clear()
        self.results.clear()

    def _lost(self, worker: Worker) -> None:
        """A worker was given up: what it said before counts, and the rest of what it had begins again."""
        self._take(worker)
        had, worker.outstanding, worker.held_tokens = list(worker.outstanding.values()), {}, 0
        tasks = [entry for entry in had if isinstance(entry, Task)]
        groups = [entry for entry in had if isinstance(entry, Group)]
        groups += [group for group in self._ready if group.prefill_worker is worker]
        for group in groups:
            group.prefill_worker = None  # requests that read from it are told so by their own worker
            tasks += group.waiting
            group.waiting = []
        for task in tasks:  # all of them first: those of one prompt begin again together
            self._again(task)
        for task in tasks:
            self._stop_reading(task)
        for group in groups:
            self._after_reading(group)

    def _ask(self, worker: Worker, name: str, entry: Group | Task, call: type[messages.Call], **fields: object) -> None:
        """Posts a call whose answer is an event about `name`."""
        if not worker.outstanding:
            worker.connection.begin_wait()
        worker.outstanding[name] = entry
        self._fleet.post(worker, call, **fields)

    def _send_prefills(self) -> None:
        while self._queue:
            group = self._queue[0]
            if not group.waiting:  # all of them were aborted
                self._queue.popleft()
                continue
            worker = self._fleet.usable(self._fleet.prefill)[0]
            tokens = group.held(worker.settings.block_size)
            if not (worker.has_room and worker.takes(tokens)):
                return
            self._queue.popleft()
            group.prefill_worker = worker
            worker.held_tokens += tokens
            for task in group.waiting:
                task.attempts += 1
            self._ask(worker, group.prefill_id, group, messages.Prefill, requests=(group.prefill_request(),))

    def _send_decodes(self) -> None:
        for group in list(self._ready):
            while group.waiting and group.handover is not None:
                workers = [worker for worker in self._fleet.usable(self._fleet.decode) if worker.has_room]
                workers.sort(key=lambda worker: worker not in group.leading)  # stable: those that have the prompt first
                task = next((t for w in workers[:1] if (t := group.next_for(w)) is not None), None)
                if task is None:
                    break
                self._send_decode(group, task, workers[0])

    def _send_decode(self, group: Group, task: Task, worker: Worker) -> None:
        assert group.handover is not None
        group.readers = group.readers or len(group.waiting)
        group.waiting.remove(task)
        group.reading.append(task)
        group.leading[worker] = None if worker in group.leading else task
        task.worker = worker
        self._ask(
            worker,
            task.request_id,
            task,
            messages.Decode,
            requests=(task.request,),
            handovers=(group.handover,),
            readers=group.readers,
        )

    def _take(self, worker: Worker) -> None:
        """Everything that a worker has said."""
        events, results = worker.connection.events, worker.connection.results
        while events:
            event = events.popleft()
            entry = worker.outstanding.get(event.request_id)
            if isinstance(event, messages.Prefilled) and isinstance(entry, Group):
                del worker.outstanding[event.request_id]
                self._prefilled(entry, event)
            elif isinstance(entry, Task) and isinstance(event, messages.Arrived):
                self._arrived(entry)
            elif isinstance(entry, Task) and isinstance(event, messages.Lost):
                del worker.outstanding[event.request_id]
                logger.warning("request %s: its prompt is computed again: %s", entry.request_id, event.reason)
                self._again(entry)
                self._stop_reading(entry)
        while results:
            result = results.popleft()
            task = worker.outstanding.pop(result.request_id, None)
            if isinstance(task, Task):
                self._finish(task, result)
                self._stop_reading(task)

    def _prefilled(self, group: Group, event: messages.Prefilled) -> None:
        group.handover = event.handover
        if event.handover is not None:
            self._ready.append(group)
            self._after_reading(group)  # all of them may have been aborted meanwhile
            return
        self._let_go(group)
        for task in group.waiting:
            reason = "error" if event.error else "abort"
            self._finish(task, task.ended(reason, self.version, event.error))
        group.waiting = []

    def _arrived(self, task: Task) -> None:
        task.arrived = True
        task.group.num_read += 1
        self._stop_reading(task)

    def _again(self, task: Task) -> None:
        """A request is to be done again, if it was not too often already."""
        if task.attempts >= MAX_ATTEMPTS:
            message = f"given up after {task.attempts} attempts, each of which lost a worker or its prompt"
            self._finish(task, task.ended("error", self.version, message))
        else:
            task.group.again.append(task)

    def _stop_reading(self, task: Task) -> None:
        group, worker = task.group, task.worker
        if task in group.reading:
            group.reading.remove(task)
        if worker is not None and group.leading.get(worker) is task:
            if task.arrived:
                group.leading[worker] = None
            else:
                del group.leading[worker]
        self._after_reading(group)

    def _after_reading(self, group: Group) -> None:
        """When nobody has to read a prefill any more it is let go, and requests that came back begin again."""
        still_computed = group.handover is None and group.prefill_worker is not None
        if group.waiting or group.reading or still_computed:
            return
        if group in self._ready:
            self._ready.remove(group)
        worker, handover, group.handover = group.prefill_worker, group.handover, None
        self._let_go(group)
        if group.again:
            name = f"{group.prefill_id.partition('+')[0]}+{next(self._calls)}"  # no two prefills of a prompt alike
            again = Group(prefill_id=name, prompt=group.prompt, waiting=group.again)
            for task in group.again:
                task.group, task.worker, task.arrived = again, None, False
            group.again = []
            self._queue.append(again)
        if worker is not None and handover is not None and (group.num_read < group.readers or not group.readers):
            self._fleet.post(worker, messages.Release, prefill_ids=(handover.prefill_id,))

    def _let_go(self, group: Group) -> None:
        if group.prefill_worker is not None:
            group.prefill_worker.held_tokens -= group.held(group.prefill_worker.settings.block_size)
            group.prefill_worker = None

    def _finish(self, task: Task, result: GenerationResult) -> None:
        if self._tasks.pop(task.request_id, None) is task:
            self.results.append(result)
