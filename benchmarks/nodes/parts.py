"""The parts of the rehearsal: a rolling update and the loss of a node, under load."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common.bars import Bar, Part
from benchmarks.nodes.clients import Attempt, Client, LoadBalancer, end, in_turn, load_balancer, num_wrong
from benchmarks.nodes.cluster import API_KEY, GRPC_PORT, HTTP_PORT, START_S, Cluster, started
from benchmarks.nodes.machines import Machine
from tide_client import TideClient

RECOVERED_S, RESTART_S = 60, 600
"""In which a node should be replaced, and after which the rehearsal gives up."""
LONGEST_S = 280
"""Longest time of a request that the config allows."""
PROBE_EVERY_S, PROBE_TIMEOUT_S = 0.25, 5.0
NUM_SHORT_CLIENTS, SHORT_TOKENS = 2, 4
KEEP_ON_S = 3.0
"""Seconds of load before the event and after the recovery."""
Expected = Mapping[str, Sequence[int]]
"""Token ids of every prompt at full depth."""


@contextlib.contextmanager
def rehearsal(config: dict[str, Any]) -> Iterator[tuple[Cluster, LoadBalancer]]:
    """Two workers that serve, and a load balancer in front of them."""
    with started(num_workers=2) as cluster, load_balancer(cluster.addresses, HTTP_PORT, GRPC_PORT) as balancer:
        cluster.deploy(config)
        until_ready(cluster, balancer)
        yield cluster, balancer


def until_ready(cluster: Cluster, balancer: LoadBalancer, num: int = 2, seconds: float = START_S) -> None:
    """Wait for `num` replicas, each on its own node that receives connections."""

    def ready() -> bool:
        nodes = {replica.address for replica in cluster.running()}
        return len(nodes) == num and nodes <= set(balancer.ready)

    cluster.until(ready, f"{num} replicas on {num} nodes", seconds)


def at_full_depth(cluster: Cluster, prompts: Sequence[str], tokens: int) -> Expected:
    """Token ids of every prompt at full depth without load, half of the prompts on each node."""

    def generate(prompt: str, worker: Machine) -> list[int]:
        with TideClient(f"{worker.address}:{GRPC_PORT}", api_key=API_KEY, timeout_s=LONGEST_S) as client:
            answer = client.generate(prompt, max_tokens=tokens, ignore_eos=True, mode="full")
            return [token.id for token in answer.tokens]

    with ThreadPoolExecutor(len(prompts)) as threads:
        return dict(zip(prompts, threads.map(generate, prompts, itertools.cycle(cluster.workers)), strict=True))


def wrong_tokens(clients: Sequence[Client], expected: Expected) -> int:
    return sum(num_wrong(each.attempts, expected[each.prompt]) for client in clients for each in client.requests)


def wait_for_tokens(cluster: Cluster, clients: Sequence[Client]) -> None:
    cluster.until(lambda: all(client.has_a_token for client in clients), "token for every stream", 240)


def updated(
    cluster: Cluster, balancer: LoadBalancer, config: Mapping[str, Any], expected: Expected, num_streams: int = 8
) -> Part:
    """`serve deploy` of changed arguments while long streams are open and short requests keep coming."""
    prompts, tokens = list(expected), _length(expected)
    long = [
        Client(balancer, [prompt], retries=False, max_tokens=tokens, timeout_s=LONGEST_S, mode="verified")
        for prompt in prompts[:num_streams]
    ]
    short = [
        Client(
            balancer,
            in_turn(prompts, first),
            retries=False,
            pause_s=0.1,
            max_tokens=SHORT_TOKENS,
            timeout_s=LONGEST_S,  # the limit of the config, as for the streams
        )
        for first in range(NUM_SHORT_CLIENTS)
    ]
    old = {replica.name for replica in cluster.running()}
    for clients in (short, long):  # the streams last, so that they are open when it is deployed
        for client in clients:
            client.start()
        wait_for_tokens(cluster, clients)
    changed = copy.deepcopy(dict(config))
    changed["applications"][0]["args"]["limits"]["body_timeout_s"] = 29.0
    began = time.monotonic()
    cluster.deploy(changed)
    streams_open = sum(client.is_alive() for client in long)

    def replaced() -> bool:
        found = {replica.name for replica in cluster.running()}
        return len(found) == len(old) and not found & {*old}

    cluster.until(replaced, "new replicas", 600)
    replaced_s = time.monotonic() - began
    for client in long:
        client.join()
    time.sleep(KEEP_ON_S)
    end(short)
    streams = [attempt for client in long for attempt in client.attempts]
    requests = [attempt for client in short for attempt in client.attempts]
    whole = sum(attempt.error is None and len(attempt.ids) == tokens for attempt in streams)
    ended = [(attempt.ended_at or 0.0) - began for attempt in streams]
    data = {
        "streams_open_at_deploy": streams_open,
        "streams_whole": whole,
        "streams_lasted_after_deploy_s": [round(seconds, 1) for seconds in sorted(ended)],
        "new_requests": len(requests),
        "new_requests_failed": sum(attempt.error is not None for attempt in requests),
        "wrong_tokens": wrong_tokens(long, expected),
        "replicas_replaced_s": round(replaced_s, 1),
        "errors": _errors([*streams, *requests]),
    }
    bars = [
        Bar("streams open during a rolling update that ended whole", whole, num_streams),
        Bar("of them open when it was deployed", streams_open, num_streams),
        Bar("new requests that failed meanwhile", data["new_requests_failed"], 0, at_least=False),
        Bar("wrong tokens in them", data["wrong_tokens"], 0, at_least=False),
    ]
    return Part("update", "serve deploy of other arguments under load", data, bars)


def killed(
    cluster: Cluster, balancer: LoadBalancer, expected: Expected, num_streams: int = 16, *, silently: bool = False
) -> Part:
    """One of two nodes is killed with all its processes, and another one is started at once."""
    prompts, tokens = list(expected), _length(expected)
    options: dict[str, Any] = {"max_tokens": tokens, "mode": "verified"}
    clients = [Client(balancer, in_turn(prompts, first), **options) for first in range(num_streams)]
    at_once: dict[str, Any] = {
        "retries": False,
        "pause_s": PROBE_EVERY_S,
        "max_tokens": 1,
        "timeout_s": PROBE_TIMEOUT_S,
    }
    probe = Client(balancer, in_turn(prompts, 0), **at_once)
    for client in (*clients, probe):
        client.start()
    wait_for_tokens(cluster, [*clients, probe])
    time.sleep(KEEP_ON_S)
    cluster.until(lambda: _each_serves_its_own(cluster, clients), "answer through each node from its own replica", 240)
    wait_for_tokens(cluster, clients)
    victim = cluster.workers[0]
    moment = time.monotonic()
    cluster.kill(victim, silently=silently)
    cluster.add_worker()
    until_ready(cluster, balancer, seconds=RESTART_S)
    ready_s = time.monotonic() - moment
    time.sleep(KEEP_ON_S)
    end([*clients, probe])
    logs = {worker.address: cluster.replica_logs(worker) for worker in cluster.workers if worker.is_alive}

    def replica_of(attempt: Attempt) -> str:
        """Address of the node whose replica finished the attempt; the dead node did not log it."""
        found = (address for address, log in logs.items() if attempt.request_id and attempt.request_id in log)
        return next(found, victim.address)

    requests = [request for client in clients for request in client.requests]
    open_then = [attempt for each in requests for attempt in each.attempts if attempt.is_open_at(moment)]
    begun = [each for each in open_then if each.first_at is not None and each.first_at < moment]
    elsewhere = [each for each in begun if victim.address not in (each.proxy, replica_of(each))]
    failed_probes = [each.started_at for each in probe.attempts if each.error is not None]
    next_probes = [each.started_at for each in probe.attempts if each.started_at > max(failed_probes, default=moment)]
    whole = sum(each.is_whole for each in requests)
    data = {
        "streams_open_at_kill": len(open_then),
        "of_them_on_the_other_node": len(elsewhere),
        "of_those_failed": sum(each.error is not None for each in elsewhere),
        "streams_broken": sum(each.error is not None for each in open_then),
        "requests": len(requests),
        "requests_whole": whole,
        "whole_without_asking_again": sum(each.is_whole and len(each.attempts) == 1 for each in requests),
        "asked_again_at_most": max(len(each.attempts) for each in requests) - 1,
        "tokens_compared": sum(len(attempt.ids) for each in requests for attempt in each.attempts),
        "wrong_tokens": wrong_tokens(clients, expected),
        "probes_without_retries": len(probe.attempts),
        "probes_failed": len(failed_probes),
        "all_new_requests_succeed_after_s": round(max(0.0, min(next_probes, default=math.inf) - moment), 1),
        "two_replicas_on_two_nodes_after_s": round(ready_s, 1),
        "errors": _errors([*(attempt for each in requests for attempt in each.attempts), *probe.attempts]),
    }
    bars = [
        # A client may be between two answers at that moment.
        Bar("streams open when a node was killed", len(open_then), num_streams // 2),
        Bar("streams wholly on the other node", len(elsewhere), 1),
        Bar("of those, failed", data["of_those_failed"], 0, at_least=False),
        Bar("share of requests that succeed, with retries", whole / len(requests), 0.99),
        Bar("wrong tokens", data["wrong_tokens"], 0, at_least=False),
        Bar("s until every new request succeeds at once", data["all_new_requests_succeed_after_s"], RECOVERED_S, False),
        Bar("s until two replicas serve on two nodes", data["two_replicas_on_two_nodes_after_s"], RECOVERED_S, False),
    ]
    how = "lost without closed connections" if silently else "killed"
    return Part("lost" if silently else "kill", f"a node of two {how} under {num_streams} streams", data, bars)


def _each_serves_its_own(cluster: Cluster, clients: Sequence[Client]) -> bool:
    """Whether each node's HAProxy sends requests to the replica beside it: one that has just started learns of it
    late. Without, no stream would be wholly on one node."""
    whole = [attempt for client in clients for attempt in client.attempts if attempt.ended_at and attempt.request_id]

    def has_one(worker: Machine) -> bool:
        log = cluster.replica_logs(worker)
        return any(attempt.proxy == worker.address and attempt.request_id in log for attempt in whole)

    return all(has_one(worker) for worker in cluster.workers if worker.is_alive)


def _length(expected: Expected) -> int:
    [length] = {len(ids) for ids in expected.values()}
    return length


def _errors(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Number of attempts by error, without the numbers of tokens in the messages."""
    found: dict[str, int] = {}
    for attempt in attempts:
        if attempt.error is not None:
            code, _, details = attempt.error.partition(": ")
            after = "after some tokens" if attempt.ids else "before the first token"
            text = f"{code.split()[0]} {after}: {details[:120]}"
            found[text] = found.get(text, 0) + 1
    return found
