"""`tide eval`: what every mode costs and how often it disagrees with full depth, over a file of prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_core.cli import console, prompts
from tide_core.cli.exit_codes import with_exit_code
from tide_core.cli.options import numbers
from tide_core.cli.output import write
from tide_core.config import AUTO, DEVICES, DTYPE_CHOICES, LEAST_AUTO_ROWS, EngineConfig
from tide_core.errors import ConfigError, RequestError
from tide_core.models.quick_start import quick_start
from tide_core.request import MAX_THRESHOLD

if TYPE_CHECKING:
    from tide_core.engine.assemble import Parts
    from tide_core.engine.engine import Engine
    from tide_core.evaluation.results import ContractResult

logger = logging.getLogger("tide.cli")

SETTINGS = EngineConfig()
MAX_BATCH = 1024


@with_exit_code
def evaluate(
    file: Annotated[
        Path,
        typer.Option(
            help='Prompts: one per line, or in a .jsonl file one {"prompt": …} or {"messages": […]} per line.'
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for eval.csv, eval.json and curve.png.")] = Path("eval"),
    model: Annotated[str, typer.Option(help="demo, a folder, a .gguf file or a Hugging Face id.")] = SETTINGS.model,
    artefact: Annotated[str, typer.Option(help="Folder of the calibrated exits.")] = SETTINGS.artefact,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts that are text into the chat template.")] = False,
    thresholds: Annotated[
        str, typer.Option(metavar="SCORES", help="Router scores to try in mode fast, next to the calibrated one.")
    ] = "0.5,0.7,0.9",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past the end-of-text token.")] = False,
    limit: Annotated[int | None, typer.Option(help="Use only the first N prompts.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts that run concurrently.")] = 1,
    drafts: Annotated[
        int | None, typer.Option(help="Drafts per cycle; default: as many as pay on this machine.")
    ] = SETTINGS.drafts,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPE_CHOICES)}.")] = SETTINGS.dtype,
    quantization: Annotated[
        str, typer.Option(help="auto, none or fp8, as for generate: an artefact fits the weights it was made with.")
    ] = SETTINGS.quantization,
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}.")] = SETTINGS.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more to standard error.")] = False,
) -> None:
    """Run a file of prompts greedily in every mode of the artefact, and compare each with full depth.

    Disagreement is counted token by token: the emitted answer is run through all layers, and each token is compared
    with the token that full depth chooses there. Speeds are ratios within this run; the modes alternate.
    """
    console.prepare(verbose=verbose)
    expected = f"router scores from 0 up to {MAX_THRESHOLD:g} with commas between them, as in 0.5,0.9"
    given = numbers("--thresholds", thresholds, float, expected, (0.0, MAX_THRESHOLD)) if thresholds.strip() else []
    if limit is not None and limit < 1:
        raise ConfigError("--limit", limit, "at least 1")
    if not 1 <= batch <= MAX_BATCH:
        raise ConfigError("--batch", batch, f"an integer in 1..{MAX_BATCH}")
    items = prompts.read_file(file, labels=("kind",))[:limit]
    config = EngineConfig(
        model=model,
        artefact=artefact,
        drafts=drafts,
        dtype=dtype,
        quantization=quantization,
        device=device,
        num_threads=threads,
        max_rows=AUTO if batch <= LEAST_AUTO_ROWS else batch,
        prefix_caching=False,  # no mode profits from the prompts of another
    )
    _make_folder(output)

    with console.status(f"loading {model}", quiet=quiet), quick_start():
        from tide_core.engine.assemble import assemble  # torch comes with it
        from tide_core.engine.engine import Engine
        from tide_core.evaluation.full_depth import FullDepth
        from tide_core.evaluation.measure import contracts_of
        from tide_core.evaluation.measure import evaluate as measure

        parts = assemble(config)
    num_layers = parts.runner.adapter.num_layers
    contracts = contracts_of(parts.checkpoints, num_layers, sorted(set(given)), parts.fast)
    with Engine.from_parts(parts) as engine:
        ids = _ids(engine, items, max_tokens, chat=chat)
        with console.progress(len(contracts) * -(-len(ids) // batch), quiet=quiet) as bar:
            results = measure(
                engine,
                FullDepth(parts.runner.adapter, parts.kernels),
                ids,
                contracts,
                num_layers=num_layers,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                batch_size=batch,
                on_done=bar.update,
            )
    values = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "batch": batch, "chat": chat, "file": file.name}
    _write_files(output, results, _conditions(parts) | values)


def _ids(engine: Engine, items: Sequence[prompts.PromptItem], max_tokens: int, *, chat: bool) -> list[tuple[int, ...]]:
    """Token ids of all prompts; an error names the line of its prompt."""
    from tide_core.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    ids = []
    for item in items:
        prompt = prompts.user_message(item.prompt) if chat and isinstance(item.prompt, str) else item.prompt
        try:
            ids.append(engine.make_request(prompt, params).prompt_ids)
        except RequestError as error:
            raise RequestError(f"{item.where}: {error.field}", error.value, error.expected) from error
    return ids


def _conditions(parts: Parts) -> dict[str, Any]:
    from tide_core.execution.cost_measure import machine_facts

    device = parts.runner.cache.device
    return {
        "model": parts.model_name,
        "artefact": parts.artefact_digest,
        "num_layers": parts.runner.adapter.num_layers,
        "checkpoint_layers": [checkpoint.layer for checkpoint in parts.checkpoints],
        "fast_layers": [] if parts.fast is None else list(parts.fast.layers),
        "dtype": parts.config.dtype,
        "device": str(device),
        "kernels": parts.kernels.name,
        "drafts": parts.config.drafts,
        **{key: value for key, value in machine_facts(device).items() if key != "host"},
    }


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--output", path, f"a folder that can be written: {error.strerror or error}") from error


def _write_files(folder: Path, results: Sequence[ContractResult], conditions: dict[str, Any]) -> None:
    from tide_core.calibration.report.plots import can_plot
    from tide_core.evaluation.results import as_csv, as_json, draw_curve, table

    write(table(results))
    (folder / "eval.csv").write_text(as_csv(results))
    (folder / "eval.json").write_text(as_json(results, conditions))
    names = ["eval.csv", "eval.json"]
    if can_plot():
        (folder / "curve.png").write_bytes(draw_curve(results))
        names.append("curve.png")
    else:
        logger.warning("matplotlib is not installed: no curve.png")
    write(f"{', '.join(names)} in {folder}\n")
