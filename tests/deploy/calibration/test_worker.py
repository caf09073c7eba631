"""A worker loads the model of the settings and opens the run; errors name which of the two is wrong."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deploy.calibration import worker
from deploy.calibration.events import Note, TaskDone
from deploy.calibration.settings import JobSettings, read_settings
from deploy.calibration.storage import RemoteRunFiles
from deploy.calibration.worker import SEEN, load_context
from tests.calibration.tiny_runs import tiny_calibration
from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.calibration import named_model
from tide_core.calibration.train.process_group import SINGLE_PROCESS, SingleProcess
from tide_core.errors import ConfigError
from tide_core.models.identity import identify

Worker = worker.Worker.__ray_metadata__.modified_class


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How models were loaded, and how many threads were asked for."""
    seen: list[Any] = []
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    identity = identify(model, tokenizer, None)

    def load(name: str, **how: Any) -> Any:
        seen.append((name, how))
        return SimpleNamespace(model=model, tokenizer=tokenizer, identity=identity, name="called so")

    monkeypatch.setattr(named_model, "load", load)
    monkeypatch.setattr(named_model, "use_threads", seen.append)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    return seen


def settings(storage: str, model: str = "mine") -> JobSettings:
    workers = {"num_cpus": 2.0, "threads": 3}
    calibration = tiny_calibration(data="self").to_mapping()
    asked = {
        "name": "run",
        "storage": storage,
        "model": model,
        "dtype": "float32",
        "device": "cpu",
        "quantization": "fp8",
    }
    return read_settings({**asked, "workers": workers, "calibration": calibration})


def test_a_node_that_does_not_see_the_folder_of_the_run_fails_before_it_loads_anything(
    tmp_path: Path, asked: list[Any]
) -> None:
    (tmp_path / "run").mkdir()  # as on another disk of the same name
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.7 does not see run run"):
        Worker(settings(str(tmp_path))).load()
    assert asked == []


def test_the_model_is_loaded_with_the_settings_and_the_node_is_reported(tmp_path: Path, asked: list[Any]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / SEEN).touch()
    ready = Worker(settings(str(tmp_path))).load()
    assert asked == [("mine", {"dtype": "float32", "device": "cpu", "quantization": "fp8", "threads": 3})]
    assert (ready.model_name, ready.node, ready.model_info.identity.num_layers) == ("called so", "10.0.0.7", 4)
    with contextlib.ExitStack() as stack:
        context, _ = load_context(settings(str(tmp_path)), stack)
        assert context.files.folder == tmp_path / "run"
        assert context.config == settings(str(tmp_path)).config
        assert context.group is SINGLE_PROCESS
        group = SingleProcess()
        assert load_context(settings(str(tmp_path)), stack, group)[0].group is group


def test_a_model_at_a_url_is_downloaded_and_loaded_from_there(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "local_model", lambda model: f"the copy of {model}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / SEEN).touch()
    with contextlib.ExitStack() as stack:
        load_context(settings(str(tmp_path), model="s3://bucket/models/mine"), stack)
    assert asked[0][0] == "the copy of s3://bucket/models/mine"


def test_a_worker_of_a_store_has_a_folder_of_its_own_and_leaves_none(tmp_path: Path, asked: list[Any]) -> None:
    made = Worker(settings(f"file://{tmp_path}"))
    made.load()
    files = made._context.files
    assert isinstance(files, RemoteRunFiles)
    assert files.folder.is_dir()
    made.close()
    assert not files.folder.exists()


def test_a_task_gets_the_context_and_the_threads_of_the_settings(tmp_path: Path, asked: list[Any]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / SEEN).touch()
    made = Worker(settings(str(tmp_path)))
    made.load()
    asked.clear()

    def work(context: Any, item: str, progress: Any) -> str:
        assert asked == [3]
        progress.note("at it")
        return f"{item} of {context.identity.architecture}"

    noted, done = made.run(work, "item")
    assert noted == Note("at it")
    assert isinstance(done, TaskDone)
    assert done.result == "item of LlamaForCausalLM"
