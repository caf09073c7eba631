"""The service over an engine that takes its time, so that streams of a tiny model last, at hardly any cost. It takes no
step while a file exists that an environment variable names."""

# No `from __future__ import annotations` here: Serve reads the class of `build_app`'s argument from its annotation.

import os
import time
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve import Application

from deploy.app import TideServer
from deploy.config.args import AppArgs

STEP_VARIABLE, HOLD_VARIABLE = "TIDE_TEST_STEP_S", "TIDE_TEST_HOLD_FILE"
STEP_S = float(os.environ.get(STEP_VARIABLE, "0.15"))
[_Server, *_] = TideServer.func_or_class.__bases__  # type: ignore[attr-defined]  # as it was before Serve wrapped it


@serve.deployment(name="TideServer")
@serve.ingress()
class PacedServer(_Server):  # type: ignore[misc, valid-type]
    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__(args)
        core = self.service.engine._parts.core
        step = core.advance

        def late(deliver: Callable[[list[Any]], None]) -> None:
            time.sleep(STEP_S)
            while os.path.exists(os.environ.get(HOLD_VARIABLE, "")):
                time.sleep(0.01)
            step(deliver)

        core.advance = late


def build_app(args: AppArgs) -> Application:
    return PacedServer.bind(args.model_dump())  # type: ignore[attr-defined]
