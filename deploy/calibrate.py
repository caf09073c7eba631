"""The calibration job: the stages of `tide calibrate`, with workers on a Ray cluster.

ray job submit --working-dir . -- python -m deploy.calibrate --config deploy/calibrate.yaml

A killed job resumes when it is submitted again: the name identifies a run in the storage.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Annotated, Any

import ray
import typer

from deploy.calibration import storage
from deploy.calibration.executor import RayExecutor
from deploy.calibration.metrics import MeteredProgress
from deploy.calibration.settings import JobSettings, read_settings
from deploy.calibration.worker import SEEN, on_driver_node
from deploy.object_store import is_url, location
from deploy.published import Publication
from deploy.strict import yaml_file
from tide_core.calibration.ledger import LEDGER, check_output, locked
from tide_core.calibration.progress import Progress, default_progress
from tide_core.cli.calibrate import extra_settings
from tide_core.cli.exit_codes import with_exit_code
from tide_core.errors import ConfigError

NAMESPACE = "tide"
CLEAN_UP_S = 120.0
"""Time in which Ray ends the actors of a job whose driver was killed."""


@with_exit_code
def main(
    config: Annotated[Path, typer.Option(help="Settings of the run; see deploy/calibrate.yaml.")],
    name: Annotated[str | None, typer.Option(help="Of the run, in place of the config's.")] = None,
    storage: Annotated[str | None, typer.Option(help="Where runs are kept, in place of the config's.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the artefact, in place of the config's.")] = None,
    samples: Annotated[int | None, typer.Option(help="Most prompts or documents.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time for the whole run; training ends early if it must.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any calibration setting, as JSON.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Calibrate a model on a Ray cluster, or resume an interrupted run."""
    values = yaml_file.read(config)
    given = {"name": name, "storage": storage, "output": output}
    values |= {key: value for key, value in given.items() if value is not None}
    named = {"num_samples": samples, "minutes": minutes}
    extra = extra_settings(settings or []) | {key: value for key, value in named.items() if value is not None}
    if extra:
        values["calibration"] = {**(values.get("calibration") or {}), **extra}
    run(read_settings(values), default_progress(quiet=quiet))


def run(settings: JobSettings, progress: Progress) -> None:
    ray.init(namespace=NAMESPACE, log_to_driver=False)  # the cluster of the job, or of this machine
    progress = MeteredProgress(progress, settings.name)
    lease = _lease(settings, progress)
    with storage.open_run(settings.storage, settings.name) as files:
        output = files.folder / "artefact" if settings.output is None else Path(settings.output)
        if settings.output is not None:
            files.pull([LEDGER])
            check_output(output, files.folder, force=settings.force)
        with locked(files.folder), RayExecutor(settings, progress) as executor:
            (files.folder / SEEN).touch()
            executor.start_workers()  # they import torch while this process does

            from tide_core.calibration.pipeline import Pipeline
            from tide_core.evaluation.speedup import time_exits

            result = Pipeline(settings.config, executor, files, progress).run(
                publish_to=output,
                model_name=executor.model_name,
                timer=time_exits if settings.measure else None,
            )
            print(*result.verdict, sep="\n")
            for each in result.workers:
                print(f"{each.name} on {each.node}: {each.num_items} pieces in {each.busy_s:.1f} s", end="")
                print(f", {each.num_restarts} restarts" if each.num_restarts else "")
            stays = is_url(settings.storage) and settings.output is None
            place = location(settings.storage, settings.name, "artefact") if stays else result.artefact
            print(f"artefact: {place} ({result.digest[:16]})", flush=True)
            if settings.publish is not None:
                pointer = Publication(settings.publish).publish(result.artefact, f"run {settings.name}")
                before = (pointer.previous or "nothing")[:16]
                print(f"published at {settings.publish}: {before} -> {pointer.digest[:16]}", flush=True)
    ray.kill(lease)


@ray.remote(num_cpus=0)
class _Lease:
    """A named actor that the job holds while it works on a run; Ray ends it with the job."""


def _lease(settings: JobSettings, progress: Progress) -> Any:
    what = hashlib.sha256(location(settings.storage, settings.name).encode()).hexdigest()[:16]
    ends_at, noted = time.monotonic() + CLEAN_UP_S, False
    while True:
        try:
            return _Lease.options(  # type: ignore[attr-defined]
                name=f"calibration-{what}", scheduling_strategy=on_driver_node()
            ).remote()  # the name is the lease: no need to wait until the actor runs
        except ValueError:
            if time.monotonic() > ends_at:
                raise ConfigError("run", settings.name, "one that no other job works on now") from None
            if not noted:
                progress.note(f"another job works on run {settings.name}, or did just now; waiting for its end")
            noted = True
            time.sleep(1.0)


if __name__ == "__main__":
    typer.run(main)
