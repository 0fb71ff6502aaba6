"""What the worker found that it cannot adapt, told to the front process, so that an adapter fails before it is queued.

Both run on one machine, and know the same model: through a file of `disk_cache`, written anew at every start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from polylens.disk_cache import DiskCache
from polylens.errors import AdapterMismatchError
from polylens.hosts.vllm.seams import vllm_version

VERSION = 1


def tell_refused(model_config: Any, refused: Mapping[str, str]) -> None:
    """Called by the worker when it has its model."""
    DiskCache("vllm-refused", VERSION).store(_facts(model_config), dict(refused))


def told_refused(model_config: Any) -> Mapping[str, str]:
    """Layers that the worker refuses -> why. Empty where nothing was told: the worker then refuses by itself."""
    return DiskCache("vllm-refused", VERSION).load(_facts(model_config), dict) or {}


def _facts(model_config: Any) -> dict[str, Any]:
    config = model_config.hf_config.to_dict()
    return {"model": str(model_config.model), "config": config, "vllm": vllm_version()}


def check_layers(layers: Iterable[str], refused: Mapping[str, str], name: str) -> None:
    """Raise AdapterMismatchError if adapter `name`, which changes `layers`, could not be applied in full."""
    problems = tuple(f"{layer}: {refused[layer]}" for layer in layers if layer in refused)
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise AdapterMismatchError(
            f"adapter {name!r} changes what polylens does not adapt inside vLLM: {problems[0]}{more}", problems
        )
