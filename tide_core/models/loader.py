"""Load weights and tokenizer of a resolved model. A checkpoint that does not fill its model exactly is refused."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from tide_core.config import AUTO, DEVICES, DTYPE_CHOICES, QUANTIZATIONS, EngineConfig
from tide_core.errors import ConfigError, ModelError, one_line
from tide_core.kernels import native_unsupported_reason
from tide_core.models import model_cache
from tide_core.models.checkpoint import chosen_dtype
from tide_core.models.folder import check_keys
from tide_core.models.fp8.layers import quantise_layers
from tide_core.models.fp8.scheme import fp8_scheme
from tide_core.models.identity import weights_digest
from tide_core.models.resolver import ResolvedModel, resolve
from tide_core.models.streamed import load_streamed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("tide")
Found = TypeVar("Found", ResolvedModel, ResolvedModel | None)
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def import_libraries() -> None:
    """Import what `load_model` and `load_tokenizer` need: seconds, in a process that has not."""
    for name in ("auto.modeling_auto", "auto.tokenization_auto", "llama.modeling_llama"):
        importlib.import_module(f"transformers.models.{name}")  # the classes of other models need little more


def find_model(config: EngineConfig, find: Callable[..., Found] = resolve) -> Found:
    """The model that the settings name, in the form that they ask for; `find` is `resolve`, or what does
    the same."""
    reason = widening_reason(config)
    found = find(config.model, quantised=reason is None)
    if found is not None and found.source in ("demo", "gguf") and config.quantization == AUTO and reason is not None:
        logger.info("%s: its weights are widened: %s", found.name, reason)
    return found


def widening_reason(config: EngineConfig, device_type: str | None = None) -> str | None:
    """Why no matrix of a GGUF file stays as it is with these settings, or None. `device_type` is that of another device
    than the settings'."""
    if config.quantization != AUTO:
        return f"quantization is {config.quantization}"
    if (place := device_type or torch_device(config.device).type) != "cpu":
        return f"no kernel reads the formats of GGUF files on {place}"
    if config.dtype not in (AUTO, "float32"):
        return f"kernels that read the formats of GGUF files have states in float32, not in {config.dtype}"
    return "kernels are reference, as configured" if config.kernels == "reference" else native_unsupported_reason(place)


def keeps_fp8(quantization: str, device_type: str, dtype: str) -> bool:
    """Whether the FP8 weights of a checkpoint stay in 8 bits; `dtype` is that of the states. `auto` widens them where
    no kernel reads them: on a CPU, and on a GPU with other states than bfloat16, which `fp8` refuses."""
    read = device_type == "cuda" and dtype == "bfloat16"
    if quantization == "fp8" and device_type == "cuda" and not read:
        raise ConfigError(
            "dtype", dtype, "bfloat16 with quantization fp8 on a GPU; quantization auto widens the weights"
        )
    return quantization == "fp8" or (quantization == "auto" and read)


def load_model(resolved: ResolvedModel, *, dtype: str, device: str, quantization: str = AUTO) -> PreTrainedModel:
    """The model in eval mode with frozen weights. `device` is cpu, cuda or auto. This is where a dtype of `auto` is
    decided: all that depends on it asks the loaded model. Whether matrices of a GGUF file stay quantised was decided
    when it was found (`find_model`)."""
    if dtype not in DTYPE_CHOICES:
        raise ConfigError("dtype", dtype, f"one of {', '.join(DTYPE_CHOICES)}")
    if quantization not in QUANTIZATIONS:
        raise ConfigError("quantization", quantization, f"one of {', '.join(QUANTIZATIONS)}")
    place = torch_device(device)
    if resolved.gguf is not None:
        from tide_core.models.gguf.quantised import load_quantised

        # Elsewhere `find_model` widens the weights.
        assert place.type == "cpu"
        assert dtype in (AUTO, "float32")
        return load_quantised(resolved.path, resolved.gguf)
    scheme = fp8_scheme(resolved.path)
    named_dtype = chosen_dtype(dtype, place.type, resolved.path)
    chosen, keep = TORCH_DTYPES[named_dtype], keeps_fp8(quantization, place.type, named_dtype)
    if quantization == "fp8" and place.type == "cpu":
        logger.warning("quantization fp8 on a cpu: no kernel reads 8 bits there, every product widens its matrix first")
    if scheme is not None and not keep and quantization == AUTO:
        where = "on a cpu" if place.type == "cpu" else f"with states in {named_dtype}"
        logger.info("%s: its FP8 weights are widened to %s: no kernel reads them %s", resolved.name, named_dtype, where)
    try:
        with _quiet():
            model, fp8 = None, keep if scheme is not None else quantization == "fp8"
            if scheme is not None or place.type == "cuda":
                model = load_streamed(resolved.path, resolved.name, dtype=chosen, place=place, scheme=scheme, fp8=fp8)
            return model if model is not None else _load_by_library(resolved, chosen, place, fp8=fp8)
    except (ModelError, ConfigError):
        raise
    except Exception as error:
        # from_pretrained raises many types, from KeyError to SafetensorError, a device torch.OutOfMemoryError; all mean
        # that the model cannot be loaded.
        raise ModelError(f"model {resolved.name}", one_line(error), "a model transformers can load") from error


def _load_by_library(resolved: ResolvedModel, dtype: torch.dtype, place: torch.device, *, fp8: bool) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        resolved.path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        # Other shapes are then reported to check_keys, which names them.
        ignore_mismatched_sizes=True,
    )
    check_keys(resolved.name, info)
    if fp8:
        quantise_layers(model, place)
    model = model.to(place)
    model.requires_grad_(False)
    return model.eval()


def load_tokenizer(resolved: ResolvedModel) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(resolved.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"tokenizer of {resolved.name}", one_line(error), "one transformers can load") from error


def fingerprint(resolved: ResolvedModel, weights_sha256: str | None = None) -> str:
    """SHA-256 over the digests of config.json and of all weights; it does not depend on the path.

    Reading the weights takes about 0.7 s per GB; pass the `weights_sha256` of `identify` to avoid that."""
    try:
        config = model_cache.sha256(resolved.path / "config.json")
    except OSError as error:
        raise ModelError("model folder", resolved.path, f"readable files: {error.strerror or error}") from error
    return hashlib.sha256(f"{config} {weights_sha256 or weights_digest(resolved)}".encode()).hexdigest()


def torch_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in DEVICES:
        raise ConfigError("device", device, f"one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", device, "cpu or auto: torch sees no CUDA device here")
    return torch.device(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports; errors are raised."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
