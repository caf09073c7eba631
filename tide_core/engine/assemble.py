"""From settings to a ready core: model, exits, kernels, pool, planner, scheduler, runner. Wiring only."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tide_core import __version__
from tide_core.config import EngineConfig, ResolvedConfig
from tide_core.engine.core import EngineCore
from tide_core.engine.pool import SlotLayout, build_pool, check_model_len, memory_of
from tide_core.engine.scheduler import Scheduler, SuffixSource
from tide_core.errors import ConfigError
from tide_core.execution.cost_measure import cache_path, machine_facts, measure, read_table, write_table
from tide_core.execution.depth_loop import plan_segments
from tide_core.execution.graphs.base import unsupported_reason
from tide_core.execution.graphs.branches import SPARE_BLOCKS
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.prompts import GraphPrompts
from tide_core.execution.runner import ModelRunner
from tide_core.exits.artefact.artefact import Artefact, load_artefact
from tide_core.exits.artefact.fast import SkipMap
from tide_core.exits.cost import Acceptance, DraftPlanner
from tide_core.exits.policy import CheckpointPolicy, FastPolicy, resolve_policy
from tide_core.exits.propose import BoundCheckpoint, BoundFastExit, Exits
from tide_core.exits.suffix import SuffixDrafts
from tide_core.identity import ModelIdentity
from tide_core.kernels import CudaKernels, Kernels, native_digest, select_kernels, set_num_threads
from tide_core.kv.block_manager import BlockManager
from tide_core.kv.cache import PagedKV
from tide_core.kv.sizing import described, resolve_config
from tide_core.models.adapter import ModelAdapter
from tide_core.models.fused_layers import fuse_layers
from tide_core.models.identity import identify
from tide_core.models.kernel_modules import use_kernels
from tide_core.models.loader import find_model, fingerprint, load_model, load_tokenizer
from tide_core.models.model_cache import default_cache_dir
from tide_core.models.resolver import ResolvedModel
from tide_core.models.weights import weight_bytes
from tide_core.outputs.tokenizer import Tokenizer
from tide_core.request import ExitPolicy, SamplingParams
from tide_core.sampling.grammar import Grammars

logger = logging.getLogger("tide")

DEMO_ARTEFACT = Path(__file__).resolve().parents[2] / "deploy" / "artefacts" / "demo"
"""Shipped with the serving app, which is installed next to this package."""


Lock = Callable[[], AbstractContextManager[object]]
"""Held while the model runs for something other than a step, so that both never run at once."""


@dataclass(frozen=True, slots=True)
class Source:
    """What parts are made from, to make others with another artefact."""

    model: Any
    tokenizer: Any
    identity: ModelIdentity
    key: str
    is_demo: bool
    text: Tokenizer | None = None
    """What the tokenizer became for the first parts, and the grammars that were compiled since: both outlive exits."""
    grammars: Grammars | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine is made of."""

    config: ResolvedConfig
    core: EngineCore
    runner: ModelRunner
    tokenizer: Tokenizer
    grammars: Grammars
    kernels: Kernels
    model_name: str
    max_model_len: int
    checkpoints: tuple[CheckpointPolicy, ...] = ()
    planner: DraftPlanner | None = None
    artefact_digest: str | None = None
    source: Source | None = None
    """None for parts around a model that was handed in."""
    suffix_drafts: bool = False
    """Whether rows in modes verified and bounded may have some."""
    fast: FastPolicy | None = None

    @property
    def default_mode(self) -> str:
        """Mode of a request that names none: verified where anything can be drafted."""
        return "verified" if self.checkpoints or self.suffix_drafts else "full"

    def policy(self, params: SamplingParams) -> ExitPolicy:
        """The exit policy of a request; refused by name if this engine cannot keep it."""
        num_layers = self.runner.adapter.num_layers
        return resolve_policy(params, self.checkpoints, num_layers, suffix_drafts=self.suffix_drafts, fast=self.fast)


def assemble(config: EngineConfig, resolved: ResolvedModel | None = None) -> Parts:
    """Load the model the settings name and its artefact, and build the engine around them. `resolved` is the model, if
    it was looked for before."""
    if resolved is None:
        logger.info("model %s: looking for it", config.model)
        resolved = find_model(config)
    logger.info("model %s: loading its weights", resolved.name)
    model = load_model(resolved, dtype=config.dtype, device=config.device, quantization=config.quantization)
    tokenizer = load_tokenizer(resolved)
    identity = identify(model, tokenizer, resolved)
    key = fingerprint(resolved, identity.weights_sha256)
    return with_artefact(config, Source(model, tokenizer, identity, key, resolved.source == "demo"))


