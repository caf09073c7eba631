"""A scheduled batch in, one result per row out.

`ModelRunner.start` launches what runs as CUDA graphs: decoding rows as a cycle (`graphs/cycle.py`), prompts as a prompt
pass (`graphs/prompts.py`). All other rows take the plain path, in `RunningStep.wait`: draft, run deep, write exit
state, verify.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tide_core.batch import RowResult, RowStep, ScheduledBatch, StepResult
from tide_core.execution.depth_loop import DepthLoop, Ran
from tide_core.execution.drafting import Drafter
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.in_flight import Launched
from tide_core.execution.graphs.prompts import GraphPrompts
from tide_core.execution.prompt_logprobs import with_prompt_logprobs
from tide_core.exits.propose import Exits
from tide_core.exits.row_cycle import Part, RowCycle
from tide_core.exits.verify import Verifier
from tide_core.kernels import Kernels
from tide_core.kv.cache import PagedKV
from tide_core.models.adapter import ModelAdapter


class ModelRunner:
    """Holds the model, its KV pool and its exits, and the graphs where there are any."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: PagedKV,
        kernels: Kernels,
        segments: tuple[range, ...],
        *,
        exits: Exits | None = None,
        prompt_exits: bool = False,
        cycles: GraphCycles | None = None,
        prompts: GraphPrompts | None = None,
    ) -> None:
        """Rows that `cycles` or `prompts` support run there, the others on the plain path."""
        self.adapter = adapter
        self.cache = cache
        self.kernels = kernels
        self.segments = segments
        self.exits = exits
        self.cycles, self.prompts = cycles, prompts
        taps, skip_maps = ((), ()) if exits is None else (exits.taps, exits.skip_maps)
        self._depth = DepthLoop(adapter, cache, kernels, segments, taps, skip_maps)
        self._prompt_exits = prompt_exits
        self._verifier = Verifier([segment.stop for segment in segments[:-1]], adapter.num_layers)
        self._drafter = None
        if exits is not None:
            self._drafter = Drafter(self._depth, exits, vocab_size=adapter.vocab_size)

    @torch.inference_mode()
    def start(self, batch: ScheduledBatch) -> RunningStep:
        """Launch the step's graphs; what they do not support runs when the step is waited for."""
        try:
            return self._start(batch)
        except Exception:
            self.discard_lookahead()
            raise

    def run(self, batch: ScheduledBatch) -> StepResult:
        return self.start(batch).wait()

    def lookahead_steps(self) -> int:
        """Steps that may be launched for a row before the result of the current one is read; 0 for none."""
        return 0 if self.cycles is None else self.cycles.lookahead_steps()

    def discard_lookahead(self) -> None:
        """Drop what was launched for later steps."""
        for graphs in (self.cycles, self.prompts):
            if graphs is not None:
                graphs.discard_lookahead()

    def _start(self, batch: ScheduledBatch) -> RunningStep:
        rows, cycles, prompts = batch.rows, self.cycles, self.prompts
        decoding: list[int] = []
        prompting: list[int] = []
        plain: list[int] = []
        for index, row in enumerate(rows):
            if cycles is not None and cycles.supports(row):
                decoding.append(index)
            elif prompts is not None and prompts.supports(row) and not (self._prompt_exits and row.policy.skips_layers):
                prompting.append(index)
            else:
                plain.append(index)
        lookahead = batch.allows_lookahead and not plain
        launched: list[tuple[list[int], Launched]] = []
        to_prompt = [rows[index] for index in prompting]
        prompts = prompts if prompts is not None and (prompting or prompts.in_flight) else None
        if prompts is not None:
            prompts.order_after(to_prompt)  # blocks of rows that ended may be theirs now, and the other way round
        if cycles is not None and decoding:
            launched.append((decoding, cycles.start([rows[index] for index in decoding], lookahead=lookahead)))
        if prompts is not None:
            launched.append((prompting, prompts.start(to_prompt, waits=not (lookahead and decoding))))
        timed = cycles if len(decoding) == len(rows) else None
        return RunningStep(self, rows, launched, plain, timed)

    def run_plain(self, steps: Sequence[RowStep]) -> list[RowResult]:
        """The plain path: drafts, one deep pass over all that is pending, exit state, verification."""
        rows = [RowCycle.begin(step, len(self.segments)) for step in steps]
        if self._drafter is not None:
            self._drafter.draft([row for row in rows if row.step.num_drafts and not row.has_suffix_drafts])
            if self._prompt_exits:
                self._drafter.exit_prompts(rows)
        deep = self._depth.run(rows, 0, len(self.segments))
        normed = None
        if self.exits is not None and any(row.tracked for row in rows):
            normed = self.adapter.norm(deep.states)
            self._write_exit_state(rows, deep, normed)
        results = self._verify(rows, deep, normed)
        if any(step.scores_prompt for step in steps):
            return with_prompt_logprobs(self.adapter, rows, results, deep, normed)
        return results

    def _write_exit_state(self, rows: Sequence[RowCycle], deep: Ran, normed: torch.Tensor) -> None:
        """Deep states of this step's tokens, and the heads' K and V that follow from them."""
        assert self.exits is not None
        view = deep.view or self._depth.view(deep.parts)
        self.exits.write_deep_states(view, normed, deep.tapped)
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
            self.exits.write_head_kv(index, joined, same, states)

    def _verify(self, rows: Sequence[RowCycle], deep: Ran, normed: torch.Tensor | None) -> list[RowResult]:
        """Full-depth logits where a row needs them, and the tokens that follow."""
        wanted = [_wanted(row, len(self.segments) - 1) for row in rows]
        states = deep.states if normed is None else normed
        if not any(wanted):
            return self._verifier.verify(rows, wanted, states.new_empty(0, self.adapter.vocab_size))
        flat = _flat_index(deep.parts)
        chosen = [flat[id(row), token] for row, tokens in zip(rows, wanted, strict=True) for token in tokens]
        if len(chosen) != len(states):
            states = states[torch.tensor(chosen, device=states.device)]
        if normed is None:
            states = self.adapter.norm(states)
        return self._verifier.verify(rows, wanted, self.adapter.head(states))


