"""The parts of the benchmark of the calibration job."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.calibration.runs import Cluster, Run
from benchmarks.common.bars import Bar, Log, Part
from benchmarks.common.shapes import byte_tokenizer

MORE = 8
"""Factor of samples in the part about memory."""
SHARD_SEQUENCES = 16
HELD_OUT = {"min_calibration": 4 * SHARD_SEQUENCES, "min_test": 2 * SHARD_SEQUENCES}
DOCUMENT_WORDS = 700

COMMON: dict[str, Any] = {
    "greedy_share": 1.0,
    "shortlist_size": 64,
    "heads": ["affine"],
    "checkpoints": [1],
    "deep_inputs": False,
    "steps": 12,
    "max_drafts": 2,
    "measure_batches": [],
}


def make_model(folder: Path, *, hidden: int, layers: int) -> Path:
    """A random Llama over bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_data(path: Path, kind: str, num: int, num_words: int) -> Path:
    """`num` different records of `num_words` random words."""
    draw = random.Random(0)  # noqa: S311
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(256)]
    with path.open("w") as file:
        for index in range(num):
            text = " ".join([f"{index:06d}", *draw.choices(words, k=num_words - 1)])
            file.write(f"{json.dumps({kind: text})}\n")
    return path


def speed(cluster: Cluster, requested: Sequence[str], num_shards: int, repeats: int, log: Log) -> Iterator[Part]:
    """Parts a and c: the same calibration by one worker, by two workers, and by the command, in turns."""
    num = SHARD_SEQUENCES * num_shards
    model = make_model(cluster.folder / "large", hidden=256, layers=6)
    calibration = {
        **COMMON,
        **HELD_OUT,
        "data": str(write_data(cluster.folder / "prompts.jsonl", "prompt", num, 10)),
        "num_samples": num,
        "max_new_tokens": 16,
        "generation_batch": SHARD_SEQUENCES,
        "batch_tokens": 1024,
    }
    ways: dict[str, Callable[[], Run]] = {"one": lambda: cluster.job(model, calibration, 1)}
    if "a" in requested:
        ways["two"] = lambda: cluster.job(model, calibration, 2)
    if "c" in requested:
        ways["command"] = lambda: cluster.command(model, calibration)
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way in list(ways) if repeat % 2 else reversed(list(ways)):
            run = ways[way]()
            runs[way].append(run)
            log(f"  repeat {repeat + 1}, {way}: {run.seconds:.1f} s, of which collect {run.collect_s:.1f} s")
    digests = {run.digest for some in runs.values() for run in some}
    same = Bar("different artefacts", len(digests), 1, at_least=False)
    if "a" in requested:
        yield _two_workers(runs["one"], runs["two"], num, same)
    if "c" in requested:
        yield _overhead(runs["one"], runs["command"], same)


def _two_workers(one: Sequence[Run], two: Sequence[Run], num: int, same: Bar) -> Part:
    ratios = [alone.collect_s / both.collect_s for alone, both in zip(one, two, strict=True)]
    data = {
        "sequences": num,
        "one_worker_s": statistics.median(run.collect_s for run in one),
        "two_workers_s": statistics.median(run.collect_s for run in two),
        "speedups": ratios,
        "shard_of_one_s": statistics.median(run.shard_s for run in one),
        "shard_of_two_s": statistics.median(run.shard_s for run in two),
        "second_worker_late_s": statistics.median(run.late_s for run in two),
    }
    bar = Bar("collect by two workers over one", statistics.median(ratios), 1.6)
    return Part("a", "collect by two workers, one thread each", data, [bar, same])


def _overhead(job: Sequence[Run], command: Sequence[Run], same: Bar) -> Part:
    over = [there.seconds - 1.15 * here.seconds for there, here in zip(job, command, strict=True)]
    data = {
        "job_s": statistics.median(run.seconds for run in job),
        "command_s": statistics.median(run.seconds for run in command),
        "job_over_command_s": statistics.median(a.seconds - b.seconds for a, b in zip(job, command, strict=True)),
        "start_of_job_s": statistics.median(run.start_s for run in job),
        "start_of_command_s": statistics.median(run.start_s for run in command),
        "collect_of_job_s": statistics.median(run.collect_s for run in job),
        "collect_of_command_s": statistics.median(run.collect_s for run in command),
    }
    bar = Bar("seconds of the job beyond 1.15 times the command's", statistics.median(over), 20, at_least=False)
    return Part("c", "the job with one worker against `tide calibrate`", data, [bar, same])


def memory(cluster: Cluster, num: int, log: Log) -> Part:
    """Part b: long documents with millions of tokens, so that a worker that keeps them in memory is detected."""
    model = make_model(cluster.folder / "small", hidden=64, layers=4)
    runs = []
    for times in (1, MORE):
        data = write_data(cluster.folder / f"documents-{times}.jsonl", "text", num * times, DOCUMENT_WORDS)
        calibration = {
            **COMMON,
            "data": str(data),
            "num_samples": num * times,
            "text_share": 1.0,
            "calibration_share": 0.002,
            "test_share": 0.001,
            "min_calibration": 16,
            "min_test": 8,
            "max_new_tokens": 32,
            "generation_batch": 32,
            "batch_tokens": 4096,
        }
        run = cluster.job(model, calibration, 2, watched=True)
        runs.append(run)
        log(f"  {num * times} documents: {run.seconds:.1f} s, top2 {[size >> 20 for size in run.top2()]} MiB")
    data, bars = {"documents": num}, []
    for stage in ("collect", "train", None):
        top2 = [run.top2(stage) for run in runs]
        ratio = max(more / few for few, more in zip(*top2, strict=True))
        name = f"by the end of {stage or 'the run'}"
        data[name] = {
            f"{times}x_mib": [size / 2**20 for size in sizes] for times, sizes in zip((1, MORE), top2, strict=True)
        }
        bars.append(Bar(f"peak of a worker at {MORE}x the samples over 1x, {name}", ratio, 1.1, at_least=False))
    return Part("b", f"memory of each of two workers at {MORE}x the samples", data, bars)
