"""Load an adapter onto a model: read, check, digest, cast. All of it or nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from polylens.adapters.changes import change_of
from polylens.adapters.combine import Combination, combine_fits
from polylens.adapters.digest import digest_fits
from polylens.adapters.finite import all_finite
from polylens.adapters.fit import Fit, fit_adapter, require_fit
from polylens.adapters.layer_fit import LayerFit
from polylens.adapters.read import read_adapter
from polylens.core import BASE_NAME, Adapter, Change, Component, Delta, Digests, LayerKind, Replacement, with_tensors
from polylens.errors import AdapterFormatError, AdapterMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from polylens.core import ModelLayers

    AdapterPath = str | Path | Combination
    """Where an adapter comes from: a folder, a hub id, or other adapters with weights."""

    Pack = Callable[[Mapping[str, Change], torch.device | str], tuple[torch.Tensor, Mapping[str, Change]]]
    """Copies deltas into one buffer on a device and returns it, and the deltas as views of it (`lora.arena.pack`)."""

MAX_ADAPTER_NAME_CHARS = 200
"""Longest adapter name: names go into logs, tables and request fields."""


@dataclass(frozen=True)
class ComponentReport:
    """What an adapter does to one component. ranks and scalings: the distinct values of factors, ascending.

    num_replaced: layers of which it replaces parameters or embedding rows.
    """

    num_layers: int
    num_tensors: int
    num_parameters: int
    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    num_replaced: int = 0


@dataclass(frozen=True)
class LoadReport:
    """The answer to a load: what was applied where. No tensor is ever left over.

    changed: False if the name already held the same content. no_effect: layers that the model never uses
    for its output, so their deltas do nothing. warnings: odd, but of no effect on what is applied.
    processing: what of tokenizer, chat template and picture settings its folder has of its own.
    num_copies: tensors of the file that are the base model's own or repeat others, and, on a text model alone, those
    of a vision part: nothing is to be done for them.
    """

    name: str
    source: str
    components: Mapping[Component, ComponentReport]
    digests: Digests
    num_bytes: int
    no_effect: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    changed: bool = True
    num_copies: int = 0
    processing: tuple[str, ...] = ()

    @property
    def num_tensors(self) -> int:
        """Of the file: those applied and those that change nothing."""
        return sum(part.num_tensors for part in self.components.values()) + self.num_copies

    def unchanged(self) -> LoadReport:
        """This report, for a load that found its content already there."""
        return replace(self, changed=False)

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are the field names."""
        plain = asdict(self)
        plain["components"] = {str(component): asdict(part) for component, part in self.components.items()}
        return plain


def load_adapter(
    path: AdapterPath,
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
    source = str(path)
    fit = _combined_fit(path, layers) if isinstance(path, Combination) else read_and_fit(path, layers)
    deltas: Mapping[str, Change] = {part.spec.name: change_of(part, layers, dtype) for part in fit.layers}
    _check_cast(deltas, dtype, source)
    deltas, num_bytes = _place(deltas, device, pack)
    digests = digest_fits(fit.layers)
    adapter = Adapter(
        name=name,
        source=source,
        deltas=deltas,
        digests=digests,
        num_bytes=num_bytes,
        special=any(is_special(change, layers) for change in deltas.values()),
        undivided=any(layers.specs[name].kind is LayerKind.SHARED for name in deltas),
        num_more_tokens=max((_num_more_tokens(change, layers) for change in deltas.values()), default=0),
    )
    report = LoadReport(
        name=name,
        source=source,
        components=component_reports(fit.layers),
        digests=digests,
        num_bytes=num_bytes,
        no_effect=tuple(layer for layer in deltas if layer in no_effect),
        warnings=fit.warnings,
        num_copies=fit.num_copies,
    )
    return adapter, report


def read_and_fit(path: str | Path, layers: ModelLayers) -> Fit:
    """The adapter's files matched to the model's layers, all of them. Raises AdapterError."""
    files = read_adapter(path)
    fit = fit_adapter(files.tensors, files.options, layers)
    require_fit(fit, files.source, files.options, layers)
    return fit


def _combined_fit(combination: Combination, layers: ModelLayers) -> Fit:
    fits = [(weight, read_and_fit(path, layers)) for path, weight in combination.parts]
    combined = combine_fits([(weight, fit.layers) for weight, fit in fits], str(combination))
    warnings = tuple(dict.fromkeys(warning for _, fit in fits for warning in fit.warnings))
    return Fit(combined, (), (), warnings, sum(fit.num_copies for _, fit in fits))


def check_adapter_name(name: str) -> None:
    """Raise AdapterFormatError unless `name` is a printable string without spaces at its ends, and not the base's."""
    if not isinstance(name, str) or not name or len(name) > MAX_ADAPTER_NAME_CHARS:
        raise AdapterFormatError(f"an adapter name must be a string of 1 to {MAX_ADAPTER_NAME_CHARS} characters")
    if not name.isprintable() or name != name.strip():
        raise AdapterFormatError(f"adapter name {name!r} has unprintable characters, or spaces at its ends")
    if name == BASE_NAME:
        raise AdapterFormatError(f"the name {name!r} means no adapter; give this adapter another name")


def component_reports(fits: Sequence[LayerFit]) -> dict[Component, ComponentReport]:
    """One report a component that has deltas, in the order of `Component`."""
    reports = {}
    for component in Component:
        members = [fit for fit in fits if fit.spec.component is component]
        if members:
            reports[component] = ComponentReport(
                num_layers=len(members),
                num_tensors=sum(fit.num_tensors for fit in members),
                num_parameters=sum(fit.num_parameters for fit in members),
                ranks=tuple(sorted({fit.rank for fit in members if fit.rank})),
                scalings=tuple(sorted({fit.scaling for fit in members if fit.rank})),
                num_replaced=sum(1 for fit in members if fit.values or fit.token_ids),
            )
    return reports


def is_special(change: Change, layers: ModelLayers) -> bool:
    """Whether a change is more than plain factors of a linear layer."""
    return type(change) is not Delta or layers.specs[change.layer].kind not in (LayerKind.LINEAR, LayerKind.MATMUL)


def _num_more_tokens(change: Change, layers: ModelLayers) -> int:
    spec = layers.specs[change.layer]
    if spec.kind is not LayerKind.EMBEDDING or not isinstance(change, Replacement) or change.weight is None:
        return 0
    return change.weight.shape[0] - spec.in_features


def _place(
    deltas: Mapping[str, Change], device: torch.device | str, pack: Pack | None
) -> tuple[Mapping[str, Change], int]:
    """The deltas on `device`, and the bytes they take there."""
    if pack is not None:
        buffer, packed = pack(deltas, device)
        return packed, buffer.nbytes
    moved = {
        name: with_tensors(change, {field: tensor.to(device) for field, tensor in change.tensors().items()})
        for name, change in deltas.items()
    }
    return moved, sum(tensor.nbytes for change in moved.values() for tensor in change.tensors().values())


def _check_cast(deltas: Mapping[str, Change], dtype: torch.dtype, source: str) -> None:
    """The file's values are finite; a narrower dtype (float16) may not hold them."""
    for change in deltas.values():
        if not all(all_finite(tensor) for tensor in change.tensors().values()):
            problem = f"{change.layer}: values too large for {dtype}"
            raise AdapterMismatchError(f"adapter {source!r}: {problem}; run the model in float32", (problem,))
