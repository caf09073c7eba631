"""Record the metrics of a real service under a small, uneven load: `python tools/record_metrics.py OUT.json.gz`.

Starts `serve run` of deploy/config.yaml on free ports with little KV memory, so that a few streams fill it, sends
requests in all modes for about two minutes, and scrapes Ray's metrics port every 5 s like Prometheus. The file holds
one value per scrape for every series; None where the series was absent.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.live import Server, default_config, serving
from tide_client import StatusError, TideClient

SCRAPE_S = 5.0
PHASES = ((0.2, 1), (0.25, 4), (0.3, 14), (0.25, 1))
"""Share of the time, and concurrent streams."""
KV_MEMORY_GIB = 0.05
MODES = ("verified", "bounded", "fast", "full", "verified", "bounded")
KEPT = (
    "ray_tide_",
    "ray_serve_num_grpc_requests_total",
    "ray_serve_num_http_requests_total",
    "ray_serve_deployment_replica_healthy",
    "ray_serve_autoscaling_target_replicas",
    "ray_serve_deployment_queued_queries",
)
DROPPED_LABELS = ("NodeAddress", "SessionName", "otel_scope_name", "otel_scope_schema_url", "otel_scope_version")
"""They differ from run to run, and no query uses them."""
SYSTEM = "You are a careful assistant. Answer in short sentences, say what you do not know, and never invent a source."
QUESTIONS = ("Why is the sky blue?", "What is a prime number?", "Name three rivers.", "How does rain form?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    os.environ["RAY_metrics_report_interval_ms"] = "2500"  # noqa: SIM112  # Ray's own spelling; 10 s by default
    config = default_config()
    config["applications"][0]["args"]["engine"] |= {"kv_memory_gib": KV_MEMORY_GIB, "audit_share": 1.0}
    with serving(config) as server, TideClient(server.address) as client:
        stop = threading.Event()
        load = threading.Thread(target=_load, args=(server, client, args.seconds, stop))
        load.start()
        recording = _record(server, args.seconds + 2 * SCRAPE_S)
        stop.set()
        load.join()
    args.out.write_bytes(gzip.compress(json.dumps(recording).encode(), mtime=0))
    print(f"{len(recording['series'])} series, {args.out.stat().st_size} bytes")


def _load(server: Server, client: TideClient, seconds: float, stop: threading.Event) -> None:
    for share, streams in PHASES:
        end = time.monotonic() + share * seconds
        threads = [threading.Thread(target=_ask, args=(server, client, index, end, stop)) for index in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _ask(server: Server, client: TideClient, index: int, end: float, stop: threading.Event) -> None:
    number = index
    while time.monotonic() < end and not stop.is_set():
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
        max_tokens = 60 + 40 * (number % 4)
        if number % 7 == 6:  # over HTTP, some with a short deadline
            tide = {"timeout_s": 0.5} if number % 2 else {}
            body = {"model": "demo", "messages": chat, "max_tokens": max_tokens, "tide": tide}
            server.post(body, "/v1/chat/completions")
        else:
            with contextlib.suppress(StatusError):
                client.generate(chat, ignore_eos=True, mode=MODES[number % len(MODES)], max_tokens=max_tokens)
        number += len(QUESTIONS) + 1


def _record(server: Server, seconds: float) -> dict[str, Any]:
    times: list[float] = []
    series: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        times.append(round(time.monotonic() - start, 1))
        for labels, value in samples_of(exported(server)):
            series.setdefault(tuple(sorted(labels.items())), {})[len(times) - 1] = value
        time.sleep(max(0.0, start + len(times) * SCRAPE_S - time.monotonic()))
    rows = [
        {"labels": dict(labels), "values": [values.get(index) for index in range(len(times))]}
        for labels, values in sorted(series.items())
    ]
    return {"interval_s": SCRAPE_S, "times": times, "series": rows}


def samples_of(text: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels (including the name) and value of every recorded sample."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(KEPT):
                labels = {name: value for name, value in sample.labels.items() if name not in DROPPED_LABELS}
                yield {"__name__": sample.name, **labels}, sample.value


def exported(server: Server) -> str:
    """The text of every metrics port of the cluster."""
    discovery = next(server.folder.glob("ray/prom_metrics_service_discovery.json"))
    texts = []
    for target in json.loads(discovery.read_text())[0]["targets"]:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as reply:
            texts.append(reply.read().decode())
    return "\n".join(texts)


if __name__ == "__main__":
    main()