def with_artefact(config: EngineConfig, source: Source, lock: Lock = contextlib.nullcontext) -> Parts:
    """Parts around a model that was loaded before, with the artefact that the settings name."""
    folder = artefact_folder(config, is_demo=source.is_demo)
    if folder is not None:
        logger.info("artefact %s: loading it", folder)
    artefact = None if folder is None else load_artefact(folder, source.identity)
    parts = assemble_loaded(
        config,
        source.model,
        source.tokenizer,
        name=source.identity.name,
        identity=source.key,
        artefact=artefact,
        text=source.text,
        grammars=source.grammars,
        lock=lock,
    )
    return replace(parts, source=replace(source, text=parts.tokenizer, grammars=parts.grammars))


def artefact_folder(config: EngineConfig, *, is_demo: bool) -> Path | None:
    """The folder the settings mean; None for no exits."""
    if config.artefact == "none":
        return None
    if config.artefact == "auto":
        return DEMO_ARTEFACT if is_demo and DEMO_ARTEFACT.is_dir() else None
    return Path(config.artefact).expanduser()


def assemble_loaded(
    given: EngineConfig,
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    identity: str,
    artefact: Artefact | None = None,
    text: Tokenizer | None = None,
    grammars: Grammars | None = None,
    lock: Lock = contextlib.nullcontext,
) -> Parts:
    """Build the engine around a loaded model. `identity` names its weights. The model may be in
    use: `lock` is held whenever it is touched here. `text` and `grammars` are those of other parts around it."""
    with lock():
        if given.num_threads is not None:
            torch.set_num_threads(given.num_threads)
        set_num_threads(torch.get_num_threads())
        adapter = ModelAdapter(model)
        kernels = select_kernels(given.kernels, adapter.device)
        use_kernels(model, kernels)
        fused = fuse_layers(adapter.layers, kernels) if isinstance(kernels, CudaKernels) else 0
        segments = plan_segments(adapter.num_layers, exit_layers(artefact))
        max_model_len = check_model_len(given, adapter.max_positions)
        adapter.keep_rotations(max_model_len)
        if fused == adapter.num_layers:
            adapter.turn_by_table()
        spare_blocks = SPARE_BLOCKS if isinstance(kernels, CudaKernels) and artefact is not None else 0
        slots = SlotLayout.of(adapter, [] if artefact is None else [head.spec for head in artefact.heads])
        size = slots.model_size(
            given,
            adapter.dtype,
            hidden=int(adapter.config.hidden_size),
            vocab=adapter.vocab_size,
            max_model_len=max_model_len,
            spare_blocks=spare_blocks,
            weight_bytes=weight_bytes(model),
        )
        config = resolve_config(given, memory_of(given, adapter.device), size, dtype=_dtype_of(adapter))
        cache, blocks = build_pool(config, slots, adapter, size)
        exits = None if artefact is None else bind_exits(artefact, adapter, cache, kernels, max_model_len)
    cycles, prompts = _graphs(adapter, cache, kernels, exits, max_model_len)
    runner = ModelRunner(
        adapter,
        cache,
        kernels,
        segments,
        exits=exits,
        prompt_exits=config.prompt_exits,
        cycles=cycles,
        prompts=prompts,
    )
    _prepare(config, runner, artefact, lock)
    planner = build_planner(config, artefact, runner, blocks, identity, max_model_len, lock)
    suffixes = None
    if planner is not None and planner.max_suffix_rows:
        suffixes = SuffixSource(SuffixDrafts(shares=config.prefix_caching), planner)
    scheduler = Scheduler(
        blocks,
        max_rows=config.max_rows,
        max_batch_tokens=config.max_batch_tokens,
        plan_drafts=planner,
        max_drafts=0 if planner is None else planner.max_drafts,
        prefills_ahead=runner.prompts is not None,
        suffixes=suffixes,
    )
    text = text or Tokenizer(tokenizer, adapter.vocab_size)
    grammars = grammars or Grammars(tokenizer, adapter.vocab_size, adapter.eos_ids)
    digest = None if artefact is None else artefact.digest
    core = EngineCore(
        scheduler,
        runner,
        text,
        namespace=f"{identity}:{adapter.dtype}:{digest}",
        num_layers=adapter.num_layers,
        planner=planner,
        prompt_exits=config.prompt_exits,
        audit_share=config.audit_share,
        audit_delta=config.audit_delta,
    )
    logger.info(
        "model %s: %d layers in %d segments, %s kernels, artefact %s",
        name,
        adapter.num_layers,
        len(segments),
        kernels.name,
        "none" if digest is None else digest[:16],
    )
    logger.info("settings: %s", described(given, config, size, str(adapter.device)))
    checkpoints = () if artefact is None else checkpoint_policies(artefact)
    parts = Parts(config, core, runner, text, grammars, kernels, name, max_model_len, checkpoints, planner, digest)
    return replace(parts, suffix_drafts=suffixes is not None, fast=fast_policy(artefact))


