"""Load an adapter onto a model: read, check, digest, cast. All of it or nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from polylens.adapters.digest import digest_fits
from polylens.adapters.fit import LayerFit, fit_adapter, require_fit
from polylens.adapters.read import read_adapter
from polylens.core import Adapter, Component, Delta, Digests
from polylens.errors import AdapterFormatError, AdapterMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from polylens.core import ModelLayers

    Pack = Callable[[Mapping[str, Delta], torch.device | str], tuple[torch.Tensor, Mapping[str, Delta]]]
    """Copies deltas into one buffer on a device and returns it, and the deltas as views of it (`lora.arena.pack`)."""

MAX_ADAPTER_NAME_CHARS = 200
"""Longest adapter name: names go into logs, tables and request fields."""


@dataclass(frozen=True)
class ComponentReport:
    """What an adapter adds to one component. ranks and scalings: the distinct values, ascending."""

    num_layers: int
    num_tensors: int
    num_parameters: int
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]


@dataclass(frozen=True)
class LoadReport:
    """The answer to a load: what was applied where. No tensor is ever left over.

    changed: False if the name already held the same content. no_effect: layers that the model never uses
    for its output, so their deltas do nothing. warnings: odd, but of no effect on what is applied.
    """

    name: str
    source: str
    components: Mapping[Component, ComponentReport]
    digests: Digests
    num_bytes: int
    no_effect: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    changed: bool = True

    @property
    def num_tensors(self) -> int:
        return sum(part.num_tensors for part in self.components.values())

    def unchanged(self) -> LoadReport:
        """This report, for a load that found its content already there."""
        return replace(self, changed=False)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are the field names."""
        plain = asdict(self)
        plain["components"] = {str(component): asdict(part) for component, part in self.components.items()}
        return plain


def load_adapter(
    path: str | Path,
    layers: ModelLayers,
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device | str,
    no_effect: Collection[str] = (),
    pack: Pack | None = None,
) -> tuple[Adapter, LoadReport]:
    """Read the adapter at `path` and make it ready for the model of `layers`, in `dtype` on `device`.

    no_effect: layers whose output the model does not use. pack: puts the deltas' tensors into one buffer.
    Raises AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError; nothing is loaded then.
    """
    check_adapter_name(name)
    files = read_adapter(path)
    fit = fit_adapter(files.tensors, files.options, layers)
    require_fit(fit, files.source, files.options, layers)
    deltas: Mapping[str, Delta] = {part.spec.name: _delta(part, dtype) for part in fit.layers}
    _check_cast(deltas, dtype, files.source)
    deltas, num_bytes = _place(deltas, device, pack)
    digests = digest_fits(fit.layers)
    adapter = Adapter(name=name, source=files.source, deltas=deltas, digests=digests, num_bytes=num_bytes)
    report = LoadReport(
        name=name,
        source=files.source,
        components=component_reports(fit.layers),
        digests=digests,
        num_bytes=num_bytes,
        no_effect=tuple(layer for layer in deltas if layer in no_effect),
        warnings=fit.warnings,
    )
    return adapter, report


def check_adapter_name(name: str) -> None:
    """Raise AdapterFormatError unless `name` is a printable string without spaces at its ends."""
    if not isinstance(name, str) or not name or len(name) > MAX_ADAPTER_NAME_CHARS:
        raise AdapterFormatError(f"an adapter name must be a string of 1 to {MAX_ADAPTER_NAME_CHARS} characters")
    if not name.isprintable() or name != name.strip():
        raise AdapterFormatError(f"adapter name {name!r} has unprintable characters, or spaces at its ends")


def component_reports(fits: Sequence[LayerFit]) -> dict[Component, ComponentReport]:
    """One report a component that has deltas, in the order of `Component`."""
    reports = {}
    for component in Component:
        members = [fit for fit in fits if fit.spec.component is component]
        if members:
            reports[component] = ComponentReport(
                num_layers=len(members),
                num_tensors=2 * len(members),
                num_parameters=sum(fit.a.numel() + fit.b.numel() for fit in members),
                ranks=tuple(sorted({fit.a.shape[0] for fit in members})),
                scalings=tuple(sorted({fit.scaling for fit in members})),
            )
    return reports


def _delta(fit: LayerFit, dtype: torch.dtype) -> Delta:
    a, b = (factor.to(dtype).contiguous() for factor in (fit.a, fit.b))
    return Delta(layer=fit.spec.name, a=a, b=b, scaling=fit.scaling)


def _place(
    deltas: Mapping[str, Delta], device: torch.device | str, pack: Pack | None
) -> tuple[Mapping[str, Delta], int]:
    """The deltas on `device`, and the bytes they take there."""
    if pack is not None:
        buffer, packed = pack(deltas, device)
        return packed, buffer.nbytes
    moved = {name: replace(delta, a=delta.a.to(device), b=delta.b.to(device)) for name, delta in deltas.items()}
    return moved, sum(delta.a.nbytes + delta.b.nbytes for delta in moved.values())


def _check_cast(deltas: Mapping[str, Delta], dtype: torch.dtype, source: str) -> None:
    """The file's values are finite; a narrower dtype (float16) may not hold them."""
    for delta in deltas.values():
        if not bool(torch.isfinite(delta.a).all() and torch.isfinite(delta.b).all()):
            problem = f"{delta.layer}: values too large for {dtype}"
            raise AdapterMismatchError(f"adapter {source!r}: {problem}; run the model in float32", (problem,))
