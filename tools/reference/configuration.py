"""Generate the configuration reference from the settings classes."""

from __future__ import annotations

from collections.abc import Iterable

from deploy.calibration.settings import JobSettings, Workers
from deploy.config.args import AppArgs, Limits
from deploy.config.policy import LivePolicy
from tide_core.calibration.config import CalibrationConfig
from tide_core.config import EngineConfig
from tools.reference.markdown import NOTE, code, lines, table
from tools.reference.settings import Setting, of_dataclass, of_model


def settings_table(settings: Iterable[Setting]) -> str:
    parts: dict[str, list[Setting]] = {}
    for setting in settings:
        parts.setdefault(setting.group, []).append(setting)
    head = ("name", "type", "default", "allowed", "meaning")
    tables = []
    for group, members in parts.items():
        rows = [(code(one.name), one.type, one.default, one.allowed, one.text) for one in members]
        tables.append((f"**{group}**\n\n" if group else "") + table(head, rows))
    return "\n\n".join(tables)


def configuration() -> str:
    policy = of_model(
        LivePolicy,
        build=LivePolicy.read,
        context={"epsilon": {"mode": "bounded", "epsilon": -1.0}, "threshold": {"threshold": 3.0}},
    )
    job = of_model(JobSettings, context={"": {"name": "run", "storage": "/runs"}})
    parts = [
        "# Configuration reference",
        NOTE,
        lines(
            "The fields of each settings class, generated from the classes. Unknown keys are refused everywhere.",
            "[Serving](../serving.md#settings) and [upgrade and rollback](../upgrade.md) describe where to write them",
            "and the effect of a change; `tide check-config FILE` checks a Serve config.",
        ),
        "## The service",
        "### `args`\n\nOf the application in a Serve config. A change restarts the replicas.",
        settings_table(of_model(AppArgs)),
        "### `args.engine`",
        lines(
            "The same settings are keyword arguments of `tide_core.Engine`. `max_batch_tokens` must be at least",
            "`max_rows`, and `drafts` at most `max_pending`. In a Serve config `model` and `artefact` may also be",
            "[URLs](../kubernetes.md#object-stores), and `artefact` a",
            "[pointer](../upgrade.md#a-new-policy-or-artefact) to a published one.",
        ),
        settings_table(of_dataclass(EngineConfig)),
        "### Limits\n\n`args.limits`: limits of one request.",
        settings_table(of_model(Limits)),
        "### `user_config`",
        lines(
            "Of the deployment `TideServer`. Applies to new requests without a restart. `threshold` is for modes",
            "`verified`, `bounded` and `fast`, `epsilon` and `margin` for `bounded`. `tide status` shows a policy that",
            "replicas refuse, and why.",
        ),
        settings_table(policy),
        "## Calibration",
        "### The job file\n\n`deploy/calibrate.yaml`, for `python -m deploy.calibrate`.",
        settings_table(job),
        "### Workers\n\n`workers` of the job file.",
        settings_table(of_model(Workers)),
        "### `calibration`",
        "Of the job file, and `tide calibrate --set NAME=VALUE`. These and the model determine the artefact.",
        settings_table(of_dataclass(CalibrationConfig)),
    ]
    return "\n\n".join(parts) + "\n"
