"""Load on a live service, and patience."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from benchmarks.common.live import Server
from tide_client import Answer, TideClient

PATIENCE_S = 240.0
"""Bounds a hang: whatever a test waits for comes much sooner, even on a busy machine."""
POLL_S = 0.01, 0.5
"""The first and the longest pause between two looks: one at the processes or metrics of a server takes its own time."""
PAUSE_S = 0.2
"""After an error: a server that is gone answers thousands of times a second."""


def until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    deadline, (pause_s, longest_s) = time.monotonic() + seconds, POLL_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, longest_s)
    return True


class Streams:
    """Answers asked for one after another, `count` at a time, for as long as the block lasts; errors are kept."""

    max_tokens = 100

    def __init__(self, server: Server, count: int = 1) -> None:
        self._client = TideClient(server.address, timeout_s=PATIENCE_S)
        self._stop = threading.Event()
        self.answers: list[Answer] = []
        self.errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._client.stream("the cat sat", max_tokens=self.max_tokens, ignore_eos=True) as stream:
                    list(stream)
                self.answers.append(stream.answer)
            except Exception as error:
                self.errors.append(error)
                self._stop.wait(PAUSE_S)

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        if not until(lambda: bool(self.answers or self.errors)) or self.errors:
            self._stop.set()  # or they go on asking until the end of the tests
            raise AssertionError(f"{len(self.answers)} answers, errors: {self.errors}")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()
