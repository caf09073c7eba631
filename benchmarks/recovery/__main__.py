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
import platform
import sys
import time
from collections.abc import Sequence

from benchmarks.common.bars import Log, Part, conclude
from benchmarks.common.live import default_config, serving
from benchmarks.recovery import parts
from tide_core.evaluation.machine import cpu_name

PARTS = ("replica", "haproxy", "update", "generate")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure recovery and check its bars.")
    parser.add_argument("--parts", default=",".join(PARTS), help="of replica, haproxy, update and generate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=20.0, help="of each request of update, in seconds")
    parser.add_argument("--clients", type=int, default=4, help="of update")
    parser.add_argument("--json", action="store_true", help="print one JSON object to standard output")
    chosen = parser.parse_args(argv)
    chosen.parts = tuple(chosen.parts.split(","))
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    out = sys.stderr if options.json else sys.stdout

    def log(text: str = "") -> None:
        print(text, file=out, flush=True)

    conditions = {
        "command": "python -m benchmarks.recovery " + " ".join(sys.argv[1:] if argv is None else argv),
        "hardware": cpu_name(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load before": parts.machine_load(),
    }
    for name, value in conditions.items():
        log(f"{name:12} {value}")
    return conclude(conditions, measure(options, log), log, as_json=options.json)


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
