"""Shared by all parts: the model, the folder with the results so far, and the deadline of a call.

<state>/state.json   what the folder is for, seconds and memory of each phase, results of finished batch sizes
<state>/run          the calibration run, which resumes by itself
<state>/artefact     the published artefact
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.bars import Log
from benchmarks.common.prompts import PROMPT_FILE
from benchmarks.common.runs import Bench
from benchmarks.common.shapes import Shape, byte_tokenizer, make_model
from benchmarks.production.widen import widen
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.named_model import Loaded
from tide_core.disk import write_whole
from tide_core.models.identity import identify
from tide_core.models.loader import TORCH_DTYPES, load_model, load_tokenizer
from tide_core.models.resolver import resolve

GB = 1e9
ENGINE_S = 60.0
"""Seconds in which an engine starts on a GPU."""
TINY = Shape("tiny", 32, 48, 4, 4, 2, 257, 64, 48)
"""The small model of `--small`: every byte is a token."""
TINY_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class OutOfTime(BaseException):
    """The deadline of this call has passed, or the next piece of work does not fit before it. Not an error: results are
    kept, and the same command continues."""


class Deadline:
    """A limit on the time of a call, counted from construction."""

    def __init__(self, limit_s: float) -> None:
        self._ends_at = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._ends_at - time.monotonic()

    def check(self, what: str, needed_s: float = 0.0) -> None:
        """Raise OutOfTime unless `needed_s` seconds are left for `what`."""
        if self.left_s < needed_s or self.left_s <= 0:
            raise OutOfTime(f"{what} needs {needed_s:.0f} s, {max(0.0, self.left_s):.0f} s are left")


@dataclass(frozen=True)
class Target:
    """The model to measure."""

    model: str
    """`demo`, a folder, a .gguf file or a Hugging Face id; `tiny` is made, not loaded."""
    factor: int
    device: str
    dtype: str

    @property
    def name(self) -> str:
        base = self.model if re.fullmatch(r"[\w.-]+", self.model) else Path(self.model).name
        return base.removesuffix(".gguf")

    @property
    def key(self) -> str:
        """Of rows of the table: demo_x8."""
        return f"{re.sub('[^a-z0-9]+', '_', self.name.lower())}_x{self.factor}"

    def make(self) -> Loaded:
        dtype = TORCH_DTYPES[self.dtype]
        if self.model == TINY.name:
            model, tokenizer = make_model(TINY, torch.device(self.device), dtype), byte_tokenizer()
            tokenizer.chat_template = TINY_TEMPLATE
        else:
            resolved = resolve(self.model)
            model = load_model(resolved, dtype=self.dtype, device=self.device)
            tokenizer = load_tokenizer(resolved)
        name = self.name
        if self.factor > 1:
            model = widen(model, self.factor, device=self.device, dtype=dtype)
            name = f"{name} widened {self.factor} times"
        return Loaded(model, tokenizer, replace(identify(model, tokenizer, None), name=name), name)


@dataclass(frozen=True)
class Sizes:
    """Of the part `measure`."""

    batches: tuple[int, ...] = (1, 8, 32, 128)
    tokens: int = 128
    repeats: int = 3
    prompts: int = 24
    """Prompts of one row."""
    rounds: int = 7
    """Prompts of each row of a batch."""


class State:
    """The state file. It belongs to one model with one set of settings."""

    def __init__(self, folder: Path, purpose: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "state.json"
        self.values: dict[str, Any] = {"purpose": purpose, "phases": {}, "calibrated": None, "measured": {}}
        if self._path.exists():
            self.values = json.loads(self._path.read_text())
            before = self.values["purpose"]
            if before != purpose:
                changed = sorted(key for key in {**before, **purpose} if before.get(key) != purpose.get(key))
                what = ", ".join(f"{key} {before.get(key)!r}, now {purpose.get(key)!r}" for key in changed)
                raise SystemExit(f"benchmark: {folder} was made for other settings ({what}); name another --state")

    def save(self) -> None:
        write_whole(self._path, json.dumps(self.values, indent=1).encode())


class Phases:
    """Seconds and peaks of memory by phase, added up over all calls; saved in the state file after each phase."""

    def __init__(self, state: State, device: torch.device, log: Log) -> None:
        self._state, self._device, self._log = state, device, log
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # peaks can be reset from then on
        self.seconds = 0.0
        """Of all phases in this call."""

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        on_cuda = self._device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        began = time.perf_counter()
        try:
            yield
        finally:
            if on_cuda:
                torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - began
            self.seconds += seconds
            self.add(name, seconds, torch.cuda.max_memory_allocated(self._device) / GB if on_cuda else 0.0)

    def add(self, name: str, seconds: float, device_gb: float = 0.0) -> None:
        entry = self._state.values["phases"].setdefault(
            name, {"seconds": 0.0, "times": 0, "device_peak_gb": 0.0, "host_peak_gb": 0.0}
        )
        entry["seconds"] += seconds
        entry["times"] += 1
        entry["device_peak_gb"] = max(entry["device_peak_gb"], device_gb)
        entry["host_peak_gb"] = max(entry["host_peak_gb"], host_peak_gb())
        self._state.save()
        self._log(
            f"phase {name}: {seconds:.1f} s, peak of the device {device_gb:.2f} GB, "
            f"of the host until now {entry['host_peak_gb']:.2f} GB"
        )


def host_peak_gb() -> float:
    """Most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB


@dataclass
class Session:
    """One call of the command."""

    target: Target
    folder: Path
    calibration: CalibrationConfig
    deadline: Deadline
    log: Log
    sizes: Sizes = field(default_factory=Sizes)
    prompt_file: Path = PROMPT_FILE
    small: bool = False

    @functools.cached_property
    def state(self) -> State:
        """Raises SystemExit for a folder that was made for something else."""
        purpose = {"model": self.target.model, "factor": self.target.factor, "dtype": self.target.dtype}
        return State(self.folder, {**purpose, **self.calibration.to_mapping()})

    @functools.cached_property
    def phases(self) -> Phases:
        return Phases(self.state, torch.device(self.target.device), self.log)

    @functools.cached_property
    def loaded(self) -> Loaded:
        """Made on first use."""
        with self.phases.timed("model"):
            loaded = self.target.make()
        count = sum(weight.numel() for weight in loaded.model.parameters())
        self.log(f"model {loaded.name}: {count / 1e9:.3f} billion parameters, {self.target.dtype}")
        return loaded

    @property
    def artefact(self) -> Path:
        return self.folder / "artefact"

    @functools.cached_property
    def bench(self) -> Bench:
        """An engine with the published exits, started on first use. The engine takes over the model."""
        from benchmarks.production.measure import start_bench

        loaded = self.loaded
        self.deadline.check("starting the engine", ENGINE_S if loaded.model.device.type == "cuda" else 0.0)
        with self.phases.timed("engine"):
            return start_bench(self)

    def close(self) -> None:
        if "bench" in self.__dict__:
            self.bench.engine.close()
