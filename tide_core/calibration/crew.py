"""Who does the work of a calibration that needs the model: this process alone, or workers elsewhere.

The pipeline plans, keeps the ledger and never touches the model. Each piece of work is a function of `work.py`, done in
a workshop: one loaded model beside the files of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tide_core.calibration.collect.generation import Generator
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.encode import PromptEncoder
from tide_core.calibration.data.lengths import Lengths
from tide_core.calibration.files import RunFiles
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.calibration.train.group import ALONE, Group
from tide_core.calibration.worker_time import WorkerTime
from tide_core.identity import ModelIdentity
from tide_core.models.adapter import ModelAdapter

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the pipeline must know of the model."""

    identity: ModelIdentity
    device: str
    num_layers: int
    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]
    generation_batch: int


class Workshop:
    """A loaded model at work on one run. What is done here must depend on its item and the run's files alone."""

    def __init__(
        self,
        config: CalibrationConfig,
        model: Any,
        tokenizer: Any,
        identity: ModelIdentity,
        files: RunFiles,
        group: Group = ALONE,
    ) -> None:
        self.config, self.tokenizer, self.identity, self.files = config, tokenizer, identity, files
        self.group = group
        """Those who train together."""
        self.adapter = ModelAdapter(model, paged=False)
        config.checkpoints_for(self.adapter.num_layers)  # refused before any work
        eos_ids = self.adapter.eos_ids
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(eos_ids), 0)
        self.generator = Generator(self.adapter, pad_id=pad_id, batch=config.generation_batch)
        self.lengths = Lengths.of(config, self.adapter.max_positions)
        self.encoder = PromptEncoder(tokenizer, self.lengths.prompt)

    @property
    def facts(self) -> ModelFacts:
        adapter = self.adapter
        return ModelFacts(
            identity=self.identity,
            device=adapter.device.type,
            num_layers=adapter.num_layers,
            vocab_size=adapter.vocab_size,
            max_positions=adapter.max_positions,
            eos_ids=adapter.eos_ids,
            generation_batch=self.generator.batch,
        )


Work = Callable[[Workshop, Item, Progress], Result]


class Crew(Protocol):
    """Whoever has workshops. What a worker cannot do for a reason of its own is done again by another one."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def num_restarts(self) -> int:
        """How often somebody was lost and replaced."""

    def each(self, work: Work[Item, Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        """Every item once, in any order, with its result as soon as it is there."""

    def train(self, work: Work[Item, Result], item: Item, progress: Progress) -> Result:
        """One item, by several at once where there are several who train together."""

    def once(self, work: Work[Item, Result], item: Item, progress: Progress) -> Result:
        """One item."""

    def times(self) -> Sequence[WorkerTime]:
        """Who has done how much; none where there is but one."""


class Solo:
    """The crew of one workshop, in this process."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    @property
    def facts(self) -> ModelFacts:
        return self._workshop.facts

    @property
    def num_restarts(self) -> int:
        return 0

    def each(self, work: Work[Item, Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        for item in items:
            yield item, work(self._workshop, item, SilentProgress())

    def train(self, work: Work[Item, Result], item: Item, progress: Progress) -> Result:
        return work(self._workshop, item, progress)

    def once(self, work: Work[Item, Result], item: Item, progress: Progress) -> Result:
        return work(self._workshop, item, progress)

    def times(self) -> Sequence[WorkerTime]:
        return ()
