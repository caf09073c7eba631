"""Time concurrent streams: throughput, first token, inter-token latency."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

WAKE_S = 0.1
"""The main thread joins with a timeout, so that Ctrl-C is handled."""


class Bench:
    """`num_streams` concurrent streams, each read by its own thread."""

    def __init__(self, start: Callable[[], Any], num_streams: int) -> None:
        self._start = start
        self._gate = threading.Barrier(num_streams + 1)
        self._threads = [threading.Thread(target=self._read, daemon=True) for _ in range(num_streams)]
        self._streams: list[Any] = []
        self._failures: list[BaseException] = []
        self._first_ms: list[float] = []
        self._gaps_ms: list[float] = []
        self._num_tokens: list[int] = []

    def run(self) -> dict[str, float]:
        """Total tokens per second, and latencies of the streams in milliseconds. The first stream that fails closes the
        others, and its error is raised."""
        for thread in self._threads:
            thread.start()
        began = time.perf_counter()
        self._gate.wait()
        try:
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(WAKE_S)
        finally:
            self._close()
        seconds = time.perf_counter() - began
        if self._failures:
            raise self._failures[0]
        return {
            "streams": len(self._threads),
            "tokens": sum(self._num_tokens),
            "seconds": seconds,
            "tokens_per_s": sum(self._num_tokens) / seconds,
            "first_token_ms_p50": statistics.median(self._first_ms or [0.0]),
            "first_token_ms_max": max(self._first_ms, default=0.0),
            "inter_token_ms_p50": statistics.median(self._gaps_ms or [0.0]),
            "inter_token_ms_p99": quantile(self._gaps_ms, 0.99),
        }

    def _read(self) -> None:
        self._gate.wait()
        before, count = time.perf_counter(), 0
        try:
            stream = self._start()
            self._streams.append(stream)
            if self._failures:  # another one has closed those that were there
                stream.close()
            for _ in stream:
                now = time.perf_counter()
                (self._gaps_ms if count else self._first_ms).append(1000 * (now - before))
                before, count = now, count + 1
            self._num_tokens.append(count)
        except BaseException as error:
            self._failures.append(error)
            self._close()

    def _close(self) -> None:
        for stream in tuple(self._streams):
            stream.close()


def quantile(values: Sequence[float], share: float) -> float:
    """The value at this share of the sorted values; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
