"""The generated references match the code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from deploy.calibration.settings import JobSettings, Workers
from deploy.config.args import AppArgs, Limits
from deploy.config.policy import LivePolicy
from tests.docs.documents import ROOT
from tide_core.calibration.config import CalibrationConfig
from tide_core.config import EngineConfig
from tide_core.errors import ConfigError
from tools import reference_docs as tool
from tools.reference.families import compared_variants, families
from tools.reference.markdown import between, table
from tools.reference.schema import SCHEMA, schema
from tools.reference.settings import documented, of_dataclass, of_model


def test_the_references_are_current() -> None:
    assert tool.stale(tool.pages()) == [], f"run {tool.COMMAND}, or make docs"


def test_check_fails_and_writes_nothing_where_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("old", encoding="utf-8")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "pages", lambda: {page: "new"})
    assert tool.main(["--check"]) == 1
    assert page.read_text(encoding="utf-8") == "old"
    assert "page.md: not current" in capsys.readouterr().out
    assert tool.main([]) == 0
    assert page.read_text(encoding="utf-8") == "new"
    assert tool.main(["--check"]) == 0


@pytest.mark.parametrize("owner", [AppArgs, EngineConfig, Limits, LivePolicy, JobSettings, Workers, CalibrationConfig])
def test_every_setting_is_explained_under_its_field(owner: type) -> None:
    assert [name for name, (_, text, _) in documented(owner).items() if not text and name != "model_config"] == []


def test_the_texts_of_a_class_are_those_under_its_fields_and_the_groups_those_of_its_comments() -> None:
    @dataclass
    class Some:
        a: int = 1
        """Of a,
        on two lines."""

        # second
        b: str | None = None

    assert documented(Some) == {
        "a": ("int", "Of a,\non two lines.", ""),
        "b": ("str | None", "", "second"),
    }


def test_allowed_values_are_those_of_the_refusal() -> None:
    settings = {one.name: one for one in of_dataclass(EngineConfig)}
    with pytest.raises(ConfigError) as refused:
        EngineConfig(block_size=0)
    assert settings["block_size"].allowed == refused.value.expected
    assert settings["dtype"].allowed == "one of auto, float32, float16, bfloat16"


def test_limits_of_pydantic_fields_are_written_in_words() -> None:
    class Some(BaseModel):
        count: int = Field(default=2, ge=1, lt=9)
        name: str = Field(pattern="^a+$", max_length=3)

    [count, name] = of_model(Some)
    assert (count.default, count.allowed) == ("`2`", "at least 1; below 9")
    assert name.default == "**required**"
    assert set(name.allowed.split("; ")) == {"matches `^a+$`", "at most 3 long"}


def test_every_message_and_method_of_the_schema_is_in_its_reference() -> None:
    text = (ROOT / "docs" / "reference" / "grpc.md").read_text(encoding="utf-8")
    compiled = schema(ROOT / "protos", SCHEMA)
    for message in compiled.message_type:
        assert f"### {message.name}\n" in text
    for method in compiled.service[0].method:
        assert f"| `{method.name}` |" in text
    assert "map of int32 to double" in text
    assert "stream of [GenerateChunk](#generatechunk)" in text


def test_every_family_that_runs_has_a_variant_that_was_compared() -> None:
    from tide_core.models.families import FAMILIES

    source = (ROOT / "tests" / "tiny_models.py").read_text(encoding="utf-8")
    assert set(compared_variants(source)) == set(FAMILIES)
    assert "|  |" not in families()


def test_a_bar_in_a_text_does_not_end_its_cell() -> None:
    assert table(("a", "b"), [("x | y", "one\ntwo")]).splitlines()[-1] == "| x \\| y | one two |"


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(SystemExit):
        between("text", "<!-- a -->", "<!-- b -->", "inside")
