"""guidellm, a load generator: a few streamed requests, two at a time."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from benchmarks.clients.features import Checks, Service, expect

check = Checks("guidellm")
NUM_REQUESTS, NUM_TOKENS = 4, 4


def _load(at: Service, request_format: str) -> str:
    os.environ |= {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "GUIDELLM__LOGGING__DISABLED": "true"}
    from guidellm.entrypoints import benchmark_generative_text
    from guidellm.schemas.benchmark import BenchmarkScenario

    prompts = [{"prompt": f"Count to {number}."} for number in range(NUM_REQUESTS)]
    spec: dict[str, Any] = {
        "backend": {
            "kind": "openai_http",
            "target": at.url,
            "model": at.model,
            "request_format": request_format,
            "max_tokens": NUM_TOKENS,
            # Its requests name no temperature, so a sampled text might end earlier.
            "extras": {"body": {"ignore_eos": True}},
        },
        "profile": {"kind": "concurrent", "streams": [2]},
        "constraints": [{"kind": "max_requests", "count": NUM_REQUESTS}],
        "data": [{"kind": "in_memory_dict_list", "data": prompts}],
        "outputs": [],
    }
    args = BenchmarkScenario.create(scenario=None, spec=spec)
    report, _ = asyncio.run(benchmark_generative_text(args=args, progress=False))
    requests = report.benchmarks[0].requests
    failed = [request.info.error for request in (*requests.errored, *requests.incomplete)]
    expect(not failed, failed)
    counts = [request.output_metrics.total_tokens for request in requests.successful]
    # Its report may miss answers that it got: it stops listening for its own workers when one wait of 0.1 s ends
    # between their last message and the next look (scheduler/worker_group.py). So what it reports is judged, not how
    # many.
    expect(counts and set(counts) == {NUM_TOKENS}, counts)
    return f"{NUM_REQUESTS} requests, none failed"


@check("load")
def load(at: Service) -> str:
    return _load(at, "/v1/completions")


@check("load-chat")
def load_chat(at: Service) -> str:
    return _load(at, "/v1/chat/completions")