def bind_exits(
    artefact: Artefact,
    adapter: ModelAdapter,
    cache: PagedKV,
    kernels: Kernels,
    max_model_len: int,
    *,
    programs: bool = True,
) -> Exits:
    """Heads and routers cast and placed like the model and run by the same kernels, as programs where they can be."""
    checkpoints = []
    kv_layer = adapter.num_layers
    for checkpoint, head, router in zip(artefact.manifest.checkpoints, artefact.heads, artefact.routers, strict=True):
        _place(head, adapter, kernels)
        router.to(adapter.device, torch.float32 if isinstance(kernels, CudaKernels) else adapter.dtype)
        use_kernels(router, kernels)
        head.kernels = kernels
        head.prepare(max_model_len)
        checkpoints.append(BoundCheckpoint(checkpoint.layer, head, router, kv_layer if head.spec.attends else -1))
        kv_layer += head.spec.attends
    narrow_head = adapter.narrow_head(artefact.shortlist)
    _place(narrow_head, adapter, kernels)
    fast: list[BoundFastExit] = []
    skip_maps: list[SkipMap] = []
    if artefact.fast is not None:
        for head, router in zip(artefact.fast.heads, artefact.fast.routers, strict=True):
            _place(head, adapter, kernels)
            router.to(adapter.device, adapter.dtype)
            use_kernels(router, kernels)
            head.kernels = kernels
            fast.append(BoundFastExit(head, router))
        for skip_map in artefact.fast.maps:
            _place(skip_map, adapter, kernels)
            skip_maps.append(skip_map)
    return Exits(
        adapter,
        cache,
        checkpoints,
        artefact.shortlist,
        narrow_head,
        kernels if programs else None,
        fast=fast,
        skip_maps=skip_maps,
    )


def _graphs(
    adapter: ModelAdapter, cache: PagedKV, kernels: Kernels, exits: Exits | None, max_model_len: int
) -> tuple[GraphCycles | None, GraphPrompts | None]:
    """What runs as CUDA graphs; None for models that cannot."""
    reason = unsupported_reason(adapter, cache, kernels)
    if reason is None and exits is not None and len(exits.checkpoints) > 1:
        reason = "with several checkpoints the host decides where a token exits"
    if reason is not None:
        logger.log(logging.INFO if isinstance(kernels, CudaKernels) else logging.DEBUG, "no CUDA graphs: %s", reason)
        return None, None
    assert isinstance(kernels, CudaKernels)
    cycles = GraphCycles(adapter, cache, kernels, exits, max_positions=max_model_len)
    return cycles, GraphPrompts(adapter, cache, kernels, exits)


def _prepare(config: ResolvedConfig, runner: ModelRunner, artefact: Artefact | None, lock: Lock) -> None:
    """Capture the graphs of most requests, on a GPU; the lock is released between graphs."""
    cycles, prompts = runner.cycles, runner.prompts
    if cycles is None or prompts is None or runner.cache.device.type != "cuda":
        return
    most = 0 if artefact is None else min(config.max_pending, artefact.manifest.max_drafts)
    drafts = most if config.drafts is None else min(most, config.drafts)
    has_suffix = config.suffix_drafts and config.drafts is None
    cycle_shapes = cycles.shapes(config.max_rows, drafts, suffix_drafts=has_suffix)
    shapes = prompts.shapes()
    logger.info("capturing %d graphs", len(cycle_shapes) + len(shapes))
    for cycle_shape in cycle_shapes:
        with lock():
            cycles.prepare(cycle_shape)
    for shape in shapes:
        with lock():
            prompts.prepare(shape)


