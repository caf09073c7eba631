"""Calibration as a Ray job, `python -m deploy.calibrate`, on a local cluster of two CPUs.

    python -m benchmarks.calibration                           # every part, as text, and the bars
    python -m benchmarks.calibration --json > calibration.json # the same as one JSON object; text to standard error

    a  collect by two workers against one: a random Llama of 5 million parameters, one thread for each worker
    b  peak memory of a worker with 8 times the samples against 1 time
    c  the whole job with one worker against `tide calibrate` on the same data, from command to end

Both sides of a ratio run in turns; each number is the median over the repeats, except in b, which runs once. The
cluster starts before a job is timed. In a the models are loaded before; the delay of the second worker is reported.
Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from benchmarks.calibration import parts
from benchmarks.calibration.runs import cluster
from benchmarks.common.bars import Log, Part
from benchmarks.common.command import parse, report

PARTS = ("a", "b", "c")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the calibration job and check its bars.")
    parser.add_argument("--repeats", type=int, default=3, help="of a and c")
    parser.add_argument("--shards", type=int, default=24, help="of a and c, 16 sequences each; at least 12")
    parser.add_argument("--documents", type=int, default=1024, help="of b at 1 time; about 4,000 tokens each")
    chosen = parse(parser, argv, PARTS)
    if chosen.shards < 12:
        parser.error("--shards: at least 12, or the parts of the data do not fill theirs")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    return report(
        "calibration",
        argv,
        options,
        measure,
        cores=len(os.sched_getaffinity(0)),
        load_before=os.getloadavg()[0],
        repeats=options.repeats,
    )


def measure(options: argparse.Namespace, log: Log) -> list[Part]:
    found: list[Part] = []
    started = time.monotonic()
    with cluster() as ours:
        if requested := {"a", "c"} & set(options.parts):
            found += parts.speed(ours, sorted(requested), options.shards, options.repeats, log)
        if "b" in options.parts:
            found.append(parts.memory(ours, options.documents, log))
    for part in found:
        log(f"\n{part.name}: {part.title}")
        log(json.dumps(part.data, indent=1))
    log(f"\n{time.monotonic() - started:.0f} s in all")
    return found


if __name__ == "__main__":
    sys.exit(main())
