"""The report of a calibration: `report.md` with its plots, and `report.json` with the numbers of both.

The same data always gives the same text. Without matplotlib the report has no plots and names the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tide_core.calibration.report.data import FastFigures, Measured, ReportData
from tide_core.calibration.report.plots import can_plot, draw_plots
from tide_core.calibration.risk.costs import PRIOR_ACCEPTANCE
from tide_core.errors import ConfigError

TEXT = "report.md"
DATA = "report.json"

CAPTIONS = {
    "agreement_by_distance.png": "Agreement of the exits with full depth, by distance to the last deep state",
    "precision_coverage.png": "Tokens that score enough and the share of them that agrees; that of `fast` marked",
    "speedup.png": "Speed-up over full depth by batch size, mode `verified`",
    "reliability.png": "What the router's score means",
}


def render_report(data: ReportData) -> dict[str, bytes]:
    """Content by file name: the text, the data, and the plots if matplotlib is installed."""
    plots = draw_plots(data) if can_plot() else {}
    return {TEXT: report_text(data, tuple(plots)).encode(), DATA: data.to_json(), **plots}


def add_measured(data: ReportData, measured: Measured) -> ReportData:
    """The report with one more series of timings, and a line of the verdict that compares them with the predictions.
    Speed-ups must be ratios over full depth within one run."""
    for batch, speedup in measured.speedups.items():
        if batch < 1 or not 0.0 < speedup < math.inf:
            raise ConfigError(
                f"measured speed-up at batch {batch}", speedup, "a number above 0 at a batch of at least 1"
            )
    verdict = (*data.verdict, measured_line(measured, data.predicted))
    return replace(data, measured=(*data.measured, measured), verdict=verdict)


def measured_line(measured: Measured, predicted: Mapping[int, float]) -> str:
    shown = [
        f"x{speedup:.2f} at batch {batch}" + (f" (predicted x{predicted[batch]:.2f})" if batch in predicted else "")
        for batch, speedup in sorted(measured.speedups.items())
    ]
    left_out = f"; left out: {measured.left_out}" if measured.left_out else ""
    return f"measured here: {', '.join(shown) or 'nothing'}{left_out}"


def report_text(data: ReportData, plots: Sequence[str] = ()) -> str:
    """The report as Markdown, with links to the plots."""
    sections = [
        f"# Calibration of {data.model}",
        _verdict(data),
        _sizes(data),
        _considered(data) if data.considered else "",
        _candidates(data),
        _drafting(data),
        _curve(data) if data.curve else "",
        _fast(data),
        _speedups(data),
        _workers(data) if data.workers else "",
        _pictures(plots),
        _settings(data),
        f"## Repeat it\n\n```\n{data.command}\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _verdict(data: ReportData) -> str:
    lines = ["## Verdict", ""]
    lines += [f"{'**' if first else ''}{line}{'**' if first else ''}  " for first, line in _marked(data.verdict)]
    lines += [f"{note}  " for note in data.notes]
    return "\n".join(lines)


def _marked(lines: Iterable[str]) -> list[tuple[bool, str]]:
    return [(index == 0, line) for index, line in enumerate(lines)]


def _sizes(data: ReportData) -> str:
    rows = [("model", data.model), ("architecture", data.architecture)]
    rows += [("layers, width, vocabulary", f"{data.num_layers}, {data.width}, {data.vocab_size}")]
    rows += [("weights", f"`{data.weights_digest}`"), ("tokenizer", f"`{data.tokenizer_digest}`")]
    rows += [("shortlist", f"{data.shortlist_size} tokens, {data.shortlist_coverage:.1%} of those emitted")]
    rows += [("tool version", data.tool_version)]
    parts = [(p.name, f"{p.num_sequences:,}", f"{p.num_tokens:,}", f"`{p.digest}`") for p in data.parts]
    tables = _table(("", ""), rows), _table(("part", "sequences", "tokens", "digest"), parts)
    return "## Model and data\n\n" + "\n\n".join(tables)


def _considered(data: ReportData) -> str:
    timed = all(each.tokens_per_s is not None for each in data.considered)
    rows = [
        (
            each.name,
            str(each.inner),
            f"{each.num_parameters / 1e6:.1f} M",
            f"{each.draft_share:.3f}",
            f"×{each.speedup:.2f}",
            "–" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}",
            "yes" if each.trained else "no",
        )
        for each in data.considered
    ]
    head = ("exit", "inner width", "head", "draft cost", "predicted", "tokens/s", "trained")
    how = "Costs are passes timed on this device." if timed else "Costs are parameters read: passes were not timed."
    text = (
        f"{how} Predicted for one row before training, when every exit is assumed to have {PRIOR_ACCEPTANCE:.0%} of "
        "its drafts right, so the order is one of costs: the cheapest of each checkpoint layer was trained, then the "
        "next cheapest. Which of the trained ones is published, their traces decided."
    )
    return f"## Exits considered\n\n{_table(head, rows)}\n\n{text}"


def _candidates(data: ReportData) -> str:
    rows = [
        (
            f"{'**' if c.name == data.chosen else ''}{c.name}{'**' if c.name == data.chosen else ''}",
            str(c.layer),
            c.kind,
            ", ".join(_share(value) for value in c.agreement),
            f"{c.draft_share:.3f}",
            f"{c.draft_threshold:g}",
            str(c.max_drafts),
            f"×{c.speedup:.2f}",
        )
        for c in data.candidates
    ]
    head = ("exit", "layer", "head", "agreement by distance", "draft cost", "draft from", "drafts", "predicted")
    text = "Draft cost: of one draft, in full passes. Draft from: least score. The published exit is in bold."
    return f"## Exits tried\n\n{_table(head, rows)}\n\n{text}"


def _drafting(data: ReportData) -> str:
    chosen = data.chosen_candidate
    rows = [(str(distance), _share(value)) for distance, value in enumerate(data.acceptance, 1)]
    text = f"{data.tokens_per_deep_pass:.2f} tokens per deep pass with up to {chosen.max_drafts} drafts at scores of "
    text += f"at least {chosen.draft_threshold:g}, mode `verified`."
    return f"## Drafting\n\n{text}\n\n{_table(('distance', 'accepted, of drafts made'), rows)}"


def _curve(data: ReportData) -> str:
    rows = [
        (str(p.steps), "–" if p.minutes is None else f"{p.minutes:.1f}", f"{p.tokens_per_pass:.2f}") for p in data.curve
    ]
    text = (
        "Tokens of a deep pass with a draft at every distance, on the text of training just before: whether more time "
        "would pay. A training that ends earlier does a little better than its line, since its learning rate falls to "
        "its own end."
    )
    return f"## Training\n\n{_table(('steps', 'minutes', 'tokens per deep pass'), rows)}\n\n{text}"


def _fast(data: ReportData) -> str:
    if data.fast_exits is not None:
        return _fast_exits(data, data.fast_exits)
    fast = "No threshold keeps the disagreement low enough; the mode is not offered."
    if data.fast is not None:
        fast = f"Threshold {data.fast.threshold:.4f}: {data.fast.disagreement:.2%} of tokens disagree, teacher-forced; "
        fast += f"{data.fast.layers_per_token:.1f} of {data.num_layers} layers a token, {data.fast.coverage:.1%} exits "
        fast += f"({data.fast.num_sequences} sequences). Not a promise."
    return f"## Mode `fast`\n\n{fast}"


def _fast_exits(data: ReportData, exits: FastFigures) -> str:
    rows = [
        (str(layer), "" if agreement is None else _share(agreement), f"{error:.3f}")
        for layer, agreement, error in zip(exits.layers, exits.agreement, exits.map_error, strict=True)
    ]
    lines = ["## Mode `fast`", "", _table(("exit after layer", "agreement in training", "error of the skip map"), rows)]
    certified = next((entry.certified for entry in reversed(data.measured) if entry.certified is not None), None)
    if certified is None:
        return "\n".join((*lines, "", "No contract was certified: nothing was measured. A request names a threshold."))
    shown = [
        (
            f"{each.epsilon:g}",
            ", ".join(f"{threshold:.3f}" for threshold in each.thresholds),
            f"{each.disagreement:.2%}",
            f"{each.layers_per_token:.1f} of {data.num_layers}",
            f"{each.num_sequences} of at most {each.max_tokens} tokens",
        )
        for each in certified.contracts
    ]
    head = ("epsilon", "thresholds", "tokens that differ", "layers a token", "answers")
    lines += ["", _table(head, shown) if shown else "No contract could be certified. A request names a threshold.", ""]
    text = (
        "Greedy answers of the mode itself to held-out prompts, in this dtype and on this device; full depth read each "
        "answer. A contract holds in the mean over answers; nothing is said of sampled or longer answers, nor of other "
        "kinds of prompts."
    )
    if certified.contracts:
        text += f" The probability that any of these is wrong is at most {certified.contracts[0].delta:g}."
    tried = [
        (
            f"{each.epsilon:g}",
            f"{each.threshold:.3f}",
            f"{each.disagreement:.2%}",
            f"{each.layers_per_token:.1f}",
            f"{each.p_value:.2g}",
        )
        for each in certified.tried
    ]
    lines.append(text)
    return "\n".join((*lines, "", _table(("epsilon", "tried", "differ", "layers a token", "p"), tried)))


def _speedups(data: ReportData) -> str:
    batches = sorted({*data.predicted, *(batch for entry in data.measured for batch in entry.speedups)})
    head = ("batch", "predicted", *(f"measured {number}" for number, _ in enumerate(data.measured, 1)))
    series = [data.predicted, *(entry.speedups for entry in data.measured)]
    rows = [(str(batch), *(f"×{s[batch]:.2f}" if batch in s else "" for s in series)) for batch in batches]
    lines = ["## Speed-up over full depth, mode `verified`", "", _table(head, rows)]
    if not data.measured:
        lines += ["", "Predicted from agreement and costs; nothing was timed yet."]
    for number, entry in enumerate(data.measured, 1):
        left_out = f" Left out: {entry.left_out}." if entry.left_out else ""
        lines += ["", f"Measured {number}: {entry.conditions}.{left_out}"]
    return "\n".join(lines)


def _workers(data: ReportData) -> str:
    rows = [(w.name, w.node, str(w.num_items), f"{w.busy_s:.1f}", str(w.num_restarts)) for w in data.workers]
    head = ("worker", "node", "shards and stages", "busy, s", "restarts")
    return f"## Workers\n\nUp to the decision; it, and the timing, are not in it.\n\n{_table(head, rows)}"


def _pictures(plots: Sequence[str]) -> str:
    if not plots:
        return "## Plots\n\nNone: matplotlib is not installed here."
    return "## Plots\n\n" + "\n\n".join(f"{CAPTIONS[name]}:\n\n![{CAPTIONS[name]}]({name})" for name in plots)


def _settings(data: ReportData) -> str:
    rows = [(name, f"`{value}`") for name, value in data.settings.items()]
    return f"## Settings\n\n{_table(('setting', 'value'), rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _share(value: float) -> str:
    return f"{value:.3f}" if value == value else "–"
