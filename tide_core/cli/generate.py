"""`tide generate`: answers to one prompt, a file of prompts, or a chat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tide_core.cli import console, exit_report, prompts, runs
from tide_core.cli.exit_codes import with_exit_code
from tide_core.cli.exit_report import RunStats
from tide_core.cli.options import integer_or_auto
from tide_core.cli.output import JsonWriter, OrderedTextWriter, TextWriter, Writer, exit_paint, plain, write_json
from tide_core.cli.prompts import PromptItem
from tide_core.config import DEVICES, DTYPE_CHOICES, EngineConfig
from tide_core.errors import RequestError
from tide_core.request import MODES, SamplingParams

PARAMS = SamplingParams()
SETTINGS = EngineConfig()


@with_exit_code
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help='Prompts: one per line, or in a .jsonl file one {"prompt": …} or {"messages": […]} per line.'
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Use the chat template; without PROMPT, chat until /exit or Ctrl-D.")
    ] = False,
    model: Annotated[str, typer.Option(help="demo, a folder, a .gguf file or a Hugging Face id.")] = SETTINGS.model,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = PARAMS.max_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = PARAMS.temperature,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = PARAMS.top_p,
    top_k: Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 keeps all.")] = PARAMS.top_k,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = PARAMS.min_p,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same tokens; when exits draft, with --drafts.")
    ] = PARAMS.seed,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help=f"The contract: {', '.join(MODES)}. Default: verified with an artefact or suffix drafts, else full."
        ),
    ] = PARAMS.mode,
    epsilon: Annotated[
        float | None,
        typer.Option(help="With mode bounded: most tokens that full depth would not have chosen, as a share; 0.05."),
    ] = PARAMS.epsilon,
    margin: Annotated[
        float | None, typer.Option(help="With mode bounded: nats by which such a token may be less likely; 0.2.")
    ] = PARAMS.margin,
    threshold: Annotated[
        float | None,
        typer.Option(help="Least router score to draft (verified, bounded) or to exit (fast); default: as calibrated."),
    ] = PARAMS.threshold,
    min_layers: Annotated[int, typer.Option(help="No exit before this many layers.")] = PARAMS.min_layers,
    artefact: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="The calibrated exits; auto: those shipped for the demo model; none: no exits. Default: auto, "
            "but none for mode full.",
        ),
    ] = None,
    drafts: Annotated[
        int | None, typer.Option(help="Drafts per cycle; default: as many as pay on this machine.")
    ] = SETTINGS.drafts,
    show_exits: Annotated[
        bool,
        typer.Option(
            "--show-exits",
            help="Mark the exit layer of each piece of text: by colour on a terminal, inverse where full depth "
            "disagreed; elsewhere by [LAYER] before the text, [LAYER!] where full depth disagreed. Then run the same "
            "prompts at full depth and print both speeds on standard error (with --json: as a last object). A "
            "chat on a terminal gets colours only.",
        ),
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of the chosen and of this many likeliest tokens.")
    ] = PARAMS.logprobs,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past the end-of-text token.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per token and per answer.")] = False,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPE_CHOICES)}.")] = SETTINGS.dtype,
    quantization: Annotated[
        str,
        typer.Option(
            help="auto: the matrices of a GGUF file stay quantised on a CPU, FP8 weights on a GPU; none: they are "
            "widened; fp8: linears are in FP8."
        ),
    ] = SETTINGS.quantization,
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}.")] = SETTINGS.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")] = None,
    max_rows: Annotated[str, typer.Option(help="Most prompts that run at once; or auto.")] = str(SETTINGS.max_rows),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more to standard error.")] = False,
) -> None:
    """Answer a prompt, a file of prompts, or a chat.

    Text streams to standard output. A file of prompts runs as one batch; answers are in the order of its lines.
    """
    console.prepare(verbose=verbose)
    if logprobs is not None and not json_lines:
        raise RequestError("--logprobs", logprobs, "--json as well: text output has no place for numbers")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        mode=mode,
        epsilon=epsilon,
        margin=margin,
        threshold=threshold,
        min_layers=min_layers,
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    settings = EngineConfig(
        model=model,
        dtype=dtype,
        quantization=quantization,
        device=device,
        artefact=artefact or ("none" if mode == "full" and not show_exits else SETTINGS.artefact),
        drafts=drafts,
        num_threads=threads,
        max_rows=integer_or_auto("max_rows", max_rows),
    )
    items = _items(prompt, file, chat=chat)

    with console.status(f"loading {model}", quiet=quiet):
        engine = runs.open_engine(settings)
    with engine:
        runs.check_all(engine, items, params)
        about = engine.stats()
        contract = params.mode or engine.default_mode
        paint = exit_paint(about.exits["num_layers"])
        shown = paint if show_exits else plain
        writer: Writer = OrderedTextWriter(shown) if file is not None else TextWriter(shown)
        if json_lines:
            writer = JsonWriter(model=engine.model_name, mode=contract, kernels=about.kernels)
        if not items:
            runs.chat(engine, params, writer.put)
            return

        def run(params: SamplingParams, put: runs.Put) -> None:
            if file is None:
                runs.answer(engine, items[0].prompt, params, put)
                return
            with console.progress(len(items), quiet=quiet) as bar:
                runs.answer_many(engine, items, params, put, on_end=bar.update)

        reports = show_exits and not quiet
        compares = reports and contract != "full"
        if compares:
            with console.status("warming up", quiet=quiet):
                exit_report.warm_up(engine, items[0].prompt, params)
        run_stats = RunStats(writer.put)
        run(params, run_stats.put)
        console.note(f"{run_stats.summary()}, {engine.model_name}, {about.kernels} kernels", quiet=quiet)
        run_stats.raise_failures()
        if reports and not json_lines:
            exit_report.print_report(
                *exit_report.lines(exit_report.stats_of(run_stats, about.exits["num_layers"]), paint)
            )
        if compares:
            with console.status("timing full depth", quiet=quiet):
                comparison = exit_report.compare(run, params, contract, run_stats)
            if json_lines:
                write_json({"type": "comparison", **comparison.fields()})
            else:
                exit_report.print_report(str(comparison))


def _items(prompt: str | None, file: Path | None, *, chat: bool) -> list[PromptItem]:
    """The prompts of the one given source; none for a chat on the terminal."""
    sources = [name for name, given in (("PROMPT", prompt is not None), ("--file", file is not None)) if given]
    if chat and file is not None:
        sources.append("--chat")
    if len(sources) > 1 or not (sources or chat):
        given = " and ".join(sources) or "none"
        raise RequestError("prompt source", given, "one of PROMPT, --file PATH, or --chat with or without PROMPT")
    if file is not None:
        return prompts.read_file(file)
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return []
    text = prompts.text_of(prompts.STDIN if prompt is None else prompt)
    return [PromptItem(prompts.user_message(text) if chat else text)]
