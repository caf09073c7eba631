"""The figures of each contract, and their output: a table, CSV, JSON, a plot. No torch here."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from tide_core.calibration.report.plots import COLOURS, MARKERS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class ContractResult:
    """The figures of one contract over all prompts, greedy."""

    name: str
    mode: str
    epsilon: float | None
    threshold: float | None
    num_prompts: int
    num_tokens: int
    disagreement: float
    """Share of tokens that differ from the choice of full depth after the same emitted tokens."""
    exact_match: float
    """Share of prompts whose answer is exactly that of full depth."""
    perplexity: float
    """Of the contract's output under full depth."""
    perplexity_difference: float
    """Minus the perplexity of full depth's own output."""
    layers_per_token: float
    layers_share: float
    """Layers per token over all layers."""
    tokens_per_deep_pass: float
    acceptance: float | None
    """Share of accepted drafts; None without drafts."""
    exit_rate: float
    """Share of tokens that exited early."""
    seconds: float
    tokens_per_s: float
    speedup: float
    """Tokens per second over those of full depth in the same run."""
    margin: float | None = None


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("disagreement", "disagree", "{:.4f}"),
    ("exact_match", "exact", "{:.3f}"),
    ("perplexity_difference", "ppl diff", "{:+.3f}"),
    ("layers_per_token", "layers/token", "{:.2f}"),
    ("tokens_per_deep_pass", "tokens/pass", "{:.2f}"),
    ("acceptance", "accepted", "{:.3f}"),
    ("tokens_per_s", "tokens/s", "{:.1f}"),
    ("speedup", "speed-up", "{:.2f}"),
)


def table(results: Sequence[ContractResult]) -> str:
    """One line per contract, in columns."""
    width = max(len("contract"), *(len(result.name) for result in results))
    lines = ["  ".join([f"{'contract':{width}}", *(title for _, title, _ in COLUMNS)])]
    for result in results:
        cells = [f"{_cell(getattr(result, name), form):>{len(title)}}" for name, title, form in COLUMNS]
        lines.append("  ".join([f"{result.name:{width}}", *cells]))
    return "".join(line.rstrip() + "\n" for line in lines)


def as_csv(results: Sequence[ContractResult]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(ContractResult)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(result) for result in results)
    return out.getvalue()


def as_json(results: Sequence[ContractResult], conditions: Mapping[str, Any]) -> str:
    rows = [{key: _finite(value) for key, value in asdict(result).items()} for result in results]
    return json.dumps({"conditions": dict(conditions), "results": rows}, indent=2, allow_nan=False) + "\n"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _finite(value: Any) -> Any:
    """JSON has no infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


WIDE = (9.6, 3.8)
COSTS = (("layers_per_token", "layers per token"), ("tokens_per_s", "tokens per second"))


def draw_curve(results: Sequence[ContractResult]) -> bytes:
    """The cost-quality curve as a PNG: layers per token and tokens per second against disagreement with full depth. The
    points of a mode are connected."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=WIDE, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (cost, label) in zip(figure.subplots(1, 2), COSTS, strict=True):
            _draw(axes, results, cost)
            axes.set(xlabel="disagreement with full depth (% of tokens)", ylabel=label)
            axes.set_ylim(bottom=0)
        axes.legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def _draw(axes: Axes, results: Sequence[ContractResult], cost: str) -> None:
    for index, mode in enumerate(dict.fromkeys(result.mode for result in results)):
        mine = sorted((result for result in results if result.mode == mode), key=lambda r: r.disagreement)
        xs = [100 * result.disagreement for result in mine]
        ys = [getattr(result, cost) for result in mine]
        axes.plot(xs, ys, color=COLOURS[index % 7], marker=MARKERS[index % 7], label=mode)
        for x, y, result in zip(xs, ys, mine, strict=True):
            note = result.epsilon if result.epsilon is not None else result.threshold
            if note is not None:
                axes.annotate(f"{note:g}", (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