class RunningStep:
    """A started step: launched graphs, and rows that are left to the plain path."""

    def __init__(
        self,
        runner: ModelRunner,
        rows: Sequence[RowStep],
        launched: list[tuple[list[int], Launched]],
        plain: list[int],
        timed: GraphCycles | None,
    ) -> None:
        """`timed`: the cycles that run all rows, which know how long the host waited for them."""
        self._runner, self._rows, self._launched, self._plain, self._timed = runner, rows, launched, plain, timed

    @torch.inference_mode()
    def wait(self) -> StepResult:
        """Run the rest and read the device. What fails drops the lookahead too."""
        try:
            results: dict[int, RowResult] = {}
            if self._plain:  # while the device is busy
                mine = self._runner.run_plain([self._rows[index] for index in self._plain])
                results.update(zip(self._plain, mine, strict=True))
            for indices, launched in self._launched:
                results.update(zip(indices, launched.results(), strict=True))
        except Exception:
            self._runner.discard_lookahead()
            raise
        timing = None if self._timed is None else self._timed.timing()
        return StepResult(tuple(results[index] for index in range(len(self._rows))), timing)


def _wanted(row: RowCycle, last_segment: int) -> list[int]:
    """The tokens of a row whose full-depth logits decide something: those that drafts follow, and the last."""
    drafted = [token for token in range(len(row.drafts)) if not row.skips(token, last_segment)]
    return [*drafted, len(row.tokens) - 1] if row.step.samples else drafted


def _flat_index(parts: Sequence[Part]) -> dict[tuple[int, int], int]:
    """Index of each row's tokens in the flat states, for tokens that can be wanted."""
    index, end = {}, 0
    for row, (first, stop) in parts:
        oldest = max(first, stop - len(row.drafts) - 1)
        for token in range(oldest, stop):
            index[id(row), token] = end + token - first
        end += stop - first
    return index


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Adjacent parts of one row as one part."""
    joined: list[Part] = []
    for row, (first, stop) in parts:
        if joined and joined[-1][0] is row and joined[-1][1][1] == first:
            joined[-1] = (row, (joined[-1][1][0], stop))
        else:
            joined.append((row, (first, stop)))
    return joined
