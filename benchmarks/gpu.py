"""A decode step of the engine on a GPU against the time that it takes to read the weights.

    python benchmarks/gpu.py                     # the shape of Llama 3.1 8B, bfloat16, random weights
    python benchmarks/gpu.py --json --rows 1,8
    python benchmarks/gpu.py --device cpu --hidden 64 --layers 2 --vocabulary 512   # whether it runs at all

Two times for every number of rows: the captured graph alone, by the device's clock, and the whole step of the runner,
by the host's. The floor is the bytes of all weights but the embedding, which is looked up, over 4.10 TB/s (what reading
gives on an H200; the same run prints what this device gives). Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: its folder is on the path, the repository is not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from benchmarks.bars import Bar, Part, conclude
from benchmarks.byte_tokenizer import byte_tokenizer
from tide_core.config import EngineConfig
from tide_core.engine.assemble import Parts, assemble_loaded
from tide_core.engine.cost_measure import _batch, _blank_tables

READ_BYTES_PER_S = 4.10e12
BARS = {1: 1.25, 8: 1.35, 32: 1.5}
"""Most times the floor, by rows."""
WARM_UP, REPEATS = 5, 30


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time decode steps against the floor of their bytes.")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--kernels", default="auto", choices=("auto", "reference"))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def make_model(options: argparse.Namespace) -> Any:
    """Llama of that size; weights are drawn where they are."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128 or 1,
        num_key_value_heads=options.hidden // 512 or 1,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = model.to(dtype).to_empty(device=options.device).eval()
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(options.device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    return model


def read_rate(device: str) -> float:
    """Bytes per second of a sum over 4 GiB, the best of five."""
    if device != "cuda":
        return 0.0
    numbers = torch.empty(2**29, dtype=torch.int64, device=device)
    best = min(_device_s(numbers.sum, 1) for _ in range(5))
    return numbers.numel() * 8 / best


def step_times(parts: Parts, rows: int, context: int) -> dict[str, float]:
    """Seconds of a step at full depth of that many rows, each with that context."""
    runner, blocks = parts.runner, parts.core.scheduler.blocks
    tables = _blank_tables(runner, blocks, rows, context, 0)
    assert tables is not None, "the pool has room for these rows"
    batch = _batch(runner, tables, -1)
    before = set(_graphs(runner))
    times = []
    for attempt in range(WARM_UP + REPEATS):
        began = time.perf_counter()
        runner.run(batch)
        if attempt >= WARM_UP:
            times.append(time.perf_counter() - began)  # a step ends with its tokens on the host
    found = {"step_s": statistics.median(times)}
    graphs = [graph for graph in _graphs(runner) if graph not in before]
    if graphs:
        found["graphs_s"] = sum(_device_s(graph.replay, REPEATS) for graph in graphs)
    for table in tables:
        blocks.free(table)
    return found


def _graphs(runner: Any) -> list[Any]:
    captured = runner._depth._captured
    passes = [] if captured is None else captured._passes._by_shape.values()
    return [one._graph for one in passes if one._graph is not None]


def _device_s(work: Any, times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    work()
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    started = time.monotonic()
    rows = [int(count) for count in options.rows.split(",")]
    model = make_model(options)
    embedding = model.get_input_embeddings().weight
    weights = (
        sum(p.numel() * p.element_size() for p in model.parameters()) - embedding.numel() * embedding.element_size()
    )
    config = EngineConfig(
        model="random",
        device=options.device,
        dtype="bfloat16" if options.device == "cuda" else "float32",
        kernels=options.kernels,
        max_rows=max(rows),
        max_model_len=options.context + 64,
        kv_memory_gib=16.0 if options.device == "cuda" else 0.5,
        artefact="none",
    )
    parts = assemble_loaded(config, model, byte_tokenizer(), name="random", identity="random")
    floor_s = weights / READ_BYTES_PER_S
    rate = read_rate(options.device)
    data: dict[str, Any] = {"weight_bytes": weights, "floor_ms": floor_s * 1e3, "read_tb_per_s": rate / 1e12}
    bars = []
    for count in rows:
        times = step_times(parts, count, options.context)
        data[f"{count} rows"] = {
            name: {"ms": seconds * 1e3, "times_floor": seconds / floor_s} for name, seconds in times.items()
        }
        if count in BARS and "graphs_s" in times:
            name = f"graph of a full-depth step of {count} rows over the floor"
            bars.append(Bar(name, times["graphs_s"] / floor_s, BARS[count], at_least=False))
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    conditions = {
        "command": " ".join(["python benchmarks/gpu.py", *(argv or sys.argv[1:])]),
        "hardware": device,
        "kernels": parts.kernels.name,
        "context": options.context,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    part = Part("a", "a full-depth step against the weight-read floor", data, bars)
    stream = sys.stderr if options.json else sys.stdout
    for name, value in {**conditions, **data}.items():
        print(f"{name:16} {value}", file=stream)
    print(f"{time.monotonic() - started:.0f} s in all", file=stream)
    return conclude(conditions, [part], lambda line: print(line, file=stream), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
