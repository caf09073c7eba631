"""Exits for a Hugging Face model in three lines: calibrate once, wrap, generate.

    path = tide_core.calibrate(model, tokenizer, save_path="exits")
    with tide_core.TIDE(model, path, tokenizer=tokenizer) as tide:
        output = tide.generate(tokenizer("Hello", return_tensors="pt").input_ids, max_new_tokens=128)

Token ids in, token ids out, as with `model.generate`. The engine runs the rows of a batch together; each row keeps the
contract of its mode (in the default mode greedy output equals full depth), and no row's output depends on the others.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tide_core.config import EngineConfig
from tide_core.engine.assemble import Parts, artefact_folder, assemble_loaded
from tide_core.engine.engine import Completion, Engine
from tide_core.errors import ConfigError, EngineDeadError, EngineError, RequestError
from tide_core.exits.artefact.artefact import Artefact, load_artefact
from tide_core.exits.artefact.match import check_identity
from tide_core.models.identity import identify
from tide_core.models.loader import find_model, fingerprint, load_model, load_tokenizer
from tide_core.models.resolver import ResolvedModel
from tide_core.outputs.exit_stats import ExitStats
from tide_core.request import FinishReason, SamplingParams
from tide_core.tide.config import TIDEConfig, checked
from tide_core.tide.model_state import SavedModelState, check_usable
from tide_core.tide.rows import IdsOnly, joined, rows_of

logger = logging.getLogger("tide")

OPTIONS = tuple(f.name for f in fields(SamplingParams) if f.name != "max_tokens")
INSTEAD = {
    "do_sample": "temperature: 0 is greedy, above 0 samples",
    "eos_token_id": "stop_ids, in addition to the model's own end-of-text ids; ignore_eos continues past those",
    "generation_config": "its values as arguments",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "exit_threshold": "threshold",
}
"""Names of other libraries, and what to use instead."""


class TIDE:
    """A model with exits. `close`, or the end of its `with`, restores a loaded model."""

    def __init__(
        self,
        model: Any,
        artefact: str | Path = "auto",
        config: TIDEConfig | None = None,
        *,
        tokenizer: Any = None,
        **settings: Any,
    ) -> None:
        """`model`: a model loaded by transformers, or a name for the engine. `artefact`: a folder that `calibrate`
        wrote; `auto` for the demo model's own; `none` for full depth.

        A loaded model needs its tokenizer only for stop strings; if given, it must match the artefact's. The model is
        used in place (see `close`). `settings` are fields of `EngineConfig`, such as `kv_memory_gib` or `drafts`."""
        self.config = checked(config)
        self.last_stats: ExitStats | None = None
        """Exits of the last `generate`."""
        asked = {**settings, "artefact": str(artefact)}
        resolved = None
        if isinstance(model, str):
            engine_config = EngineConfig.from_mapping({**asked, "model": model})
            resolved = find_model(engine_config)
            model = load_model(
                resolved,
                dtype=engine_config.dtype,
                device=engine_config.device,
                quantization=engine_config.quantization,
            )
            tokenizer = load_tokenizer(resolved) if tokenizer is None else tokenizer
        else:
            check_usable(model)
            engine_config = EngineConfig.from_mapping(_settings_of(model, asked))
        self.tokenizer = tokenizer
        self._text = IdsOnly() if tokenizer is None else tokenizer
        self._saved_state = SavedModelState(model)
        try:
            parts = self._assemble(model, resolved, engine_config)
            self._pad_id = _pad_id(model, tokenizer, parts)
            self._check_policy(parts)
            self.engine = Engine.from_parts(parts)
        except BaseException:
            self._saved_state.restore()
            raise

    def _assemble(self, model: Any, resolved: ResolvedModel | None, config: EngineConfig) -> Parts:
        exits, identity = self._load_exits(model, resolved, config)
        name = type(model).__name__ if resolved is None else resolved.name
        return assemble_loaded(config, model, self._text, name=name, identity=identity, artefact=exits)

    def _load_exits(
        self, model: Any, resolved: ResolvedModel | None, config: EngineConfig
    ) -> tuple[Artefact | None, str]:
        """The artefact, checked against this model, and the model's fingerprint."""
        identity = identify(model, self._text, resolved)
        if resolved is not None:
            key = fingerprint(resolved, identity.weights_sha256)
        else:
            key = hashlib.sha256(repr(identity).encode()).hexdigest()
        folder = artefact_folder(config, is_demo=resolved is not None and resolved.source == "demo")
        if folder is None:
            return None, key
        artefact = load_artefact(folder, None)
        made_for = artefact.manifest.model
        if self.tokenizer is None:  # ids only: no tokenizer to compare
            identity = replace(identity, tokenizer_sha256=made_for.tokenizer_sha256)
        check_identity(made_for, identity)
        _check_made_with(self.config, artefact)
        return artefact, key

    def _check_policy(self, parts: Parts) -> None:
        """Refuse settings that this artefact does not support, before the first request."""
        params = SamplingParams(**self.config.request_settings())
        policy = parts.policy(params)
        layers = [checkpoint.layer for checkpoint in parts.checkpoints]
        if policy.mode != "full" and params.min_layers > max(layers):
            shown = ", ".join(map(str, layers))
            logger.warning("min_layers %d: the exits are after layer %s, so no exit is used", params.min_layers, shown)

    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        pad_token_id: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Continue every row: [B, S] ids to [B, S + N] ids, N the most new tokens of any row; shorter rows are padded.

        `attention_mask` is 0 at padding; without a mask every id counts. Row i samples with `seed` + i. `options` are
        the other fields of `SamplingParams`. Mode, threshold, epsilon and margin come from the config, unless the call
        gives a `mode`, which replaces all four, or its own value."""
        rows = rows_of(input_ids, attention_mask)
        for name in options:
            if name not in OPTIONS:
                expected = INSTEAD.get(name, f"one of {', '.join(OPTIONS)}")
                raise RequestError(f"generate({name}=...)", options[name], expected)
        if options.get("stop") and self.tokenizer is None:
            raise RequestError("stop", options["stop"], "a tokenizer, which stop strings need; or stop_ids")
        policy = self.config.request_settings()
        if "mode" in options:
            policy = {"min_layers": policy["min_layers"]}
        for name in ("stop", "stop_ids"):
            if isinstance(options.get(name), (str, list)):
                options[name] = (options[name],) if isinstance(options[name], str) else tuple(options[name])
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            **{**policy, **options},
        )
        before = self.engine.stats().exits
        answers = self._answers(rows, params)
        self.last_stats = _stats(answers, before, self.engine.stats().exits)
        new = [[token.token_id for token in answer.tokens] for answer in answers]
        return joined(input_ids, rows, new, self._pad_id if pad_token_id is None else pad_token_id)

    def _answers(self, rows: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        of_rows = [params] * len(rows)
        if params.seed is not None and not params.is_greedy:  # equal prompts must not draw equal tokens
            of_rows = [replace(params, seed=params.seed + index) for index in range(len(rows))]
        answers = self.engine.generate(rows, of_rows)
        for index, answer in enumerate(answers):
            if answer.finish_reason is FinishReason.ABORT:
                raise EngineDeadError("the engine was closed")
            if answer.error is not None:
                raise EngineError(f"row {index}: {answer.error}") from answer.error
        return answers

    def close(self) -> None:
        """Stop the engine and restore the model: its own forward and generate work again."""
        self.engine.close()
        self._saved_state.restore()

    def __enter__(self) -> TIDE:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _settings_of(model: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Engine settings for a loaded model, which has its own name, dtype and device."""
    for name in ("model", "dtype", "device", "quantization"):
        if name in settings:
            raise ConfigError(name, settings[name], "none with a loaded model, which has its own")
    if settings["artefact"] == "auto":
        raise ConfigError("artefact", "auto", "a folder, or none: auto needs a model name")
    dtype = str(model.dtype).removeprefix("torch.")
    return {"model": type(model).__name__, "dtype": dtype, "device": model.device.type, **settings}


