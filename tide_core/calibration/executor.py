"""Where the stages of a calibration run: in this process, or on workers elsewhere.

The pipeline plans, keeps the ledger and never runs the model. It hands functions of `stages.py` to an executor, which
calls each with a `StageContext`: one loaded model and the files of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tide_core.calibration.collect.generation import Generator
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.encode import Lengths, PromptEncoder
from tide_core.calibration.ledger import RunFiles, WorkerTime
from tide_core.calibration.progress import Progress, SilentProgress
from tide_core.calibration.train.process_group import SINGLE_PROCESS, ProcessGroup
from tide_core.identity import ModelIdentity
from tide_core.models.adapter import ModelAdapter

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the pipeline needs to know about the model."""

    identity: ModelIdentity
    device: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    generation_batch: int


class StageContext:
    """A loaded model and the files of one run. The result of a task depends on its item and these files alone."""

    def __init__(
        self,
        config: CalibrationConfig,
        model: Any,
        tokenizer: Any,
        identity: ModelIdentity,
        files: RunFiles,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.config, self.tokenizer, self.identity, self.files = config, tokenizer, identity, files
        self.group = group
        """The processes that train together."""
        self.adapter = ModelAdapter(model, paged=False)
        config.checkpoints_for(self.adapter.num_layers)  # raises before any work
        eos_ids = self.adapter.eos_ids
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(eos_ids), 0)
        self.generator = Generator(self.adapter, pad_id=pad_id, batch=config.generation_batch)
        self.lengths = Lengths.of(config, self.adapter.max_positions)
        self.encoder = PromptEncoder(tokenizer, self.lengths.prompt)

    @property
    def model_info(self) -> ModelInfo:
        adapter = self.adapter
        return ModelInfo(
            identity=self.identity,
            device=adapter.device.type,
            vocab_size=adapter.vocab_size,
            eos_ids=adapter.eos_ids,
            generation_batch=self.generator.batch,
        )


Task = Callable[[StageContext, Item, Progress], Result]
IsOver = Callable[[], bool]


class Executor(Protocol):
    """Runs tasks. A task whose worker is lost runs again on another worker."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def num_restarts(self) -> int:
        """How many workers were lost and replaced."""

    def map_unordered(
        self, task: Task[Item, Result], items: Sequence[Item], is_over: IsOver = lambda: False
    ) -> Iterator[tuple[Item, Result]]:
        """Every item once, in any order, with its result as soon as it is complete. At least one item runs, and none
        begins once `is_over` has returned true after that."""

    def train(self, task: Task[Item, Result], item: Item, progress: Progress) -> Result:
        """One item, on all processes that train together."""

    def run(self, task: Task[Item, Result], item: Item, progress: Progress) -> Result:
        """One item on one worker."""

    def worker_times(self) -> Sequence[WorkerTime]:
        """The work of each worker; none if there is only this process."""


class LocalExecutor:
    """Runs every task in this process."""

    def __init__(self, context: StageContext) -> None:
        self._context = context

    @property
    def model_info(self) -> ModelInfo:
        return self._context.model_info

    @property
    def num_restarts(self) -> int:
        return 0

    def map_unordered(
        self, task: Task[Item, Result], items: Sequence[Item], is_over: IsOver = lambda: False
    ) -> Iterator[tuple[Item, Result]]:
        for number, item in enumerate(items):
            if number and is_over():
                return
            yield item, task(self._context, item, SilentProgress())

    def train(self, task: Task[Item, Result], item: Item, progress: Progress) -> Result:
        return task(self._context, item, progress)

    def run(self, task: Task[Item, Result], item: Item, progress: Progress) -> Result:
        return task(self._context, item, progress)

    def worker_times(self) -> Sequence[WorkerTime]:
        return ()
