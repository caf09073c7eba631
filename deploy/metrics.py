"""Metrics of the server: one table of all names, and their export to Ray.

Requests record plain numbers; once a second a thread exports them to Ray, which publishes them as `ray_<name>` (a
counter as `ray_<name>_total`) with the tags application, deployment and replica.

One call of Ray's histogram takes 7 µs of a core that the engine also uses. So of each histogram at most `MAX_SAMPLES`
values a second are exported, evenly spaced by size: quantiles and means stay, and the histogram's count is that of
exported values. Counters count everything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from deploy.answer import Answer
from deploy.telemetry import record_spans
from tide_core.request import RequestOutput
from tide_core.stats import EngineStats

logger = logging.getLogger("ray.serve")

FLUSH_S = 1.0
MAX_SAMPLES = 256
MAX_HELD = 100_000
"""Most recorded values between two exports; beyond it the oldest are dropped."""
LATENCIES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0)
DURATIONS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
LAYERS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    tags: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


METRICS = (
    Metric("tide_requests", "counter", "Ended requests by finish reason.", ("finish",)),
    Metric("tide_ignored_fields", "counter", "Fields of HTTP bodies that are not known here and were ignored."),
    Metric(
        "tide_artefact_moves",
        "counter",
        "Moves of the pointer to the published artefact that this replica has seen: taken, or refused.",
        ("result",),
    ),
    Metric("tide_failed_authentications", "counter", "Calls without a key, or with one that is not known."),
    Metric("tide_prompt_tokens", "counter", "Prompt tokens run; tokens from the prefix cache are not run."),
    Metric("tide_cached_prompt_tokens", "counter", "Prompt tokens of ended requests that came from the prefix cache."),
    Metric("tide_generation_tokens", "counter", "Tokens generated."),
    Metric("tide_preemptions", "counter", "Preemptions of requests for lack of KV memory."),
    Metric(
        "tide_drafts",
        "counter",
        "Draft tokens: proposed by an early exit or found in earlier text, verified at full depth.",
    ),
    Metric("tide_drafts_accepted", "counter", "Drafts accepted as output."),
    Metric(
        "tide_exits",
        "counter",
        "Output tokens by exit layer; 0 is a suffix draft, the last layer no early exit.",
        ("layer",),
    ),
    Metric("tide_exited_tokens", "counter", "Output tokens that exited before the last layer."),
    Metric("tide_layers_run", "counter", "Layers run for output tokens and drafts, summed over tokens."),
    Metric("tide_layers_saved", "counter", "Sequential layers that full depth would have run, minus those that ran."),
    Metric("tide_non_finite_scores", "counter", "Router scores that were NaN or infinite; their tokens did not exit."),
    Metric(
        "tide_differing_tokens",
        "counter",
        "Output tokens that full depth would not have chosen, kept by the budgets of mode bounded.",
        ("mode",),
    ),
    Metric("tide_num_requests_running", "gauge", "Running requests."),
    Metric("tide_num_requests_waiting", "gauge", "Waiting requests."),
    Metric("tide_queue_limit", "gauge", "Most requests that may wait (`max_queued`); more are refused."),
    Metric("tide_tokens_in_flight", "gauge", "Most tokens that open requests may still generate."),
    Metric("tide_kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1."),
    Metric("tide_engine_step_age_seconds", "gauge", "Time since the engine last ended a step or was idle."),
    Metric("tide_engine_dead", "gauge", "1 after the engine loop has stopped; Serve then replaces the replica."),
    Metric("tide_model_layers", "gauge", "Layers of the served model, by its name.", ("model",)),
    Metric("tide_draft_acceptance", "gauge", "Share of drafts accepted since the start."),
    Metric("tide_predicted_gain", "gauge", "Predicted speed-up of the last plan over full depth, by the cost table."),
    Metric("tide_config_refused", "gauge", "1 while the last user_config is refused and the previous one is in force."),
    Metric("tide_judged_answers", "counter", "Answers of mode fast that full depth has judged.", ("contract",)),
    Metric(
        "tide_judged_loss",
        "counter",
        "Sum over these answers of the share of tokens that full depth would have chosen otherwise, at most 0.5 each.",
        ("contract",),
    ),
    Metric("tide_judged_dropped", "counter", "Answers that were chosen to be judged and were not."),
    Metric(
        "tide_audit_evidence",
        "gauge",
        "Most evidence of a tenant against a contract of fast; the alarm is raised at 1 / audit_delta.",
        ("contract",),
    ),
    Metric("tide_audit_alarms", "gauge", "Tenants and contracts of fast that are served as verified after an alarm."),
    Metric(
        "tide_time_to_first_token_seconds", "histogram", "Time from arrival to the first token.", ("mode",), LATENCIES_S
    ),
    Metric(
        "tide_inter_token_latency_seconds",
        "histogram",
        "Time between two outputs of a request, divided by the tokens of the second.",
        ("mode",),
        LATENCIES_S,
    ),
    Metric("tide_request_seconds", "histogram", "Time from arrival to the end.", ("mode",), DURATIONS_S),
    Metric("tide_queue_seconds", "histogram", "Time from arrival to the first step.", ("mode",), LATENCIES_S),
    Metric("tide_exit_layer", "histogram", "Exit layer of output tokens.", (), LAYERS),
)
BY_NAME = {metric.name: metric for metric in METRICS}


class Exporter(Protocol):
    """Destination of the metrics."""

    def add(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Increase a counter, set a gauge, or add a sample to a histogram."""


