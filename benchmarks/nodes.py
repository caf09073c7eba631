"""A rehearsal of the multi-node path on one machine: the cluster of k8s/base in namespaces, two workers, real loss.

    sudo .venv/bin/python benchmarks/nodes.py                # every part, as text, and the bars; needs root
    sudo .venv/bin/python benchmarks/nodes.py --json > FILE  # the same as one JSON object; the text goes to stderr

    update  `serve deploy` of other arguments while 8 long streams are open and short requests keep coming
    kill    all processes of one node of two are killed under 16 streams, and a new node is started at once
    lost    the same, but the network of the node goes first, so that nobody hears that its connections are closed

Recovered means: from then on every new request succeeds at once, without a retry; and, beside it, two replicas serve on
two nodes again. Tokens are those of mode `verified`, greedy, each compared with full depth, undisturbed. Demo model,
one thread a replica. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: its folder is on the path, the repository is not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import nodes_parts as parts
from benchmarks.bars import Part, conclude
from benchmarks.nodes_cluster import GRPC_PORT, HTTP_PORT, Cluster, cluster_config, started
from benchmarks.nodes_door import Door, door
from benchmarks.nodes_machines import obstacle
from benchmarks.serving_parts import PROMPT_FILE
from tide_core.evaluation.machine import cpu_name

PARTS = ("update", "kill", "lost")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rehearse the loss of a node and a rolling update on one machine.")
    parser.add_argument("--parts", default=",".join(PARTS), help="of update, kill and lost")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer of kill and lost")
    parser.add_argument("--long-tokens", type=int, default=600, help="of each long stream of update")
    parser.add_argument("--json", action="store_true", help="print one JSON object to standard output")
    chosen = parser.parse_args(argv)
    chosen.parts = tuple(chosen.parts.split(","))
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    out = sys.stderr if options.json else sys.stdout

    def say(text: str = "") -> None:
        print(text, file=out, flush=True)

    if (why := obstacle()) is not None:
        say(f"nodes: {why}")
        return 2
    conditions = {
        "command": "python benchmarks/nodes.py " + " ".join(sys.argv[1:] if argv is None else argv),
        "hardware": cpu_name(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    for name, value in conditions.items():
        say(f"{name:12} {value}")
    return conclude(conditions, measure(options, say), say, as_json=options.json)


@contextlib.contextmanager
def rehearsal(config: dict[str, Any]) -> Iterator[tuple[Cluster, Door]]:
    """Two workers that serve, and a door to them."""
    with started(num_workers=2) as cluster, door(cluster.addresses, HTTP_PORT, GRPC_PORT) as entrance:
        cluster.deploy(config)
        parts.until_ready(cluster, entrance)
        yield cluster, entrance


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> list[Part]:
    prompts = [json.loads(line)["prompt"] for line in PROMPT_FILE.read_text(encoding="utf-8").splitlines()][:16]
    config = cluster_config()
    config["applications"][0]["args"]["engine"]["num_threads"] = 1
    found = []
    for name in options.parts:
        with rehearsal(config) as (cluster, entrance):
            began = time.monotonic()
            if name == "update":
                expected = parts.at_full_depth(cluster, prompts[:8], options.long_tokens)
                part = parts.updated(cluster, entrance, config, expected)
            else:
                expected = parts.at_full_depth(cluster, prompts, options.tokens)
                part = parts.killed(cluster, entrance, expected, silently=name == "lost")
        found.append(part)
        say(f"\n{part.name}: {part.title} ({time.monotonic() - began:.0f} s)")
        say(json.dumps(part.data, indent=1))
    return found


if __name__ == "__main__":
    sys.exit(main())
