"""Draw the dashboard from recorded samples: `python tools/render_dashboard.py docs/dashboard.png`.

Layout, titles, units, thresholds and queries come from the dashboard; matplotlib draws instead of Grafana.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from tools.dashboard import RECORDED, dashboard, filled
from tools.promql import Labels, Recording
from tools.promql_syntax import parse

GRID_IN = 0.66, 0.36
"""Inches of one cell of Grafana's grid of 24 columns."""
COLOURS = ("#5794f2", "#ff9830", "#73bf69", "#f2495c", "#b877d9", "#fade2a", "#8ab8ff", "#96d98d")
NAMED = {"green": "#73bf69", "red": "#f2495c", "orange": "#ff9830"}
PAGE, CARD, TEXT = "#111217", "#181b1f", "#ccccdc"
Series = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recorded", type=Path, default=RECORDED)
    args = parser.parse_args()
    draw(Recording.read(args.recorded), args.out)


def draw(recording: Recording, out: Path) -> None:
    shown = dashboard()
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown["panels"]) + 1
    plt.rcParams.update({"text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT})
    plt.rcParams.update({"font.size": 7, "axes.edgecolor": "#33363c", "axes.facecolor": CARD})
    figure = plt.figure(figsize=(24 * GRID_IN[0], height * GRID_IN[1]), facecolor=PAGE)
    figure.text(0.01, 1 - 0.6 / height, f"{shown['title']}: {recording.times[-1]:.0f} s of a recorded run", fontsize=12)
    for panel in shown["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - (place["y"] + 1) / height
        if panel["type"] == "row":
            figure.text(0.01, top - 0.7 / height, panel["title"], fontsize=11, weight="bold")
            continue
        width, tall = place["w"] / 24, place["h"] / height
        figure.text(left + 0.008, top - 0.6 / height, panel["title"], fontsize=9)
        figure.add_artist(_card(left, top, width, tall))
        has_axis = 0.0 if panel["type"] == "stat" else 1.0
        bottom = (1.9 if panel["type"] == "timeseries" else 0.9) * has_axis / height
        box = (left + 0.008 + 0.03 * has_axis, top - tall + bottom, width - 0.016 - 0.032 * has_axis)
        axes = figure.add_axes((*box, tall - bottom - 1.0 / height), zorder=2)
        PAINTERS[panel["type"]](axes, panel, recording)
    figure.savefig(out, dpi=75, facecolor=PAGE, metadata={"Software": None})
    plt.close(figure)


def evaluated(panel: dict[str, Any], recording: Recording) -> Series:
    """Every line of a panel by its legend, with NaN where it has no value."""
    lines: Series = {}
    for target in panel["targets"]:
        node = parse(filled(target["expr"], 4 * recording.interval_s))
        for index, at in enumerate(recording.times):
            for labels, value in recording.vector(node, at).items():
                line = lines.setdefault(_legend(target["legendFormat"], labels), [math.nan] * len(recording.times))
                line[index] = value
    return lines


def _legend(template: str, labels: Labels) -> str:
    for name, value in labels:
        template = template.replace("{{" + name + "}}", value)
    return template


def _card(left: float, top: float, width: float, tall: float) -> Any:
    return Rectangle((left + 0.002, top - tall + 0.001), width - 0.004, tall - 0.002, color=CARD, zorder=1)


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
    suffix = {"reqps": " req/s", "opm": " /min"}.get(unit, unit.removeprefix("suffix:") if ":" in unit else "")
    return f"{value:,.3g}{suffix}" if abs(value) < 1000 else f"{value:,.0f}{suffix}"


def _steps(panel: dict[str, Any]) -> list[tuple[str, float]]:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return [(step["color"], -math.inf if step["value"] is None else step["value"]) for step in steps]


def _stat(axes: Axes, panel: dict[str, Any], recording: Recording) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    values = [value for line in evaluated(panel, recording).values() for value in line if not math.isnan(value)]
    colour = "green"
    if values:
        colour = [name for name, least in _steps(panel) if values[-1] >= least][-1]
    text = _shown(values[-1], defaults["unit"]) if values else defaults.get("noValue", "no data")
    axes.axis("off")
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=18, color=NAMED[colour])


def _timeseries(axes: Axes, panel: dict[str, Any], recording: Recording) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    lines = {name: line for name, line in evaluated(panel, recording).items() if not all(map(math.isnan, line))}
    if not lines:
        axes.text(0.5, 0.5, defaults.get("noValue", "no data"), ha="center", transform=axes.transAxes, fontsize=12)
    stacked = "stacking" in defaults["custom"]
    below = np.zeros(len(recording.times))
    for index, (name, line) in enumerate(lines.items()):
        colour, values = COLOURS[index % len(COLOURS)], np.array(line)
        if stacked:
            values = below + np.nan_to_num(values)
            axes.fill_between(recording.times, below, values, color=colour, alpha=0.35, linewidth=0)
            below = values
        axes.plot(recording.times, values, color=colour, label=name, linewidth=1.4)
    for name, least in _steps(panel):
        if "thresholdsStyle" in defaults["custom"] and math.isfinite(least):
            axes.axhline(least, color=NAMED[name], linestyle="--", linewidth=1)
    axes.set_ylim(bottom=defaults.get("min"), top=defaults.get("max"))
    axes.set_xlim(recording.times[0], recording.times[-1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, defaults["unit"])))
    axes.grid(color="#2c3235", linewidth=0.5)
    if lines:
        columns = 4 if panel["gridPos"]["w"] > 6 else 2
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.09), ncols=columns, frameon=False, fontsize=6.5)


def _heatmap(axes: Axes, panel: dict[str, Any], recording: Recording) -> None:
    """Buckets are cumulative: a row shows the difference to the bucket below, as in Grafana."""
    lines = evaluated(panel, recording)
    bounds = sorted(lines, key=lambda bound: float(bound.replace("+Inf", "inf")))
    counts = np.nan_to_num(np.array([lines[bound] for bound in bounds]))
    cells = np.diff(counts, axis=0, prepend=0.0)
    mesh = axes.pcolormesh(
        recording.times, range(len(bounds)), np.where(cells > 1e-9, cells, np.nan), cmap="YlGnBu_r", shading="nearest"
    )
    axes.set_yticks(range(len(bounds)), [bound.removesuffix(".0") for bound in bounds], fontsize=5.5)
    axes.set_ylabel(panel["options"]["yAxis"]["axisLabel"], fontsize=6)
    plt.colorbar(mesh, ax=axes, pad=0.01).ax.set_zorder(3)  # above the card


def _states(axes: Axes, panel: dict[str, Any], recording: Recording) -> None:
    mapping = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    lines = evaluated(panel, recording)
    for row, line in enumerate(lines.values()):
        for index, value in enumerate(line):
            if not math.isnan(value):
                state = mapping[f"{value:.0f}"]
                span = (recording.times[index] - recording.interval_s, recording.interval_s)
                axes.broken_barh([span], (row - 0.4, 0.8), color=NAMED[state["color"]])
    for row, name in enumerate(lines):
        axes.text(0.01, row, name, transform=axes.get_yaxis_transform(), va="center", color=PAGE)
    axes.set_yticks([])
    states = ", ".join(f"{state['color']}: {state['text']}" for state in list(mapping.values())[:3])
    axes.set_title(states, fontsize=6.5, loc="right")
    axes.set_xlim(recording.times[0], recording.times[-1])


PAINTERS = {"stat": _stat, "timeseries": _timeseries, "heatmap": _heatmap, "state-timeline": _states}

if __name__ == "__main__":
    main()