def _check_made_with(config: TIDEConfig, artefact: Artefact) -> None:
    """Calibration settings in the config must equal those of the artefact."""
    for checkpoint in artefact.manifest.checkpoints:
        width, kind, interval = config.router_bottleneck_dim, config.exit_strategy, config.checkpoint_interval
        if width not in (None, checkpoint.router_bottleneck):
            expected = f"{checkpoint.router_bottleneck}, as the artefact was calibrated, or none"
            raise ConfigError("router_bottleneck_dim", width, expected)
        if kind not in (None, checkpoint.head.kind):
            raise ConfigError("exit_strategy", kind, f"{checkpoint.head.kind}, as the artefact was calibrated, or none")
        if interval is not None and checkpoint.layer % interval:
            expected = f"none, or one that the artefact's checkpoint after layer {checkpoint.layer} is a multiple of"
            raise ConfigError("checkpoint_interval", interval, expected)


def _pad_id(model: Any, tokenizer: Any, parts: Parts) -> int | None:
    """The id that `transformers` would pad with."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        pad_id = getattr(source, "pad_token_id", None)
        if isinstance(pad_id, int) and pad_id >= 0:
            return pad_id
    return next(iter(parts.runner.adapter.eos_ids), None)


def _stats(answers: Sequence[Completion], before: Mapping[str, Any], after: Mapping[str, Any]) -> ExitStats:
    stats = ExitStats(after["num_layers"])
    for answer in answers:
        assert answer.usage is not None
        stats.record(
            [(token.exit_layer, token.audit) for token in answer.tokens],
            layers_run=answer.usage.layers_run,
            deep_passes=answer.usage.deep_passes,
            drafts=answer.usage.num_drafts,
            accepted=answer.usage.num_accepted,
        )
    # No answer holds this count.
    stats.non_finite_scores = after["non_finite_scores"] - before["non_finite_scores"]
    return stats
