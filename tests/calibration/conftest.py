"""What the tests of calibration share."""

import copy
from typing import Any

import pytest

from tests.tiny_models import tiny_model


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny_model("llama"))
