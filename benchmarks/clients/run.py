"""Runs the checks of each client in a process of its own, since clients bring pins, threads and settings with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.clients import guidellm_load, langchain_chat, litellm_sdk, lm_eval_tasks, openai_sdk
from benchmarks.clients.features import FEATURES, Checks, Service
from benchmarks.common import ROOT

CLIENTS: Mapping[str, Checks] = {
    checks.distribution: checks
    for checks in (
        openai_sdk.check,
        langchain_chat.check,
        litellm_sdk.check,
        lm_eval_tasks.check,
        guidellm_load.check,
    )
}
"""Every check there is: by client, then by feature."""
FOLDER = ROOT / "build" / "clients"
"""What `make clients` installs. It comes last on the path, so that our pinned packages go first."""
LIMIT_S = 540
"""Bounds a hang."""


@dataclass(frozen=True)
class Outcome:
    passed: bool
    remark: str = ""
    """A score, or the error."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """What one client got. Without a version it is not installed."""

    version: str | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def run_client(client: str, at: Service) -> Result:
    """The outcome of every check of a client. A check that its process did not reach has failed."""
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        out = Path(folder) / "outcomes"
        out.touch()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        command = [sys.executable, "-m", "benchmarks.clients.run", client, at.url, at.model, str(out)]
        with (Path(folder) / "log").open("w+b") as log:
            try:
                subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=LIMIT_S)
                end = "its process ended early"
            except subprocess.TimeoutExpired:
                end = f"not done in {LIMIT_S} s"
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        if not lines:
            raise RuntimeError(f"{client}: {(Path(folder) / 'log').read_text(errors='replace')[-4000:]}")
    found, *rest = lines
    if found["version"] is None:
        return Result()
    outcomes = {line.pop("feature"): Outcome(**line) for line in rest}
    return Result(
        found["version"], {name: outcomes.get(name, Outcome(False, end)) for name in CLIENTS[client].by_feature}
    )


def _run_here(client: str, at: Service, out: Path) -> None:
    """The checks of a client in this process, which write their outcomes to a file as they end."""
    sys.path.append(str(FOLDER))
    checks = CLIENTS[client]
    with out.open("a", buffering=1) as lines:
        try:
            lines.write(json.dumps({"version": version(checks.distribution)}) + "\n")
        except PackageNotFoundError:
            lines.write(json.dumps({"version": None}) + "\n")
            return
        for feature in (name for name in FEATURES if name in checks.by_feature):
            started = time.monotonic()
            try:
                outcome = Outcome(True, str(checks.by_feature[feature](at) or ""))
            except Exception as error:
                outcome = Outcome(False, f"{type(error).__name__}: {error}"[:2000])
            took = {"feature": feature, **asdict(outcome), "seconds": round(time.monotonic() - started, 2)}
            lines.write(json.dumps(took) + "\n")


if __name__ == "__main__":
    name, url, model, file = sys.argv[1:]
    _run_here(name, Service(url, model), Path(file))
