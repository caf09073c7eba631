"""Metrics and their export: every name in the table, each increase once, counters that never go down."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.answer import Call
from deploy.metrics import (
    BY_NAME,
    LATENCIES_S,
    MAX_HELD,
    MAX_SAMPLES,
    METRICS,
    Meter,
    RayExporter,
    TextExporter,
    thinned,
)
from deploy.service import Service
from tests.deploy.answers import make_answer
from tests.engine.exit_engines import exit_engine
from tide_core.outputs.exit_stats import ExitStats
from tide_core.request import Audit, FinishReason, RequestOutput, TokenOutput, Usage
from tide_core.stats import AuditSnapshot, EngineStats

NUM_LAYERS = 8


class Sink:
    """An exporter that records its calls, by the kinds of the table."""

    def __init__(self) -> None:
        self.counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.gauges: dict[tuple[str, str], float] = {}
        self.samples: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self.num_calls = 0

    def add(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        metric, key = BY_NAME[name], (name, "".join(tags.values()))
        assert tuple(tags) == metric.tags, "the tags of the table, and no other"
        self.num_calls += 1
        if metric.kind == "counter":
            assert value > 0, "Ray refuses any other"
            self.counts[key] += value
        elif metric.kind == "gauge":
            self.gauges[key] = value
        else:
            self.samples[key].append(value)


def exits(*, left: Mapping[int, int] | None = None, deep_passes: int = 0, drafts: int = 0, **counts: int) -> ExitStats:
    stats = ExitStats(NUM_LAYERS)
    tokens = [(layer, Audit.VERIFIED) for layer, count in (left or {}).items() for _ in range(count)]
    stats.record(tokens, layers_run=counts.pop("layers_run", 0), deep_passes=deep_passes, drafts=drafts, **counts)
    return stats


def stats_of(exit_stats: ExitStats | None = None, **values: Any) -> EngineStats:
    known: dict[str, Any] = {
        "num_running": 0,
        "num_waiting": 0,
        "num_finished": 0,
        "num_steps": 0,
        "num_prompt_tokens": 0,
        "num_output_tokens": 0,
        "num_preemptions": 0,
        "blocks_total": 100,
        "blocks_owned": 0,
        "max_blocks_owned": 0,
        "kernels": "native",
        "dead": False,
        "last_step_age_s": 0.0,
        "exits": (exit_stats or exits()).summary(),
    }
    return EngineStats(**{**known, **values})


def audit(tenant: str = "anyone", evidence: float = 3.0, *, alarmed: bool = False) -> AuditSnapshot:
    return AuditSnapshot(tenant, 0.05, 20, 0.04, evidence, 0.05, alarmed)


def piece(num_tokens: int = 1, usage: Usage | None = None) -> RequestOutput:
    reason = None if usage is None else FinishReason.LENGTH
    return RequestOutput("r", tuple(TokenOutput(7, "x", 3) for _ in range(num_tokens)), reason, usage)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def meter(sink: Sink) -> Meter:
    return Meter(sink, model="tiny", max_queued=9)


WANTED = {
    "tide_time_to_first_token_seconds": "histogram",
    "tide_inter_token_latency_seconds": "histogram",
    "tide_exit_layer": "histogram",
    "tide_prompt_tokens": "counter",
    "tide_generation_tokens": "counter",
    "tide_layers_saved": "counter",
    "tide_differing_tokens": "counter",
    "tide_num_requests_running": "gauge",
    "tide_num_requests_waiting": "gauge",
    "tide_kv_cache_usage_perc": "gauge",
    "tide_draft_acceptance": "gauge",
    "tide_judged_answers": "counter",
    "tide_judged_loss": "counter",
    "tide_audit_evidence": "gauge",
    "tide_audit_alarms": "gauge",
}


def test_the_table_has_every_metric_that_was_promised() -> None:
    assert {name: BY_NAME[name].kind for name in WANTED} == WANTED


def test_the_table_is_one_that_prometheus_takes() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("tide_")
        assert not metric.name.endswith("_total"), "Ray adds that itself"
        assert metric.text.endswith(".")
        assert (metric.kind == "histogram") == bool(metric.boundaries)
        assert list(metric.boundaries) == sorted(set(metric.boundaries))
        assert min(metric.boundaries, default=1) > 0


def test_counters_grow_by_what_the_engine_gained_and_each_gain_counts_once(meter: Meter, sink: Sink) -> None:
    first = exits(left={2: 6, 8: 4}, deep_passes=5, drafts=7, accepted=6, layers_run=60, non_finite_scores=1)
    meter.flush(stats_of(first, num_prompt_tokens=30, num_output_tokens=10, num_preemptions=1), 0)
    expected = {
        ("tide_prompt_tokens", ""): 30,
        ("tide_generation_tokens", ""): 10,
        ("tide_preemptions", ""): 1,
        ("tide_drafts", ""): 7,
        ("tide_drafts_accepted", ""): 6,
        ("tide_exited_tokens", ""): 6,
        ("tide_layers_run", ""): 60,
        ("tide_non_finite_scores", ""): 1,
        ("tide_layers_saved", ""): 10 * 8 - (5 * 8 + 7 * 2),
        ("tide_exits", "2"): 6,
        ("tide_exits", "8"): 4,
    }
    assert sink.counts == expected
    assert sink.samples["tide_exit_layer", ""] == [2] * 6 + [8] * 4
    meter.flush(stats_of(first, num_prompt_tokens=30, num_output_tokens=10, num_preemptions=1), 0)
    assert sink.counts == expected, "nothing new"
    later = exits(left={2: 7, 8: 6}, deep_passes=7, drafts=9, accepted=7, layers_run=90, non_finite_scores=1)
    meter.flush(stats_of(later, num_prompt_tokens=35, num_output_tokens=13, num_preemptions=1), 0)
    assert sink.counts["tide_prompt_tokens", ""] == 35
    assert sink.counts["tide_generation_tokens", ""] == 13
    assert (sink.counts["tide_exits", "2"], sink.counts["tide_exits", "8"]) == (7, 6)
    assert len(sink.samples["tide_exit_layer", ""]) == 13


def test_counters_never_go_down_when_the_engine_counts_anew(meter: Meter, sink: Sink) -> None:
    meter.flush(stats_of(exits(left={2: 50, 8: 50}, deep_passes=60), num_output_tokens=100, num_prompt_tokens=9), 0)
    before = dict(sink.counts)
    meter.flush(stats_of(exits(left={8: 1}, deep_passes=1), num_output_tokens=1, num_prompt_tokens=0), 0)
    assert sink.counts == before
    meter.flush(stats_of(exits(left={2: 3, 8: 3}, deep_passes=4), num_output_tokens=6, num_prompt_tokens=2), 0)
    assert sink.counts["tide_generation_tokens", ""] == before["tide_generation_tokens", ""] + 5
    assert sink.counts["tide_prompt_tokens", ""] == before["tide_prompt_tokens", ""] + 2
    assert sink.counts["tide_exits", "2"] == before["tide_exits", "2"] + 3
    assert sink.counts["tide_layers_saved", ""] > before["tide_layers_saved", ""]


def test_layers_spent_on_drafts_that_came_to_nothing_are_paid_back_before_more_are_saved(
    meter: Meter, sink: Sink
) -> None:
    saved = []
    for left, deep_passes, drafts in (({2: 6, 8: 4}, 5, 6), ({2: 6, 8: 9}, 10, 30), ({2: 26, 8: 14}, 15, 50)):
        meter.flush(stats_of(exits(left=left, deep_passes=deep_passes, drafts=drafts)), 0)
        saved.append(sink.counts["tide_layers_saved", ""])
    assert saved[0] == saved[1] == 10 * 8 - 5 * 8 - 6 * 2
    assert saved[2] == 40 * 8 - 15 * 8 - 50 * 2, "what all of it saved"


def test_gauges_show_the_engine_as_it_is(meter: Meter, sink: Sink) -> None:
    made = exits(left={2: 3}, drafts=4, accepted=3)
    meter.flush(
        stats_of(made, num_running=3, num_waiting=2, blocks_owned=25, last_step_age_s=0.5, predicted_gain=1.4), 77
    )
    assert sink.gauges == {
        ("tide_audit_alarms", ""): 0,
        ("tide_num_requests_running", ""): 3,
        ("tide_num_requests_waiting", ""): 2,
        ("tide_queue_limit", ""): 9,
        ("tide_tokens_in_flight", ""): 77,
        ("tide_kv_cache_usage_perc", ""): 0.25,
        ("tide_engine_step_age_seconds", ""): 0.5,
        ("tide_engine_dead", ""): 0,
        ("tide_model_layers", "tiny"): NUM_LAYERS,
        ("tide_draft_acceptance", ""): 0.75,
        ("tide_predicted_gain", ""): 1.4,
        ("tide_config_refused", ""): 0,
    }
    meter.config_refused = True
    meter.flush(stats_of(), 0)
    assert sink.gauges.pop(("tide_config_refused", "")) == 1
    meter.config_refused = False
    meter.flush(stats_of(), 0)
    assert set(sink.gauges.values()) == {0, 1.0, 9, NUM_LAYERS}, "without drafts, without requests"


def test_a_dead_engine_is_told_as_long_as_its_replica_lives(meter: Meter, sink: Sink) -> None:
    for dead in (False, True, True):
        meter.flush(stats_of(dead=dead), 0)
        assert sink.gauges["tide_engine_dead", ""] == dead


def test_audits_are_counted_by_contract_whatever_the_number_of_tenants(meter: Meter, sink: Sink) -> None:
    audits = (audit("a", 300.0, alarmed=True), audit("b"), audit("c", 0.5))
    meter.flush(stats_of(audits=audits, judged={"fast(0.05)": (60, 2.5), "fast": (7, 0.5)}, num_audits_dropped=2), 0)
    meter.flush(stats_of(audits=audits, judged={"fast(0.05)": (80, 3.0), "fast": (7, 0.5)}, num_audits_dropped=2), 0)
    assert {key: count for key, count in sink.counts.items() if "judged" in key[0]} == {
        ("tide_judged_answers", "fast(0.05)"): 80,
        ("tide_judged_loss", "fast(0.05)"): 3.0,
        ("tide_judged_answers", "fast"): 7,
        ("tide_judged_loss", "fast"): 0.5,
        ("tide_judged_dropped", ""): 2,
    }
    assert {key: value for key, value in sink.gauges.items() if "audit" in key[0]} == {
        ("tide_audit_evidence", "fast(0.05)"): 300.0,
        ("tide_audit_evidence", "fast"): 1.0,
        ("tide_audit_alarms", ""): 1,
    }


def test_evidence_that_was_forgotten_is_gone_from_the_metrics(meter: Meter, sink: Sink) -> None:
    judged = {"fast(0.05)": (60, 2.5)}
    meter.flush(stats_of(audits=(audit("a", 300.0, alarmed=True),), judged=judged), 0)
    meter.flush(stats_of(judged=judged), 0)
    assert sink.gauges["tide_audit_evidence", "fast(0.05)"] == 1.0
    assert sink.gauges["tide_audit_alarms", ""] == 0


def test_tokens_that_differ_are_counted_by_mode(meter: Meter, sink: Sink) -> None:
    for mode, num in (("bounded", 3), ("bounded", 2), ("fast", 1), ("verified", 0)):
        meter.on_output(make_answer(mode=mode), piece(1, Usage(3, 9, num_differing=num)))
    meter.flush(stats_of(), 0)
    assert {key: count for key, count in sink.counts.items() if key[0] == "tide_differing_tokens"} == {
        ("tide_differing_tokens", "bounded"): 5,
        ("tide_differing_tokens", "fast"): 1,
    }


def test_a_request_is_timed_by_mode_from_its_arrival_to_its_end(
    meter: Meter, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [102.0]
    monkeypatch.setattr("deploy.metrics.time", SimpleNamespace(monotonic=lambda: clock[0]))
    answer = make_answer(mode="bounded", started_at=100.0)
    meter.on_output(answer, piece())
    answer.first_at = answer.last_at = 102.0
    clock[0] = 102.5
    meter.on_output(answer, piece(4))
    answer.last_at = 102.5
    clock[0] = 103.0
    meter.on_output(answer, piece(1, Usage(3, 6, queue_s=0.5)))
    meter.on_end(answer, "length")
    meter.flush(stats_of(), 0)
    assert sink.samples == {
        ("tide_time_to_first_token_seconds", "bounded"): [2.0],
        ("tide_inter_token_latency_seconds", "bounded"): [0.125, 0.5],
        ("tide_queue_seconds", "bounded"): [0.5],
        ("tide_request_seconds", "bounded"): [3.0],
    }
    assert sink.counts["tide_requests", "length"] == 1
    sink.samples.clear()
    meter.flush(stats_of(), 0)
    assert not sink.samples, "handed on once"


def test_requests_are_counted_by_how_they_ended(meter: Meter, sink: Sink) -> None:
    for reason in ("stop", "length", "stop", "cancelled", "DeadlineError"):
        meter.on_end(make_answer(), reason)
    meter.flush(stats_of(), 0)
    ends = {tag: count for (name, tag), count in sink.counts.items() if name == "tide_requests"}
    assert ends == {"stop": 2, "length": 1, "cancelled": 1, "DeadlineError": 1}


def test_prompt_tokens_from_the_prefix_cache_are_counted_when_their_request_ends(meter: Meter, sink: Sink) -> None:
    for cached in (0, 16, 32):
        meter.on_output(make_answer(), piece(0, Usage(40, 1, cached_tokens=cached)))
    meter.flush(stats_of(), 0)
    assert sink.counts == {("tide_cached_prompt_tokens", ""): 48}


def test_a_piece_without_tokens_is_no_latency(meter: Meter, sink: Sink) -> None:
    meter.on_output(make_answer(), piece(0, Usage(3, 0)))
    meter.flush(stats_of(), 0)
    assert set(sink.samples) == {("tide_queue_seconds", "verified")}


def test_the_engine_may_make_any_number_of_tokens_without_as_many_calls(meter: Meter, sink: Sink) -> None:
    meter.flush(stats_of(exits(left={2: 15_000, 4: 3_000, 8: 12_000})), 0)
    assert sink.counts["tide_exits", "2"] == 15_000, "counters count all"
    layers = sink.samples["tide_exit_layer", ""]
    assert len(layers) == MAX_SAMPLES
    assert layers.count(2) / MAX_SAMPLES == pytest.approx(0.5, abs=0.01)
    assert layers.count(4) / MAX_SAMPLES == pytest.approx(0.1, abs=0.01)
    assert sink.num_calls < MAX_SAMPLES + 30


def test_all_values_are_handed_on_while_they_are_few() -> None:
    assert thinned([3.0, 1.0, 2.0], 3) == [1.0, 2.0, 3.0]
    assert thinned([], 3) == []


@pytest.mark.parametrize("number", [4, 5, 7, 100, 1001])
def test_a_thinned_sample_keeps_quantiles_and_mean(number: int) -> None:
    values = [float(value) for value in range(number)]
    few = thinned(reversed(values), 4)
    assert len(few) == 4
    assert set(few) <= set(values)
    assert sum(few) / 4 == pytest.approx((number - 1) / 2, abs=0.51)
    assert few[1] == pytest.approx(3 * number / 8, abs=1)


def test_what_nobody_takes_is_bounded(meter: Meter) -> None:
    answer = make_answer()
    for _ in range(MAX_HELD // 2 + 10):
        meter.on_end(answer, "stop")
    assert len(meter._recorded) == MAX_HELD


def test_requests_that_end_while_others_are_handed_on_are_not_lost(meter: Meter, sink: Sink) -> None:
    answer = make_answer()
    ender = threading.Thread(target=lambda: [meter.on_end(answer, f"reason {number % 50}") for number in range(20_000)])
    ender.start()
    while ender.is_alive():
        meter.flush(stats_of(), 0)
    meter.flush(stats_of(), 0)
    assert sum(count for (name, _), count in sink.counts.items() if name == "tide_requests") == 20_000


async def test_a_service_is_measured_from_start_to_end(sink: Sink, meter: Meter) -> None:
    engine = exit_engine()
    service = Service(engine, model="tiny", observer=meter)
    try:
        params = {"max_tokens": 24, "ignore_eos": True}
        for _ in range(3):
            await service.whole(service.begin(Call([2, 3, 4], params), make_answer().caller))
        meter.flush(engine.stats(), service.tokens_in_flight)
    finally:
        engine.close()
    assert sink.counts["tide_generation_tokens", ""] == 72
    assert sum(count for (name, _), count in sink.counts.items() if name == "tide_exits") == 72
    assert sink.counts["tide_requests", "length"] == 3
    assert len(sink.samples["tide_time_to_first_token_seconds", "verified"]) == 3
    assert sink.gauges["tide_tokens_in_flight", ""] == 0
    assert {name for name, _ in (*sink.counts, *sink.gauges, *sink.samples)} <= set(BY_NAME)


def test_the_text_of_the_metrics_is_what_is_passed_on(sink: Sink) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    exporter = TextExporter(sink)
    exporter.add("tide_requests", 2, {"finish": "stop"})
    exporter.add("tide_requests", 3, {"finish": "stop"})
    exporter.add("tide_num_requests_running", 7, {})
    exporter.add("tide_queue_seconds", 0.02, {"mode": "full"})
    families = {family.name: family for family in text_string_to_metric_families(exporter.text().decode())}
    samples = {(s.name, *sorted(s.labels.values())): s.value for family in families.values() for s in family.samples}
    assert samples["tide_requests_total", "stop"] == 5
    assert samples["tide_num_requests_running",] == 7
    assert samples["tide_queue_seconds_count", "full"] == 1
    assert samples["tide_queue_seconds_bucket", "0.025", "full"] == 1
    assert samples["tide_queue_seconds_bucket", "0.01", "full"] == 0
    assert {metric.name for metric in METRICS} <= set(families)
    assert sink.num_calls == 4, "Ray gets them, too"


def test_a_thread_hands_on_until_it_is_stopped_and_tells_of_a_failure_once(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.metrics.FLUSH_S", 0.001)
    logged: list[str] = []
    monkeypatch.setattr("deploy.metrics.logger.exception", logged.append)
    states = iter([stats_of(num_running=1)] + [None] * 5 + [stats_of(num_running=2)])
    enough, meter = threading.Event(), Meter(sink, model="tiny", max_queued=9)

    def stats() -> EngineStats:
        state = next(states, "the end")
        if state == "the end":
            enough.set()
            return stats_of(num_running=2)
        if state is None:
            raise RuntimeError("for a while")
        assert isinstance(state, EngineStats)
        return state

    meter.start(stats, lambda: 5)
    assert enough.wait(60)
    meter.stop()
    assert meter._thread is not None
    meter._thread.join(60)
    assert not meter._thread.is_alive()
    assert logged == ["metrics could not be exported"]
    assert sink.gauges["tide_num_requests_running", ""] == 2


def test_ray_takes_every_metric_of_the_table_with_its_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    logged: list[tuple[Any, ...]] = []

    def stub(kind: str, verb: str) -> Any:
        def make(*args: Any) -> Any:
            made.append((kind, *args))
            return SimpleNamespace(**{verb: lambda value, tags: logged.append((args[0], value, tags))})

        return make

    for kind, verb in (("Counter", "inc"), ("Gauge", "set"), ("Histogram", "observe")):
        monkeypatch.setattr(f"ray.serve.metrics.{kind}", stub(kind, verb))
    exporter = RayExporter()
    assert [each[1] for each in made] == [metric.name for metric in METRICS]
    described = BY_NAME["tide_differing_tokens"].text
    assert ("Counter", "tide_differing_tokens", described, ("mode",)) in made
    assert ("Histogram", "tide_queue_seconds", BY_NAME["tide_queue_seconds"].text, list(LATENCIES_S), ("mode",)) in made
    for name, tags in (("tide_requests", {"finish": "stop"}), ("tide_exit_layer", {}), ("tide_predicted_gain", {})):
        exporter.add(name, 3, tags)
    assert logged == [
        ("tide_requests", 3, {"finish": "stop"}),
        ("tide_exit_layer", 3, {}),
        ("tide_predicted_gain", 3, {}),
    ]


def test_rays_own_classes_take_the_table_and_what_a_meter_says() -> None:
    meter = Meter(RayExporter(), model="tiny", max_queued=9)
    meter.on_end(make_answer(), "stop")
    meter.on_output(make_answer(), piece(1, Usage(3, 1)))
    judged = {"fast(0.05)": (20, 0.8)}
    left = exits(left={2: 3, 8: 1}, drafts=3, accepted=3)
    meter.flush(stats_of(left, audits=(audit(),), judged=judged, num_audits_dropped=1), 1)
