"""Content hashes of adapters: what caches are keyed by, so that a name never decides a cache hit."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import torch

from polylens.core import Component, Digests

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polylens.adapters.layer_fit import LayerFit


def digest_fits(fits: Iterable[LayerFit]) -> Digests:
    """Hash an adapter's deltas: layer name in the loaded model, scaling, every tensor's role, shape and values.

    Values as float32, as the file has them, before any cast to the engine's dtype. So the same numbers under
    another naming generation, file format or wider dtype have the same digest.
    """
    by_component: dict[Component, list[LayerFit]] = {component: [] for component in Component}
    for fit in fits:
        by_component[fit.spec.component].append(fit)
    parts = {component: _digest(members) for component, members in by_component.items()}
    tower, connector = parts[Component.VISION_TOWER], parts[Component.CONNECTOR]
    language = parts[Component.LANGUAGE_MODEL]
    vision = _combine(tower, connector)
    return Digests(
        vision_tower=tower,
        connector=connector,
        language_model=language,
        vision=vision,
        whole=_combine(tower, connector, language),
    )


def _digest(fits: list[LayerFit]) -> str:
    if not fits:
        return ""
    digest = hashlib.sha256()
    for fit in sorted(fits, key=lambda fit: fit.spec.name):
        name = fit.spec.name.encode()
        digest.update(struct.pack("<QdQ", len(name), fit.scaling, len(fit.token_ids)) + name)
        digest.update(struct.pack(f"<{len(fit.token_ids)}Q", *fit.token_ids))
        for role, tensor in sorted(fit.tensors().items()):
            digest.update(role.encode() + struct.pack(f"<{tensor.dim() + 1}Q", tensor.dim(), *tensor.shape))
            digest.update(tensor.to(torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def _combine(*parts: str) -> str:
    """A hash over component digests; "" if no component has a delta."""
    if not any(parts):
        return ""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()
