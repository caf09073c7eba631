"""Running requests without an engine."""

from __future__ import annotations

from typing import Any

from deploy.answer import Answer
from deploy.keys import Caller
from tide_core.request import SamplingParams


def make_answer(*, mode: str = "verified", **values: Any) -> Answer:
    known = {
        "request_id": "mine",
        "engine_id": "ours",
        "caller": Caller(),
        "params": SamplingParams(mode=mode),
        "prompt": "secret words",
        "timeout_s": 10.0,
        "artefact": None,
    }
    return Answer(**{**known, **values})
