"""The one thread that steps the engine, and the queues into and out of it.

Submissions and aborts cross into the thread through an inbox; outputs cross back through a sink per request, in one
batch per event loop and step. If the thread dies, every open request gets its one last output, with the error, and
every later submission is refused.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from tide_core.engine.core import EngineCore
from tide_core.engine.sinks import Sink
from tide_core.errors import EngineBusyError, EngineDeadError, RequestError
from tide_core.request import FinishReason, Request, RequestOutput

logger = logging.getLogger("tide")

IDLE_CHECK_S = 5.0
"""Longest sleep of the idle loop, so that its heartbeat stays fresh."""


class FairLock:
    """A lock granted in the order it was requested, so that a loop that releases it for a moment cannot starve
    others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = 0
        self._served = 0

    def __enter__(self) -> None:
        with self._changed:
            mine, self._asked = self._asked, self._asked + 1
            while mine != self._served:
                self._changed.wait()

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._served += 1
            if self._served != self._asked:
                self._changed.notify_all()


class EngineLoop:
    """Owns the core from the moment it starts."""

    def __init__(self, core: EngineCore, *, max_open: int) -> None:
        self._cores = [core]  # the last one is in use; those before it finish what they have
        self._max_open = max_open
        self.step_lock = FairLock()
        """Held during every step; others that run the model take it in between."""
        self._wake = threading.Condition()
        self._inbox: deque[tuple[EngineCore, Request] | str] = deque()  # a request to add, or the id of one to abort
        self._sinks: dict[str, Sink] = {}
        self._num_reserved = 0
        self._in_reserved: set[str] = set()  # of the open requests, those that use a reserved place
        self._stopping = False
        self._death: BaseException | None = None
        self.last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="tide-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # the interpreter must not go while the thread is inside a kernel

    @property
    def dead(self) -> bool:
        return self._death is not None or not self._thread.is_alive()

    @property
    def num_open(self) -> int:
        return len(self._sinks)

    def reserve(self, wanted: int) -> int:
        """Reserve up to `wanted` places for requests to come; returns how many. The caller must `release` them."""
        with self._wake:
            taken = min(wanted, self._num_free())
            self._num_reserved += taken
        return taken

    def release(self, num_places: int) -> None:
        with self._wake:
            self._num_reserved -= num_places

    def _num_free(self) -> int:
        """Places that no request has and nobody reserved. An empty reserved place counts as taken."""
        if (free := self._max_open - len(self._sinks) - max(0, self._num_reserved - len(self._in_reserved))) <= 0:
            raise EngineBusyError(f"{self._max_open - free} requests are open, the limit is {self._max_open}")
        return free

    def submit(self, requests: Sequence[Request], sink: Sink, core: EngineCore, *, reserved: bool = False) -> int:
        """Queue requests for the core they were made for, as many of the first as there are free places; returns that
        number. They start together; from now on each gets exactly one last output. `reserved`: they use places that
        the caller reserved."""
        with self._wake:
            if self._death is not None or self._stopping:
                raise EngineDeadError(self._death_text())
            for request in requests:
                if request.request_id in self._sinks:
                    raise RequestError("request_id", request.request_id, "an id that no open request has")
            taken = requests if reserved else requests[: self._num_free()]
            if reserved:
                self._in_reserved.update(request.request_id for request in taken)
            for request in taken:
                self._sinks[request.request_id] = sink
                self._inbox.append((core, request))
            self._wake.notify()
        return len(taken)

    def use(self, core: EngineCore) -> None:
        """Make another core the one in use. The one before it is let go when its last request has ended."""
        with self._wake:
            self._cores.append(core)

    def abort(self, request_id: str) -> bool:
        """Ask for the end of a request; False if it is not open."""
        with self._wake:
            if request_id not in self._sinks:
                return False
            self._inbox.append(request_id)
            self._wake.notify()
            return True

    def close(self) -> None:
        """Stop the thread; open requests end with reason abort."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        atexit.unregister(self.close)

    def _main(self) -> None:
        try:
            while self._take_inbox():
                for core in tuple(self._cores):
                    if core.has_work:
                        with self.step_lock:
                            core.advance(self._deliver)
                self.last_beat = time.monotonic()
            for core in self._cores:
                self._deliver(core.emit())
            self._end_all(FinishReason.ABORT, None)
        except BaseException as death:
            logger.exception("engine loop died")
            with self._wake:
                self._death = death
            for core in self._cores:  # what was reached before
                with contextlib.suppress(Exception):
                    self._deliver(core.emit())
            self._end_all(FinishReason.ERROR, EngineDeadError(self._death_text()))

    def _take_inbox(self) -> bool:
        """Carry out what has come in; sleep while there is nothing to do. False when asked to stop."""
        if not (self._inbox or self._stopping or len(self._cores) > 1) and self._cores[0].has_work:
            return True  # what comes in meanwhile is seen before the next step
        with self._wake:
            if not (self._inbox or self._stopping or any(core.has_work for core in self._cores)):
                for core in self._cores:
                    core.check_idle()
                del self._cores[:-1]
                self._wake.wait(IDLE_CHECK_S)
            if self._stopping:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
            self._cores[:-1] = [core for core in self._cores[:-1] if core.has_work]
            for command in commands:
                if not isinstance(command, str) and command[0] not in self._cores:
                    self._cores.insert(0, command[0])  # made just before another one came into use
            cores = tuple(self._cores)
        ended = []
        for command in commands:
            if isinstance(command, str):
                ended += [output for core in cores if (output := core.abort(command)) is not None]
                continue
            core, request = command
            try:
                core.add(request)
            except Exception as error:
                logger.exception("a request could not be queued")
                ended.append(RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error))
        self._deliver(ended)
        return True

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Put outputs into their sinks: one call per sink or event loop, however many requests wait there."""
        if not outputs:
            return
        by_sink: dict[Sink, list[RequestOutput]] = {}
        with self._wake:
            for output in outputs:
                request_id = output.request_id
                if output.finish_reason is None:
                    sink = self._sinks[request_id]
                else:
                    sink = self._sinks.pop(request_id)
                    self._in_reserved.discard(request_id)
                by_sink.setdefault(sink, []).append(output)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Sink, list[RequestOutput]]]] = {}
        for sink, mine in by_sink.items():
            if sink.event_loop is None:
                sink.put(mine)
            else:
                by_loop.setdefault(sink.event_loop, []).append((sink, mine))
        for event_loop, items in by_loop.items():
            try:
                event_loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # the event loop is closed: no reader is left
                for _, mine in items:
                    for output in mine:
                        self.abort(output.request_id)

    def _end_all(self, reason: FinishReason, error: Exception | None) -> None:
        with self._wake:
            left = list(self._sinks)
        self._deliver([RequestOutput(request_id, finish_reason=reason, error=error) for request_id in left])

    def _death_text(self) -> str:
        if self._death is None:
            return "the engine was closed"
        return f"the engine loop died: {type(self._death).__name__}: {self._death}"


def _put_all(items: list[tuple[Sink, list[RequestOutput]]]) -> None:
    for sink, outputs in items:
        sink.put(outputs)
