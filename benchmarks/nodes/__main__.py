"""A rehearsal of the multi-node path on one machine: the cluster of k8s/base with two workers in namespaces.

    sudo .venv/bin/python -m benchmarks.nodes                # every part, as text, and the bars; needs root
    sudo .venv/bin/python -m benchmarks.nodes --json > FILE  # the same as one JSON object; the text goes to stderr

    update  `serve deploy` of changed arguments while 8 long streams are open and short requests keep coming
    kill    all processes of one of two nodes are killed under 16 streams, and a new node is started at once
    lost    the same after the network of the node is cut, so that no connection is closed

Two recovery times are measured: until every new request succeeds without a retry, and until two replicas serve on two
nodes again. Every token (mode `verified`, greedy) is compared with full depth without load. Demo model, one thread for
each replica. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from benchmarks.common.bars import Log, Part
from benchmarks.common.command import logger, parse, report
from benchmarks.common.prompts import read_texts
from benchmarks.nodes import parts
from benchmarks.nodes.cluster import cluster_config
from benchmarks.nodes.machines import unsupported_reason

PARTS = ("update", "kill", "lost")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rehearse the loss of a node and a rolling update on one machine.")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer of kill and lost")
    parser.add_argument("--long-tokens", type=int, default=600, help="of each long stream of update")
    return parse(parser, argv, PARTS)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if (why := unsupported_reason()) is not None:
        logger(options)(f"nodes: {why}")
        return 2
    return report("nodes", argv, options, measure)


def measure(options: argparse.Namespace, log: Log) -> list[Part]:
    prompts = [text for _, text in read_texts()][:16]
    config = cluster_config()
    config["applications"][0]["args"]["engine"]["num_threads"] = 1
    found = []
    for name in options.parts:
        with parts.rehearsal(config) as (cluster, balancer):
            began = time.monotonic()
            if name == "update":
                expected = parts.at_full_depth(cluster, prompts[:8], options.long_tokens)
                part = parts.updated(cluster, balancer, config, expected)
            else:
                expected = parts.at_full_depth(cluster, prompts, options.tokens)
                part = parts.killed(cluster, balancer, expected, silently=name == "lost")
        found.append(part)
        log(f"\n{part.name}: {part.title} ({time.monotonic() - began:.0f} s)")
        log(json.dumps(part.data, indent=1))
    return found


if __name__ == "__main__":
    sys.exit(main())
