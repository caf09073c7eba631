"""The plots of a calibration report, as PNG files of a few kilobytes. Matplotlib is imported on the first use."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tide_core.calibration.report.data import CandidateCurves, ReportData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Distinct for all kinds of colour vision (Okabe and Ito)."""
MARKERS = "osD^vP*"
STYLE: Any = {
    "figure.figsize": (6.4, 3.8),
    "figure.dpi": 96,
    "figure.facecolor": "white",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
}


def can_plot() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw_plots(data: ReportData) -> dict[str, bytes]:
    """PNG by file name, in the order of the report; a plot without data is left out."""
    drawn = {}
    for name, (draw, has_data) in PLOTS.items():
        if has_data(data):
            with _figure() as (axes, save):
                draw(axes, data)
                drawn[name] = save()
    return drawn


@contextmanager
def _figure() -> Iterator[tuple[Axes, Callable[[], bytes]]]:
    """Axes on a new figure and a function that saves it, without pyplot and its global state."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)

        def save() -> bytes:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", metadata={"Software": None})
            return buffer.getvalue()

        yield figure.add_subplot(), save


def _agreement_by_distance(axes: Axes, data: ReportData) -> None:
    for index, candidate in enumerate(data.candidates):
        distances = range(1, len(candidate.agreement) + 1)
        style: dict[str, Any] = {"color": COLOURS[index % 7], "marker": MARKERS[index % 7], "label": _label(candidate)}
        axes.plot(distances, candidate.agreement, **style)
    accepted = range(1, len(data.acceptance) + 1)
    axes.plot(accepted, data.acceptance, "k--", label="accepted, of drafts made by the chosen exit")
    axes.set(xlabel="distance to the last deep state (tokens)", ylabel="agreement with full depth", ylim=(0, 1))
    axes.set_xticks(list(range(1, max(len(c.agreement) for c in data.candidates) + 1)))
    axes.legend()


def _precision_coverage(axes: Axes, data: ReportData) -> None:
    lowest = 1.0
    for index, candidate in enumerate(data.candidates):
        colour = COLOURS[index % 7]
        pairs = [(c, p) for c, p in zip(candidate.coverage, candidate.precision, strict=True) if p == p and c > 0]
        if not pairs:
            continue
        axes.plot(*zip(*pairs, strict=True), color=colour, label=_label(candidate))
        lowest = min(lowest, *(p for _, p in pairs))
        if candidate.name == data.chosen and data.fast is not None:
            _mark(axes, candidate, data.fast.threshold, "fast", colour)
    axes.set(
        xlabel="coverage (share of tokens that score enough, distance 1)",
        ylabel="precision (share of them that agree)",
        xlim=(0, 1),
        ylim=(max(0.0, lowest - 0.05), 1.005),
    )
    axes.legend(loc="lower left")


def _mark(axes: Axes, candidate: CandidateCurves, threshold: float, text: str, colour: str) -> None:
    nearest = min(range(len(candidate.thresholds)), key=lambda i: abs(candidate.thresholds[i] - threshold))
    x, y = candidate.coverage[nearest], candidate.precision[nearest]
    if y == y:
        axes.plot([x], [y], marker="o", color="white", markeredgecolor=colour, markersize=6)
        axes.annotate(text, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)


def _speedup(axes: Axes, data: ReportData) -> None:
    places = sorted({*data.predicted, *(batch for entry in data.measured for batch in entry.speedups)})
    at = {batch: place for place, batch in enumerate(places)}
    series = [
        ("predicted", data.predicted),
        *((f"measured: {_short(m.conditions)}", m.speedups) for m in data.measured if m.speedups),
    ]
    for index, (label, speedups) in enumerate(series):
        batches = sorted(speedups)
        style: dict[str, Any] = {"color": COLOURS[index % 7], "marker": MARKERS[index % 7], "label": label}
        axes.plot([at[b] for b in batches], [speedups[b] for b in batches], "--" if index == 0 else "-", **style)
    axes.axhline(1.0, color="#666666", linewidth=0.8)
    axes.set_xticks(list(at.values()), [str(batch) for batch in places])
    axes.set(xlabel="batch size (rows)", ylabel="speed-up over full depth (×)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left")


def _reliability(axes: Axes, data: ReportData) -> None:
    axes.plot([0, 1], [0, 1], color="#666666", linewidth=0.8, label="score = share that agrees")
    most = max(entry.num_positions for entry in data.reliability)
    axes.plot([e.score for e in data.reliability], [e.agreement for e in data.reliability], color=COLOURS[0])
    sizes = [12 + 120 * entry.num_positions / most for entry in data.reliability]
    axes.scatter(
        [e.score for e in data.reliability],
        [e.agreement for e in data.reliability],
        s=sizes,
        color=COLOURS[0],
        label="positions of similar score (area: how many)",
    )
    axes.set(
        xlabel="router score (mean of the bin)", ylabel="agreement with full depth", xlim=(0, 1.02), ylim=(0, 1.05)
    )
    axes.legend(loc="lower right")


def _label(candidate: CandidateCurves) -> str:
    return f"{candidate.kind}, layer {candidate.layer}"


def _short(conditions: str) -> str:
    return conditions if len(conditions) <= 48 else conditions[:47] + "…"


PLOTS: dict[str, tuple[Callable[[Any, ReportData], None], Callable[[ReportData], bool]]] = {
    "agreement_by_distance.png": (_agreement_by_distance, lambda data: bool(data.candidates)),
    "precision_coverage.png": (_precision_coverage, lambda data: bool(data.candidates)),
    "speedup.png": (_speedup, lambda data: bool(data.predicted)),
    "reliability.png": (_reliability, lambda data: bool(data.reliability)),
}
