"""How soon a service answers again, with the config and the model of the quick start.

    python -m benchmarks.recovery                         # every part, as text, and the bars
    python -m benchmarks.recovery --parts replica,haproxy # some of them
    python -m benchmarks.recovery --json > recovery.json  # the same as one JSON object; the text goes to standard error

    replica   the only replica is killed: until a new request is answered
    haproxy   HAProxy is killed: the same
    update    rolling updates of two replicas under short requests: how many fail or reach their deadline
    generate  `tide generate` in a new process: until its first token

Each time is the worst of the repeats, that of `generate` the median. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from benchmarks.common.bars import Log, Part
from benchmarks.common.command import parse, report
from benchmarks.common.live import default_config, serving
from benchmarks.recovery import parts

PARTS = ("replica", "haproxy", "update", "generate")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure recovery and check its bars.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=20.0, help="of each request of update, in seconds")
    parser.add_argument("--clients", type=int, default=4, help="of update")
    return parse(parser, argv, PARTS)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    return report("recovery", argv, options, measure, load_before=parts.machine_load())


def measure(options: argparse.Namespace, log: Log) -> list[Part]:
    found: list[Part] = []

    def done(part: Part) -> None:
        found.append(part)
        log(f"\n{part.name}: {part.title} (load {parts.machine_load()})")
        log(json.dumps(part.data, indent=1))

    if "generate" in options.parts:
        done(parts.first_token(options.repeats))
    if {"replica", "haproxy"} & set(options.parts):
        with serving(default_config(), command=("tide", "serve")) as server:
            time.sleep(2)
            if "haproxy" in options.parts:
                done(parts.haproxy_killed(server, options.repeats))
            if "replica" in options.parts:
                done(parts.replica_killed(server, options.repeats))
    if "update" in options.parts:
        config = default_config()
        config["applications"][0]["deployments"][0]["num_replicas"] = 2
        config["applications"][0]["args"]["engine"]["num_threads"] = 1
        with serving(config, command=("tide", "serve")) as server:
            done(parts.updated(server, options.repeats, options.deadline, options.clients))
    return found


if __name__ == "__main__":
    sys.exit(main())
