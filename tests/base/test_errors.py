from __future__ import annotations

import pickle

import pytest

from tide_core.errors import (
    ConfigError,
    EngineBusyError,
    EngineDeadError,
    EngineError,
    FieldError,
    ModelError,
    RequestError,
    TideError,
)

pytestmark = pytest.mark.unit

ERRORS = [
    ConfigError("dtype", "int8", "one of float32, float16"),
    RequestError("temperature", float("inf"), "a finite number"),
    RequestError("prompt", list(range(10_000)), "fewer tokens"),
    RequestError("logit_bias", {1: 2.0}, "ids of the vocabulary"),
    ModelError("model", "x" * 5000, "a folder"),
    EngineError("numerical_error"),
    EngineBusyError("full"),
    EngineDeadError("gone"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_with_type_fields_and_text(error: TideError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.args == error.args
    assert str(again) == str(error)


def test_a_field_error_names_field_value_and_what_was_expected() -> None:
    error = RequestError("top_p", 1.5, "a number up to 1")
    assert (error.field, error.value, error.expected) == ("top_p", 1.5, "a number up to 1")
    assert str(error) == "top_p: got 1.5, expected a number up to 1"


@pytest.mark.parametrize(
    "value",
    ["y" * 10**6, list(range(10**5)), {i: i for i in range(1000)}, 10**5000, ["y" * 1000]],
    ids=["text", "list", "mapping", "integer", "list_of_text"],
)
def test_a_huge_value_is_summarised_not_repeated(value: object) -> None:
    assert len(str(RequestError("field", value, "less"))) < 200


def test_client_errors_and_engine_errors_can_be_told_apart_by_type() -> None:
    assert issubclass(RequestError, FieldError)
    assert not issubclass(RequestError, EngineError)
    assert issubclass(EngineDeadError, EngineError)


def test_what_is_too_long_is_cut_and_of_a_path_the_end_stays() -> None:
    path = f"/{'folder/' * 30}config.yaml"
    error = ConfigError("config", path, "a file")
    assert "folder/config.yaml'" in str(error)
    assert len(str(error)) < 130
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(ConfigError("note", "word " * 40, "less")).startswith("note: got 'word word word ")
    assert "…'" in str(ConfigError("note", "word " * 40, "less"))
