"""A scheduled batch in, one result per row out: draft, run deep, remember, decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tide_core.batch import RowResult, RowStep, ScheduledBatch, StepResult
from tide_core.execution.depth_loop import DepthLoop, Part, Ran
from tide_core.execution.drafting import Drafter
from tide_core.execution.graphs.cycle import CapturedCycles, Started
from tide_core.execution.graphs.drafts import CapturedDrafts
from tide_core.execution.graphs.prompts import CapturedPrompts
from tide_core.execution.graphs.segments import Captured, CapturedSegments
from tide_core.execution.prompt_exits import leave_prompt
from tide_core.exits.propose import Exits
from tide_core.exits.row_cycle import RowCycle
from tide_core.exits.verify import Verifier
from tide_core.kernels import Kernels
from tide_core.kv.cache import PagedKV
from tide_core.models.adapter import ModelAdapter


class ModelRunner:
    """Holds the model, its KV pool and its exits; keeps nothing of a step once it is run."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: Kernels,
        segments: tuple[range, ...],
        *,
        exits: Exits | None = None,
        audit_share: float = 0.0,
        prompt_exits: bool = False,
        captured_drafts: CapturedDrafts | None = None,
        captured_segments: CapturedSegments | None = None,
        captured_cycles: CapturedCycles | None = None,
        captured_prompts: CapturedPrompts | None = None,
    ) -> None:
        """Rows that `captured_cycles` or `captured_prompts` take are left to them."""
        self.adapter = adapter
        self.cache = cache
        self.kernels = kernels
        self.segments = segments
        self.exits = exits
        self._cycles, self._prompts = captured_cycles, captured_prompts
        self._meanwhile: Callable[[], None] = _nothing
        self._waited: tuple[float, int] | None = None
        self._num_talking = 0
        taps = () if exits is None else exits.taps
        self._depth = DepthLoop(adapter, cache, kernels, segments, taps, captured_segments)
        self._prompt_exits = prompt_exits
        layers = [segment.stop for segment in segments[:-1]]
        self._verifier = Verifier(layers, adapter.num_layers)
        self._drafter = (
            None
            if exits is None
            else Drafter(
                self._depth,
                exits,
                vocab_size=adapter.vocab_size,
                audit_share=audit_share,
                captured=captured_drafts,
            )
        )

    def during(self, meanwhile: Callable[[], None]) -> None:
        """What the next run shall do while the device works, or before it does. It must not raise."""
        self._meanwhile = meanwhile

    def waited(self) -> tuple[float, int] | None:
        """Seconds that the last run has waited for the device, and the cycles of each row that such a run may have;
        None unless all its rows were in one flight and the next one was on its way: only then do host and device work
        side by side."""
        return self._waited

    @property
    def cycles(self) -> CapturedCycles | None:
        """What runs whole cycles as graphs."""
        return self._cycles

    def cycles_ahead(self) -> int:
        """Cycles that may be begun for a row before it is known what the first of them gives it."""
        return 0 if self._cycles is None else self._cycles.cycles_ahead()

    @property
    def prompts(self) -> CapturedPrompts | None:
        """What runs prompts as graphs."""
        return self._prompts

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> StepResult:
        """One cycle of every row; more of one that talks, where the host is slow."""
        meanwhile, self._meanwhile = self._meanwhile, _nothing
        try:
            return self._run(batch, meanwhile)
        except Exception:
            self.forget()
            raise

    def forget(self) -> None:
        """Nothing of what was begun for later steps is of use any more."""
        for captured in (self._cycles, self._prompts):
            if captured is not None:
                captured.forget()

    def _run(self, batch: ScheduledBatch, meanwhile: Callable[[], None]) -> StepResult:
        rows = batch.rows
        self._waited = None
        started, others = self._start(rows, goes_on=batch.goes_on)
        meanwhile()
        results: dict[int, RowResult] = {}
        if others:  # while the device is busy
            results.update(zip(others, self._run_rows([rows[r] for r in others]), strict=True))
        for mine, running in started:
            results.update(zip(mine, running.results(), strict=True))
        if self._cycles is not None and self._cycles.runs_ahead and self._num_talking == len(rows):
            self._waited = self._cycles.waited_s, self._cycles.most_legs
        return StepResult(tuple(results[r] for r in range(len(rows))))

    def _start(self, rows: Sequence[RowStep], *, goes_on: bool) -> tuple[list[tuple[list[int], Started]], list[int]]:
        """What the device has begun to run, with its rows, and the rows that are left."""
        cycles, prompts = self._cycles, self._prompts
        talking: list[int] = []
        prompting: list[int] = []
        others: list[int] = []
        for r, row in enumerate(rows):
            if cycles is not None and cycles.takes(row):
                talking.append(r)
            elif prompts is not None and prompts.takes(row) and not (self._prompt_exits and row.policy.skips_layers):
                prompting.append(r)
            else:
                others.append(r)
        goes_on = goes_on and not others
        self._num_talking = len(talking)
        started = []
        to_prompt = [rows[r] for r in prompting]
        prompts = prompts if prompts is not None and (prompting or prompts.are_on_their_way) else None
        if prompts is not None:
            prompts.mark(to_prompt)  # blocks of rows that ended may be theirs now, and the other way round
        if cycles is not None and talking:
            started.append((talking, cycles.start([rows[r] for r in talking], goes_on=goes_on)))
        if prompts is not None:
            started.append((prompting, prompts.start(to_prompt, waits=not (goes_on and talking))))
        return started, others

    def _run_rows(self, steps: Sequence[RowStep]) -> list[RowResult]:
        """What rows may draft, all that is pending through the deep layers, and what comes of it."""
        rows = [RowCycle.begin(step, len(self.segments)) for step in steps]
        if self._drafter is not None:
            self._drafter.draft([row for row in rows if row.step.num_drafts])
            if self._prompt_exits:
                leave_prompt(rows, self._depth, self._drafter)
        deep = self._depth.run(rows, 0, len(self.segments))
        known = deep.captured or Captured(deep.states)
        normed = known.normed
        if self.exits is not None and any(row.tracked for row in rows) and not known.is_remembered:
            normed = self.adapter.norm(deep.states) if normed is None else normed
            self._remember(rows, deep, normed)
        return self._decide(rows, deep, normed, known)

    def _remember(self, rows: Sequence[RowCycle], deep: Ran, normed: torch.Tensor) -> None:
        """Deep states of this step's tokens, and the heads' K and V that follow from them."""
        assert self.exits is not None
        view = deep.view or self._depth.view(deep.parts)
        self.exits.remember(view, normed, deep.tapped)
        for index, checkpoint in enumerate(self.exits.checkpoints):
            if checkpoint.kv_layer < 0:
                continue
            mine = [
                (row, (first, first + len(states)))
                for row in rows
                if row.tracked
                for first, states in row.pieces[index]
            ]
            joined = _joined(mine)
            taken = [states for row in rows if row.tracked for _, states in row.pieces[index]]
            states = torch.cat(taken) if len(taken) > 1 else taken[0]
            same = view if joined == list(deep.parts) else self._depth.view(joined)
            self.exits.refresh(index, joined, same, states)

    def _decide(
        self, rows: Sequence[RowCycle], deep: Ran, normed: torch.Tensor | None, known: Captured
    ) -> list[RowResult]:
        """Full-depth logits where a row wants them, and the tokens that follow."""
        wanted = [_wanted(row, len(self.segments) - 1) for row in rows]
        if known.logits is not None:  # of every token, and every token was wanted
            return self._verifier.settle(rows, wanted, known.logits, known.best)
        states = deep.states if normed is None else normed
        if not any(wanted):
            empty = states.new_empty(0, self.adapter.vocab_size)
            return self._verifier.settle(rows, wanted, empty)
        flat = _flat_index(deep.parts)
        chosen = [flat[id(row), token] for row, tokens in zip(rows, wanted, strict=True) for token in tokens]
        if len(chosen) != len(states):
            states = states[torch.tensor(chosen, device=states.device)]
        if normed is None:
            states = self.adapter.norm(states)
        return self._verifier.settle(rows, wanted, self.adapter.head(states))


def _nothing() -> None:
    pass


def _wanted(row: RowCycle, last_segment: int) -> list[int]:
    """The tokens of a row whose full-depth logits decide something: those drafts follow, and the last."""
    drafted = [token for token in range(len(row.drafts)) if not row.skips(token, last_segment)]
    return [*drafted, len(row.tokens) - 1] if row.step.samples else drafted


def _flat_index(parts: Sequence[Part]) -> dict[tuple[int, int], int]:
    """Where in the flat states each token of each row stands; only the tokens that can be asked for."""
    index, end = {}, 0
    for row, (first, stop) in parts:
        oldest = max(first, stop - len(row.drafts) - 1)
        for token in range(oldest, stop):
            index[id(row), token] = end + token - first
        end += stop - first
    return index


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Parts of one row that follow one another as one part."""
    joined: list[Part] = []
    for row, (first, stop) in parts:
        if joined and joined[-1][0] is row and joined[-1][1][1] == first:
            joined[-1] = (row, (joined[-1][1][0], stop))
        else:
            joined.append((row, (first, stop)))
    return joined
