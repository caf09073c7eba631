"""The server against the bare engine in one run: the cost of Serve, HAProxy and gRPC.

    python -m benchmarks.serving                       # every part, as text, and the bars
    python -m benchmarks.serving --json > serving.json # the same as one JSON object; the text goes to standard error

    a  gRPC streams of the demo model against the same engine in this process, 1 and 8 at once
    b  the transport alone: an engine whose tokens are ready, 16 streams
    c  64 streams at once, gRPC and HTTP mixed: no token lost, repeated or out of order, one end for each stream
    d  a client that disconnects: the time until its generation has stopped and its blocks are free
    e  cold start: from the command to the first token

Prompts are those of benchmarks/common/prompts.jsonl, greedy. Both sides of a ratio run in turns; each number is the
median over the repeats. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common.bars import Log, Part
from benchmarks.common.command import parse, report
from benchmarks.common.live import default_config, serving
from benchmarks.serving import parts

PARTS = ("a", "b", "c", "d", "e")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the server and check its bars.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer of a and c")
    parser.add_argument("--streams", default="1,8", help="at once in a")
    parser.add_argument("--many", type=int, default=64, help="streams at once in c")
    parser.add_argument("--cancels", type=int, default=20, help="clients of d")
    chosen = parse(parser, argv, PARTS)
    chosen.streams = tuple(int(count) for count in chosen.streams.split(","))
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    return report("serving", argv, options, measure, repeats=options.repeats, new_tokens=options.tokens)


def measure(options: argparse.Namespace, log: Log) -> list[Part]:
    found = []

    def done(part: Part, started: float) -> None:
        found.append(part)
        log(f"\n{part.name}: {part.title} ({time.monotonic() - started:.0f} s)")
        log(json.dumps(part.data, indent=1))

    if set(options.parts) & {"a", "c", "d", "e"}:
        started = time.monotonic()
        config = default_config()
        config["applications"][0]["args"]["engine"]["quantization"] = "none"
        with serving(config) as server:
            ready_s = time.monotonic() - started
            if "e" in options.parts:
                done(asyncio.run(parts.cold_start(server, ready_s, started)), started)
            works: list[tuple[str, Callable[[], Any]]] = [
                ("a", lambda: parts.against_bare(server, options.streams, options.tokens, options.repeats)),
                ("c", lambda: parts.many_streams(server, options.many, options.tokens)),
                ("d", lambda: parts.cancelled(server, options.cancels)),
            ]
            for name, work in works:
                if name in options.parts:
                    started = time.monotonic()
                    done(asyncio.run(work()), started)
    if "b" in options.parts:
        started = time.monotonic()
        with serving(parts.transport_config()) as server:
            done(asyncio.run(parts.transport(server, options.repeats)), started)
    return found


if __name__ == "__main__":
    sys.exit(main())