class RayExporter:
    """Ray's own metrics, with the tags of the replica."""

    def __init__(self, table: Sequence[Metric] = METRICS) -> None:
        from ray.serve import metrics

        self._record: dict[str, Callable[[float, dict[str, str]], None]] = {}
        for metric in table:
            if metric.kind == "counter":
                self._record[metric.name] = metrics.Counter(metric.name, metric.text, metric.tags).inc
            elif metric.kind == "gauge":
                self._record[metric.name] = metrics.Gauge(metric.name, metric.text, metric.tags).set
            else:
                bounds = list(metric.boundaries)
                self._record[metric.name] = metrics.Histogram(metric.name, metric.text, bounds, metric.tags).observe

    def add(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        self._record[name](value, dict(tags))


class TextExporter:
    """Passes the metrics on, and has them as Prometheus' text for `/metrics` on the API port, by their plain names."""

    def __init__(self, following: Exporter, table: Sequence[Metric] = METRICS) -> None:
        import prometheus_client as prometheus

        self._following, self._registry = following, prometheus.CollectorRegistry()
        self._record: dict[str, Callable[[float, Mapping[str, str]], None]] = {}
        for metric in table:
            given: dict[str, Any] = {"labelnames": metric.tags, "registry": self._registry}
            if metric.kind == "counter":
                self._record[metric.name] = _with_labels(prometheus.Counter(metric.name, metric.text, **given), "inc")
            elif metric.kind == "gauge":
                self._record[metric.name] = _with_labels(prometheus.Gauge(metric.name, metric.text, **given), "set")
            else:
                histogram = prometheus.Histogram(metric.name, metric.text, buckets=metric.boundaries, **given)
                self._record[metric.name] = _with_labels(histogram, "observe")

    def add(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        self._following.add(name, value, tags)
        self._record[name](value, tags)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        import prometheus_client as prometheus

        return bytes(prometheus.generate_latest(self._registry))


def _with_labels(metric: Any, method: str) -> Callable[[float, Mapping[str, str]], None]:
    def record(value: float, tags: Mapping[str, str]) -> None:
        getattr(metric.labels(**tags) if tags else metric, method)(value)

    return record


class Meter:
    """Observes every request; `flush` exports the recorded values and the engine's counters."""

    def __init__(self, exporter: Exporter, *, model: str, max_queued: int) -> None:
        self.config_refused: str | None = None
        """Why the last `user_config` was refused, if it was."""
        self._exporter, self._model, self._max_queued = exporter, model, max_queued
        self._recorded: deque[tuple[str, str, float]] = deque(maxlen=MAX_HELD)
        self._before: defaultdict[str, float] = defaultdict(float)
        self._exits_before: Counter[int] = Counter()
        self._saved = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # Called on the event loop for each request. Values go into a deque, which the exporting thread empties.

    def on_output(self, answer: Answer, output: RequestOutput) -> None:
        mode, now = answer.params.mode or "full", time.monotonic()
        if output.tokens:
            if answer.first_at is None:
                self._recorded.append(("tide_time_to_first_token_seconds", mode, now - answer.started_at))
            elif answer.last_at is not None:
                gap = (now - answer.last_at) / len(output.tokens)
                self._recorded.append(("tide_inter_token_latency_seconds", mode, gap))
        if output.usage is not None:
            self._recorded.append(("tide_queue_seconds", mode, output.usage.queue_s))
            if output.usage.cached_tokens:
                self._recorded.append(("tide_cached_prompt_tokens", "", output.usage.cached_tokens))
            if output.usage.num_differing:
                self._recorded.append(("tide_differing_tokens", mode, output.usage.num_differing))
            record_spans(answer, output.usage)

    def on_end(self, answer: Answer, reason: str) -> None:
        self._recorded.append(("tide_requests", reason, 1))
        duration = time.monotonic() - answer.started_at
        self._recorded.append(("tide_request_seconds", answer.params.mode or "full", duration))

    def on_ignored_fields(self, count: int) -> None:
        self._recorded.append(("tide_ignored_fields", "", count))

    def on_artefact_move(self, result: str) -> None:
        self._recorded.append(("tide_artefact_moves", result, 1))

    # Called on the exporting thread.

    def start(
        self,
        stats: Callable[[], EngineStats],
        tokens_in_flight: Callable[[], int],
        failed_authentications: Callable[[], int] = lambda: 0,
    ) -> None:
        def run() -> None:
            failing = False
            while not self._stop.wait(FLUSH_S):
                try:
                    self.flush(stats(), tokens_in_flight(), failed_authentications())
                    failing = False
                except Exception:
                    if not failing:  # once, not once a second
                        logger.exception("metrics could not be exported")
                    failing = True

        self._thread = threading.Thread(target=run, name="tide-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def flush(self, stats: EngineStats, tokens_in_flight: int, failed_authentications: int = 0) -> None:
        self._flush_requests()
        if failed := self._gained("tide_failed_authentications", failed_authentications):
            self._exporter.add("tide_failed_authentications", failed, {})
        self._flush_counters(stats)
        self._flush_gauges(stats, tokens_in_flight)
        self._flush_audits(stats)

    def _flush_requests(self) -> None:
        recorded: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(len(self._recorded)):
            name, tag, value = self._recorded.popleft()
            recorded[name, tag].append(value)
        for (name, tag), values in recorded.items():
            metric = BY_NAME[name]
            tags = dict.fromkeys(metric.tags, tag)
            for value in [sum(values)] if metric.kind == "counter" else thinned(values):
                self._exporter.add(name, value, tags)

    def _flush_counters(self, stats: EngineStats) -> None:
        exits = stats.exits
        gained = {
            name: self._gained(name, value)
            for name, value in (
                ("tide_prompt_tokens", stats.num_prompt_tokens),
                ("tide_generation_tokens", stats.num_output_tokens),
                ("tide_preemptions", stats.num_preemptions),
                ("tide_drafts", exits["drafts"]),
                ("tide_drafts_accepted", exits["accepted"]),
                ("tide_exited_tokens", exits["total_exited"]),
                ("tide_layers_run", exits["layers_run"]),
                ("tide_non_finite_scores", exits["non_finite_scores"]),
            )
        }
        tokens, passes = self._gained("tokens", exits["total_tokens"]), self._gained("passes", exits["deep_passes"])
        shallow = min((int(layer) for layer in exits["exits_per_layer"]), default=0)
        # Rejected drafts cost layers; the counter grows again only after they are compensated.
        self._saved += (tokens - passes) * exits["num_layers"] - gained["tide_drafts"] * shallow
        if self._saved > 0:
            gained["tide_layers_saved"], self._saved = self._saved, 0
        for name, count in gained.items():
            if count > 0:
                self._exporter.add(name, count, {})
        layers = Counter({int(layer): count for layer, count in exits["exits_per_layer"].items()})
        layers[exits["num_layers"]] = exits["remaining_tokens"]
        left = layers - self._exits_before
        self._exits_before = layers
        for layer, count in left.items():
            self._exporter.add("tide_exits", count, {"layer": str(layer)})
        for value in thinned(left.elements()):
            self._exporter.add("tide_exit_layer", value, {})

    def _gained(self, name: str, count: float) -> float:
        """The increase since the last call; 0 if the count went down, as after a restart."""
        before, self._before[name] = self._before[name], count
        return max(0, count - before)

    def _flush_gauges(self, stats: EngineStats, tokens_in_flight: int) -> None:
        for name, value in (
            ("tide_num_requests_running", stats.num_running),
            ("tide_num_requests_waiting", stats.num_waiting),
            ("tide_queue_limit", self._max_queued),
            ("tide_tokens_in_flight", tokens_in_flight),
            ("tide_kv_cache_usage_perc", stats.kv_usage),
            ("tide_engine_step_age_seconds", stats.last_step_age_s),
            ("tide_engine_dead", float(stats.dead)),
            ("tide_draft_acceptance", stats.exits["acceptance"] or 0.0),
            ("tide_predicted_gain", stats.predicted_gain),
            ("tide_config_refused", float(self.config_refused is not None)),
        ):
            self._exporter.add(name, value, {})
        self._exporter.add("tide_model_layers", stats.exits["num_layers"], {"model": self._model})

    def _flush_audits(self, stats: EngineStats) -> None:
        """One series for each contract, whatever the number of tenants."""
        for contract, (num, loss) in stats.judged.items():
            for name, value in (("tide_judged_answers", num), ("tide_judged_loss", loss)):
                if (gained := self._gained(f"{name}, {contract}", value)) > 0:
                    self._exporter.add(name, gained, {"contract": contract})
            mine = [audit.evidence for audit in stats.audits if audit.contract == contract]
            self._exporter.add("tide_audit_evidence", max(mine, default=1.0), {"contract": contract})
        if (dropped := self._gained("tide_judged_dropped", stats.num_audits_dropped)) > 0:
            self._exporter.add("tide_judged_dropped", dropped, {})
        self._exporter.add("tide_audit_alarms", sum(audit.alarmed for audit in stats.audits), {})


def thinned(values: Iterable[float], most: int = MAX_SAMPLES) -> list[float]:
    """The sorted values, or `most` of them, evenly spaced by rank."""
    ordered = sorted(values)
    if len(ordered) <= most:
        return ordered
    return [ordered[(2 * index + 1) * len(ordered) // (2 * most)] for index in range(most)]
