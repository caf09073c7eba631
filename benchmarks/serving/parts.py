"""The parts of the benchmark of the server."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.bars import Bar, Part
from benchmarks.common.live import Server, default_config
from benchmarks.common.prompts import read_texts
from tide_client import AsyncTideClient

TRANSPORT_STREAMS, TRANSPORT_TOKENS = 16, 1000
POLL_S = 0.002

FIRSTS_PER_REPEAT = 5
"""Which prompts share the first step varies on both sides by about one step; many short rounds average it."""

Chat = list[dict[str, str]]
Start = Callable[[Chat], AsyncIterator[list[int]]]


@dataclass
class Timing:
    """Streams that ran at once."""

    num_tokens: int
    seconds: float
    first_s: list[float]
    ids: list[list[int]]

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def chats(num: int) -> list[Chat]:
    prompts = [text for _, text in read_texts()]
    return [[{"role": "user", "content": prompts[index % len(prompts)]}] for index in range(num)]


async def time_streams(start: Start, prompts: Sequence[Chat]) -> Timing:
    """Start one stream for each prompt and read them all to their ends."""
    began = time.perf_counter()

    async def one(prompt: Chat) -> tuple[float, list[int]]:
        ids: list[int] = []
        first = 0.0
        async for piece in start(prompt):
            if not ids:
                first = time.perf_counter() - began
            ids += piece
        return first, ids

    done = await asyncio.gather(*(one(prompt) for prompt in prompts))
    seconds = time.perf_counter() - began
    return Timing(sum(len(ids) for _, ids in done), seconds, [first for first, _ in done], [ids for _, ids in done])


async def in_turns(bare: Start, served: Start, count: int, repeats: int) -> list[tuple[Timing, Timing]]:
    """The same prompts, `count` at once, on both sides, which alternate in going first. The first pair is a warm-up."""
    pairs = []
    for repeat in range(repeats + 1):
        prompts = chats(count * (repeat + 1))[-count:]
        sides = (bare, served) if repeat % 2 else (served, bare)
        timings = [await time_streams(side, prompts) for side in sides]
        pairs.append((timings[0], timings[1]) if repeat % 2 else (timings[1], timings[0]))
    return pairs[1:]


async def against_bare(server: Server, counts: Sequence[int], tokens: int, repeats: int) -> Part:
    from tide_core.engine.engine import Engine
    from tide_core.request import SamplingParams

    settings = server.config["applications"][0]["args"]["engine"]
    params, first_only = SamplingParams(max_tokens=tokens, ignore_eos=True), SamplingParams(max_tokens=1)
    data, bars = {}, []
    engine = await asyncio.to_thread(lambda: Engine(**settings))
    async with AsyncTideClient(server.address) as client:

        async def bare(prompt: Chat) -> AsyncIterator[list[int]]:
            async for output in engine.stream(prompt, params):
                yield [token.token_id for token in output.tokens]

        async def served(prompt: Chat) -> AsyncIterator[list[int]]:
            async for token in client.stream(prompt, max_tokens=tokens, ignore_eos=True):
                yield [token.id]

        async def bare_first(prompt: Chat) -> AsyncIterator[list[int]]:
            async for output in engine.stream(prompt, first_only):
                yield [token.token_id for token in output.tokens]

        async def served_first(prompt: Chat) -> AsyncIterator[list[int]]:
            async for token in client.stream(prompt, max_tokens=1):
                yield [token.id]

        for count in counts:
            pairs = await in_turns(bare, served, count, repeats)
            ratio = statistics.median(served.rate / bare.rate for bare, served in pairs)
            firsts = await in_turns(bare_first, served_first, count, FIRSTS_PER_REPEAT * repeats)
            later_ms = [
                1000 * (statistics.mean(there.first_s) - statistics.mean(here.first_s)) for here, there in firsts
            ]
            low, middle, high = statistics.quantiles(later_ms, n=4)
            data[f"{count} streams"] = {
                "bare_tokens_per_s": statistics.median(run.rate for run, _ in pairs),
                "served_tokens_per_s": statistics.median(run.rate for _, run in pairs),
                "ratio": ratio,
                "same_tokens": all(here.ids == there.ids for here, there in pairs),
                "bare_first_token_s": statistics.median(statistics.mean(run.first_s) for run, _ in firsts),
                "served_first_token_s": statistics.median(statistics.mean(run.first_s) for _, run in firsts),
                "first_token_later_ms": middle,
                "first_token_later_ms_quartiles": [low, high],
            }
            bars.append(Bar(f"served over bare, {count} streams", ratio, 0.9))
            bars.append(Bar(f"first token later by ms, {count} streams", middle, 30.0, at_least=False))
    engine.close()
    return Part("a", "gRPC streams of the demo model against the bare engine", data, bars)


def transport_config() -> dict[str, Any]:
    config = default_config()
    app = config["applications"][0]
    app["import_path"] = "benchmarks.serving.transport_app:build_app"
    app["args"] = {}
    deployment = app["deployments"][0]
    deployment["name"] = "TransportServer"
    deployment.pop("user_config")
    return config


async def transport(server: Server, repeats: int) -> Part:
    rates, firsts = [], []
    async with AsyncTideClient(server.address) as client:

        async def start(prompt: Chat) -> AsyncIterator[list[int]]:
            async for token in client.stream(prompt, max_tokens=TRANSPORT_TOKENS):
                yield [token.id]

        for repeat in range(repeats + 1):
            timing = await time_streams(start, chats(TRANSPORT_STREAMS))
            assert all(ids == list(range(TRANSPORT_TOKENS)) for ids in timing.ids)
            if repeat:
                rates.append(timing.rate)
                firsts.append(statistics.median(timing.first_s))
    data = {
        "streams": TRANSPORT_STREAMS,
        "tokens_each": TRANSPORT_TOKENS,
        "tokens_per_s": statistics.median(rates),
        "first_message_ms": 1000 * statistics.median(firsts),
    }
    return Part("b", "the transport alone", data, [Bar("tokens/s of 16 ready streams", statistics.median(rates), 8000)])


async def many_streams(server: Server, count: int, tokens: int) -> Part:
    """Every second stream uses HTTP. A stream is correct if its chunks are in order, it has one end, and its tokens
    equal those of the same prompt alone over gRPC."""
    prompts = chats(count)
    async with AsyncTideClient(server.address, timeout_s=280) as client:

        async def by_grpc(prompt: Chat) -> list[int]:
            stream = client.stream(prompt, max_tokens=tokens, ignore_eos=True, mode="full")
            ids = [token.id async for token in stream]
            assert stream.answer.usage.completion_tokens == len(ids)
            return ids

        async def by_http(prompt: Chat) -> list[int]:
            return await asyncio.to_thread(_http_ids, server, prompt, tokens)

        started = time.perf_counter()
        ways = [by_http if index % 2 else by_grpc for index in range(count)]
        works = (way(prompt) for way, prompt in zip(ways, prompts, strict=True))
        answers = await asyncio.gather(*works, return_exceptions=True)
        seconds = time.perf_counter() - started
        errors = [repr(answer) for answer in answers if isinstance(answer, BaseException)]
        wrong = 0
        for index in range(0, count, max(1, count // 8)):
            wrong += answers[index] != await by_grpc(prompts[index])
    whole = sum(isinstance(answer, list) and len(answer) == tokens for answer in answers)
    data = {"streams": count, "whole": whole, "errors": errors[:3], "seconds": seconds, "unlike_alone": wrong}
    bars = [
        Bar("streams that came whole", whole, count),
        Bar("streams unlike the same alone", wrong, 0, at_least=False),
    ]
    return Part("c", f"{count} streams at once, gRPC and HTTP mixed", data, bars)


def _http_ids(server: Server, prompt: Chat, tokens: int) -> list[int]:
    import urllib.request

    tide = {"tokens": True, "mode": "full"}
    body = {
        "messages": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "tide": tide,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    ids, ends, done = [], 0, False
    with urllib.request.urlopen(request, timeout=280) as answer:
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                done = True
            elif data:
                assert not done
                event = json.loads(data)
                ids += [token["id"] for token in event.get("tide", {}).get("tokens", [])]
                ends += sum(choice["finish_reason"] is not None for choice in event["choices"])
    assert done
    assert ends == 1
    return ids


async def cancelled(server: Server, count: int) -> Part:
    """Each client disconnects after a few tokens; the replica is polled until it holds nothing for it."""
    taken = []
    async with AsyncTideClient(server.address) as client:
        for prompt in itertools.islice(itertools.cycle(chats(8)), count):
            async with client.stream(prompt, max_tokens=2000, ignore_eos=True) as stream:
                num = 0
                async for _ in stream:
                    num += 1
                    if num == 5:
                        break
            left = time.perf_counter()
            while (stats := await client.exit_stats()).num_running or stats.num_waiting or stats.kv_usage:
                await asyncio.sleep(POLL_S)
            taken.append(1000 * (time.perf_counter() - left))
    data = {"clients": count, "median_ms": statistics.median(taken), "longest_ms": max(taken)}
    return Part(
        "d", "a client that disconnects", data, [Bar("longest until its blocks are free, ms", max(taken), 250, False)]
    )


async def cold_start(server: Server, ready_s: float, started: float) -> Part:
    async with AsyncTideClient(server.address) as client:
        async for _ in client.stream("The capital of France is", max_tokens=1):
            break
    first_s = time.monotonic() - started
    data = {"healthy_s": ready_s, "first_token_s": first_s}
    return Part("e", "cold start", data, [Bar("first token, seconds after the command", first_s, 60, at_least=False)])