def _place(module: nn.Module, adapter: ModelAdapter, kernels: Kernels) -> None:
    """Like the model; but where the kernels support bfloat16 weights with float32 states, matrices are bfloat16.

    Drafting then reads half the bytes. Heads are trained with products in bfloat16, so it costs them nothing."""
    module.to(adapter.device, adapter.dtype)
    if kernels.name == "native" and adapter.dtype is torch.float32:
        for linear in module.modules():
            if isinstance(linear, nn.Linear):
                linear.weight = nn.Parameter(linear.weight.bfloat16(), requires_grad=False)
    use_kernels(module, kernels)


def build_planner(
    config: ResolvedConfig,
    artefact: Artefact | None,
    runner: ModelRunner,
    blocks: BlockManager,
    identity: str,
    max_model_len: int,
    lock: Lock = contextlib.nullcontext,
) -> DraftPlanner | None:
    """The planner with its cost table: the one of an earlier start on this machine, or one measured now. None where
    nothing can be drafted."""
    most, digest = 0, "none"
    acceptance: tuple[float, ...] = ()
    if artefact is not None:
        most = min(config.max_pending, artefact.manifest.max_drafts)
        acceptance, digest = artefact.manifest.checkpoints[0].acceptance, artefact.digest
        if config.drafts is not None and config.drafts > artefact.manifest.max_drafts:
            expected = f"at most the artefact's {artefact.manifest.max_drafts}: nothing longer was trained"
            raise ConfigError("drafts", config.drafts, expected)
        if config.drafts is not None:
            return DraftPlanner(config.drafts, Acceptance.prior(acceptance, max(config.drafts, 1)))
    elif not config.suffix_drafts or config.drafts is not None:
        return None
    facts = cost_facts(config, runner, identity, digest, most)
    path = cache_path(default_cache_dir(), facts)
    table = read_table(path)
    if table is None:
        logger.info("cost table: measuring it, once for this machine and artefact")
        table = measure(
            runner,
            blocks,
            max_rows=config.max_rows,
            max_drafts=most,
            max_positions=max_model_len,
            suffix_drafts=config.suffix_drafts,
            lock=lock,
        )
        if table.points:
            write_table(path, table, facts)
    return DraftPlanner(most, Acceptance.prior(acceptance, most), table, pads=runner.cycles is not None)


def cost_facts(
    config: ResolvedConfig, runner: ModelRunner, identity: str, digest: str, max_drafts: int
) -> dict[str, Any]:
    """All that a cost table depends on."""
    return {
        **machine_facts(runner.cache.device),
        "model": identity,
        "artefact": digest,
        "dtype": config.dtype,
        "weights": weight_bytes(runner.adapter.model),
        "device": str(runner.cache.device),
        "threads": torch.get_num_threads(),
        "kernels": (runner.kernels.name, native_digest()),
        "max_rows": config.max_rows,
        "max_drafts": max_drafts,
        "suffix_drafts": config.suffix_drafts,
        "version": __version__,
    }


def exit_layers(artefact: Artefact | None) -> tuple[int, ...]:
    """The layers of all exits: checkpoints, and behind them the exits of mode fast."""
    if artefact is None:
        return ()
    manifest = artefact.manifest
    behind = [] if manifest.fast is None else [each.layer for each in manifest.fast.exits]
    return (*(checkpoint.layer for checkpoint in manifest.checkpoints), *behind)


def fast_policy(artefact: Artefact | None) -> FastPolicy | None:
    """None without fast exits."""
    if artefact is None or artefact.manifest.fast is None:
        return None
    contracts = {each.epsilon: each.thresholds for each in artefact.manifest.fast.contracts}
    return FastPolicy(exit_layers(artefact), contracts)


def checkpoint_policies(artefact: Artefact) -> tuple[CheckpointPolicy, ...]:
    return tuple(
        CheckpointPolicy(
            layer=checkpoint.layer,
            draft_threshold=checkpoint.draft_threshold,
            fast_threshold=None if checkpoint.fast is None else checkpoint.fast.threshold,
        )
        for checkpoint in artefact.manifest.checkpoints
    )


def _dtype_of(adapter: ModelAdapter) -> str:
    return str(adapter.model.dtype).removeprefix("torch.")
