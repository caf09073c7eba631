"""The metrics reference, from the tables in the code."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from deploy.calibration import metrics as job
from deploy.metrics import FLUSH_S, MAX_SAMPLES, METRICS
from tools.reference.markdown import NOTE, code, lines, table


def metrics() -> str:
    kinds = (("counter", "Counters"), ("gauge", "Gauges"), ("histogram", "Histograms"))
    parts = [
        "# Metrics reference",
        NOTE,
        lines(
            "Ray's Prometheus port exports all metrics. Those of the service have the tags `application`, `deployment`",
            f"and `replica` in addition to those in the tables; they are exported to Ray every {FLUSH_S:g} s. The",
            "[runbook](../runbook.md) lists what to do about each alert.",
        ),
    ]
    for kind, title in kinds:
        rows = [
            (code(exported(one.name, kind)), ", ".join(map(code, one.tags)), one.text)
            for one in METRICS
            if one.kind == kind
        ]
        parts += [f"## {title}", table(("name", "tags", "meaning"), rows)]
    parts.append(
        lines(
            f"Of each histogram and tag at most {MAX_SAMPLES} values per flush are exported, evenly spaced by size:",
            "quantiles and means stay, and `_count` counts exported values. Counters count everything.",
        )
    )
    edges = [
        (code(exported(one.name, one.kind)), ", ".join(f"{edge:g}" for edge in one.boundaries))
        for one in METRICS
        if one.boundaries
    ]
    parts += ["### Buckets", table(("name", "upper edges"), edges)]
    rows = [(code(exported(name, kind)), ", ".join(map(code, tags)), text) for name, kind, text, tags in job_metrics()]
    parts += ["## Of a calibration job", table(("name", "tags", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def exported(name: str, kind: str) -> str:
    """The name in Prometheus."""
    return f"ray_{name}_total" if kind == "counter" else f"ray_{name}"


def job_metrics() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Name, kind, text and tags of a calibration job's metrics, read from the calls that create them."""
    for call in ast.walk(ast.parse(inspect.getsource(job))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("Counter", "Gauge"):
            name, text, tags = call.args
            assert isinstance(name, ast.Constant)
            assert isinstance(text, ast.Constant)
            assert isinstance(tags, ast.Tuple)
            named = tuple(str(getattr(job, tag.id)) for tag in tags.elts if isinstance(tag, ast.Name))
            yield str(name.value), call.func.id.lower(), str(text.value), named
