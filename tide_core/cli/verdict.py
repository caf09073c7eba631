"""`tide verdict`: whether exits pay for a model on this machine, before it is deployed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tide_core.cli import console
from tide_core.cli.exit_codes import with_exit_code
from tide_core.cli.options import number_or_auto, numbers
from tide_core.cli.output import write
from tide_core.config import AUTO, DEVICES, DTYPE_CHOICES, LEAST_AUTO_ROWS, EngineConfig

if TYPE_CHECKING:
    from tide_core.evaluation.verdict import Verdict

SETTINGS = EngineConfig()
MAX_ROWS = 4096


@with_exit_code
def verdict(
    model: Annotated[str, typer.Option(help="demo, a folder, a .gguf file or a Hugging Face id.")] = SETTINGS.model,
    artefact: Annotated[str, typer.Option(help="Folder of the calibrated exits.")] = SETTINGS.artefact,
    rows: Annotated[str, typer.Option(metavar="COUNTS", help="Concurrent requests, as in 1,8,32.")] = "1,8,32",
    context: Annotated[
        int | None, typer.Option(help="Context tokens of each row; default: what the engine plans with.")
    ] = None,
    kv_memory_gib: Annotated[str, typer.Option(help="Memory of the KV block pool; or auto.")] = str(
        SETTINGS.kv_memory_gib
    ),
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="With auto: share of the GPU's memory for the engine.")
    ] = SETTINGS.gpu_memory_utilization,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPE_CHOICES)}.")] = SETTINGS.dtype,
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}.")] = SETTINGS.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more to standard error.")] = False,
) -> None:
    """Measure steps and cycles on this machine and predict for each number of rows whether exits pay.

    The prediction is the plan that the engine itself would make, from the measured times and the calibrated
    acceptance. At the engine's default context the measured table is stored for its next start.
    """
    console.prepare(verbose=verbose)
    expected = f"integers in 1..{MAX_ROWS} with commas between them, as in 1,8,32"
    counts = sorted(set(numbers("--rows", rows, int, expected, (1, MAX_ROWS))))
    config = EngineConfig(
        model=model,
        artefact=artefact,
        kv_memory_gib=number_or_auto("kv_memory_gib", kv_memory_gib),
        gpu_memory_utilization=gpu_memory_utilization,
        artefact_swap=False,
        dtype=dtype,
        device=device,
        num_threads=threads,
        max_rows=AUTO if max(counts) <= LEAST_AUTO_ROWS else max(counts),
    )
    with console.status(f"loading {model} and measuring", quiet=quiet):
        from tide_core.evaluation.verdict import decide  # torch comes with it

        found = decide(config, counts, context=context)
    write(json.dumps(found.as_dict(), indent=2, allow_nan=False) + "\n" if as_json else _as_text(found))


def _as_text(found: Verdict) -> str:
    where = f"{found.dtype} on {found.device}, {found.kernels} kernels, context {found.context}"
    lines = [
        f"{found.model}, artefact {found.artefact[:16]}, {where}",
        "rows   full ms/step   drafts   predicted speed-up   verdict",
    ]
    for row in found.rows:
        full = "-" if row.full_ms is None else f"{row.full_ms:.2f}"
        lines.append(f"{row.rows:>4}   {full:>12}   {row.drafts:>6}   {row.speedup:>18.2f}   {row.text}")
    paying = [str(row.rows) for row in found.rows if row.pays]
    if paying:
        lines.append(f"exits pay with {', '.join(paying)} rows on this machine")
    else:
        lines.append("exits do not pay on this machine: serve it in `full`")
    return "".join(line + "\n" for line in lines)
