"""The cost-quality curve: what each contract costs against how often it disagrees with full depth, as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tide_core.calibration.report.plots import COLOURS, MARKERS, STYLE, can_plot
from tide_core.evaluation.results import ContractResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["can_plot", "draw_curve"]

WIDE = (9.6, 3.8)
COSTS = (("layers_per_token", "layers per token"), ("tokens_per_s", "tokens per second"))


def draw_curve(results: Sequence[ContractResult]) -> bytes:
    """Two plots side by side: layers that ran, and the clock. The thresholds of a mode are joined by a line."""
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
