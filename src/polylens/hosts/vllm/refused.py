"""What the worker found that it cannot adapt, told to the front process, so that an adapter fails before it is queued.

Both run on one machine, and know the same model: through a file of `disk_cache`, written anew at every start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from polylens.disk_cache import CACHE_VARIABLE, DiskCache
from polylens.errors import AdapterMismatchError, ModelLoadError
from polylens.hosts.vllm.seams import vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VERSION = 2

MODALITIES = ("image", "video", "audio")
"""Of which vLLM may be told that no request has any."""


def tell_refused(config: VllmConfig, refused: Mapping[str, str]) -> None:
    """Called by the worker when it has its model."""
    _cache().store(_facts(config), dict(refused))


def told_refused(config: VllmConfig) -> Mapping[str, str]:
    """Layers that the worker refuses -> why. Raises ModelLoadError where it was not told: an adapter that only the
    worker finds to be wrong would end the engine."""
    told: Mapping[str, str] | None = _cache().load(_facts(config), dict)
    if told is None:
        raise ModelLoadError(
            f"vLLM's worker could not tell which layers take adapters: let ${CACHE_VARIABLE} name a folder that all of "
            "vLLM's processes can write to"
        )
    return told


def _cache() -> DiskCache:
    return DiskCache("vllm-refused", VERSION)


def _facts(config: VllmConfig) -> dict[str, Any]:
    """What may differ between two engines of one machine, and what they refuse with it."""
    model = config.model_config
    media = model.multimodal_config
    return {
        "model": str(model.model),
        "config": model.hf_config.to_dict(),
        "vllm": vllm_version(),
        "dtype": str(model.dtype),
        # Parts of the model that no request can need are not built.
        "limits": None if media is None else {name: media.get_limit_per_prompt(name) for name in MODALITIES},
    }


def check_layers(layers: Iterable[str], refused: Mapping[str, str], name: str) -> None:
    """Raise AdapterMismatchError if adapter `name`, which changes `layers`, could not be applied in full."""
    problems = tuple(f"{layer}: {refused[layer]}" for layer in layers if layer in refused)
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise AdapterMismatchError(
            f"adapter {name!r} changes what polylens does not adapt inside vLLM: {problems[0]}{more}", problems
        )
