"""`tide generate`: answers to one prompt, a file of prompts, or a chat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tide_core.cli import chats, console, exit_report, prompts, runs
from tide_core.cli.exits import with_exit_code
from tide_core.cli.output import JsonWriter, OrderedTextWriter, TextWriter, Writer, write_json
from tide_core.cli.paint import exit_paint, plain
from tide_core.cli.prompts import PromptItem
from tide_core.cli.tally import Tally
from tide_core.config import DEVICES, DTYPES, EngineConfig
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
        bool, typer.Option("--chat", help="Use the chat template; without PROMPT, talk until /exit or Ctrl-D.")
    ] = False,
    model: Annotated[str, typer.Option(help="demo, a folder, a .gguf file or a Hugging Face id.")] = SETTINGS.model,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = PARAMS.max_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = PARAMS.temperature,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = PARAMS.top_p,
    top_k: Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 keeps all.")] = PARAMS.top_k,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = PARAMS.min_p,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = PARAMS.seed,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given again.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help=f"The contract: {', '.join(MODES)}. If not given: verified with an artefact, full without one."
        ),
    ] = PARAMS.mode,
    epsilon: Annotated[
        float | None, typer.Option(help="With mode bounded: most disagreement with full depth, per token.")
    ] = PARAMS.epsilon,
    threshold: Annotated[
        float | None,
        typer.Option(help="Least router score to draft (verified) or to leave (fast); calibrated if not given."),
    ] = PARAMS.threshold,
    min_layers: Annotated[int, typer.Option(help="No exit before this many layers.")] = PARAMS.min_layers,
    artefact: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="The calibrated exits; auto: those shipped for the demo model; none: full depth. If not given: auto, "
            "but none for mode full.",
        ),
    ] = None,
    drafts: Annotated[
        int | None, typer.Option(help="Drafts per cycle; as many as pay on this machine if not given.")
    ] = SETTINGS.drafts,
    show_exits: Annotated[
        bool,
        typer.Option(
            "--show-exits",
            help="Show after how many layers each piece of text was decided: by colour on a terminal, inverse where "
            "full depth disagreed; elsewhere by [LAYER] before it and [LAYER!] where it disagreed. Then run the same "
            "prompts at full depth too, and print both speeds on standard error (with --json: as a last object). A "
            "chat on a terminal gets colours only.",
        ),
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of the chosen and of this many likeliest tokens.")
    ] = PARAMS.logprobs,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per token and per answer.")] = False,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = SETTINGS.dtype,
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}.")] = SETTINGS.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's choice if not given.")] = None,
    max_rows: Annotated[int, typer.Option(help="Most prompts that run at once.")] = SETTINGS.max_rows,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more on standard error.")] = False,
) -> None:
    """Answer a prompt, a file of prompts, or a chat.

    Text goes to standard output as it comes. A file of prompts runs as one batch, answers in the order of its lines.
    """
    console.prepare(verbose=verbose)
    if logprobs is not None and not json_lines:
        raise RequestError("--logprobs", logprobs, "--json beside it; text has no place for numbers")
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
        threshold=threshold,
        min_layers=min_layers,
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    settings = EngineConfig(
        model=model,
        dtype=dtype,
        device=device,
        artefact=artefact or ("none" if mode == "full" and not show_exits else SETTINGS.artefact),
        drafts=drafts,
        num_threads=threads,
        max_rows=max_rows,
        max_batch_tokens=max(SETTINGS.max_batch_tokens, max_rows),
    )
    items = _items(prompt, file, chat=chat)

    with console.status(f"loading {model}", quiet=quiet):
        engine = runs.open_engine(settings)
    with engine:
        runs.check_all(engine, items, params)
        about = engine.stats()
        contract = params.mode or ("full" if about.artefact is None else "verified")
        paint = exit_paint(about.exits["num_layers"])
        shown = paint if show_exits else plain
        writer: Writer = OrderedTextWriter(shown) if file is not None else TextWriter(shown)
        if json_lines:
            writer = JsonWriter(model=engine.model_name, mode=contract, kernels=about.kernels)
        if not items:
            chats.talk(engine, params, writer.put)
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
        tally = Tally(writer.put)
        run(params, tally.put)
        console.note(f"{tally.summary()}, {engine.model_name}, {about.kernels} kernels", quiet=quiet)
        tally.raise_failures()
        if reports and not json_lines:
            exit_report.tell(*exit_report.lines(exit_report.stats_of(tally, about.exits["num_layers"]), paint))
        if compares:
            with console.status("timing full depth", quiet=quiet):
                comparison = exit_report.compare(run, params, contract, tally)
            if json_lines:
                write_json({"type": "comparison", **comparison.fields()})
            else:
                exit_report.tell(str(comparison))


def _items(prompt: str | None, file: Path | None, *, chat: bool) -> list[PromptItem]:
    """The prompts of the one source that was given; none for a chat on the terminal."""
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
