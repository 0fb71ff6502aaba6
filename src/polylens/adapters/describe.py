"""Everything about an adapter that can be told without running it: what `polylens inspect` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from polylens.adapters.digest import digest_fits
from polylens.adapters.fit import Fit, fit_adapter
from polylens.adapters.load import component_reports
from polylens.adapters.options import Refusal, parse_options, refusals
from polylens.adapters.pairs import pair_tensors
from polylens.adapters.processing_files import read_processing_files
from polylens.adapters.read import PROCESSING_FILES, find_adapter, foreign_weights, read_config, read_tensors
from polylens.errors import AdapterFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from polylens.adapters.load import ComponentReport
    from polylens.adapters.options import LoraOptions
    from polylens.core import Component, Digests, ModelLayers

NO_MODEL = "unknown, give --model"
"""What stands for a component or digest that only a model's layers can tell: names are not guessed at."""


@dataclass(frozen=True)
class LayerDescription:
    """One module of the file. layer, component and scaling are None where no layer of a model is known for it."""

    module: str
    rank: int
    num_parameters: int
    layer: str | None = None
    component: Component | None = None
    scaling: float | None = None


@dataclass(frozen=True, eq=False)
class AdapterDescription:
    """An adapter as its files are, and how it fits a model if one was given.

    loads: whether `load_adapter` would take it; None without a model and nothing wrong in the files.
    options: None if adapter_config.json has values out of range (told in `problems`).
    refused: options, or tensors of options, that are not applied. problems: everything else that is wrong.
    """

    path: str
    config: Mapping[str, Any]
    options: LoraOptions | None
    num_tensors: int
    num_parameters: int
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    layers: tuple[LayerDescription, ...]
    refused: tuple[Refusal, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    loads: bool | None
    processing_files: tuple[str, ...] = ()
    """Files beside the adapter of how conversations become tokens and pixels; some may say what the model's say."""
    model_type: str | None = None
    components: Mapping[Component, ComponentReport] | None = None
    digests: Digests | None = None
    """Of the deltas a load would apply; None without a model, where it would be refused, and where the file holds
    whole weights, as those that are the model's own are no part of it and the model's are not read here."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`: keys as the fields, `components` and `digests` `NO_MODEL` without a model."""
        unknown = NO_MODEL if self.model_type is None else None
        return {
            "path": self.path,
            "loads": self.loads,
            "options": None if self.options is None else asdict(self.options),
            "num_tensors": self.num_tensors,
            "num_parameters": self.num_parameters,
            "dtypes": list(self.dtypes),
            "ranks": list(self.ranks),
            "processing_files": list(self.processing_files),
            "model_type": self.model_type,
            "components": unknown
            if self.components is None
            else {str(component): asdict(report) for component, report in self.components.items()},
            "digests": unknown if self.digests is None else asdict(self.digests),
            "layers": [_layer_json(layer, self.model_type is not None) for layer in self.layers],
            "refused": [asdict(refusal) for refusal in self.refused],
            "problems": list(self.problems),
            "warnings": list(self.warnings),
        }


def describe_adapter(path: str | Path, layers: ModelLayers | None = None) -> AdapterDescription:
    """Describe the adapter at `path`, against the model of `layers` if given.

    What is wrong with the adapter is told in the description. Raises AdapterFormatError only where there is
    nothing to describe: no such folder, an unreadable config or weights file.
    """
    folder = find_adapter(path)
    config = read_config(folder)
    tensors = read_tensors(folder)
    refused = refusals(config) + tuple(Refusal(name, "weights beside the adapter") for name in foreign_weights(folder))
    options, wrong = _options(config)
    fit = fit_adapter(tensors, options, layers) if options is not None and layers is not None else None
    paired = pair_tensors(tensors)
    refused += paired.unsupported if fit is None else fit.unsupported
    problems = wrong + _unreadable(folder) + (paired.problems if fit is None else fit.problems)
    sound = not refused and not problems
    return AdapterDescription(
        path=str(path),
        config=config,
        options=options,
        num_tensors=len(tensors),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        dtypes=_dtypes(tensors),
        ranks=tuple(sorted({pair.rank for pair in paired.pairs})),
        layers=tuple(LayerDescription(p.module, p.rank, p.num_parameters) for p in paired.pairs)
        if fit is None
        else _fitted(fit),
        refused=refused,
        problems=problems,
        warnings=() if fit is None else fit.warnings,
        loads=None if fit is None and sound else sound,
        processing_files=tuple(name for name in PROCESSING_FILES if (folder / name).exists()),
        model_type=None if layers is None else layers.model_type,
        components=None if fit is None else component_reports(fit.layers),
        digests=digest_fits(fit.layers) if fit is not None and sound and not _has_whole(fit) else None,
    )


def _unreadable(folder: Path) -> tuple[str, ...]:
    try:
        read_processing_files(folder)
    except AdapterFormatError as error:
        return (str(error),)
    return ()


def _has_whole(fit: Fit) -> bool:
    return any(part.values for part in fit.layers)


def _options(config: Mapping[str, Any]) -> tuple[LoraOptions | None, tuple[str, ...]]:
    try:
        return parse_options(config), ()
    except AdapterFormatError as error:
        return None, (str(error),)


def _dtypes(tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    return tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))


def _fitted(fit: Fit) -> tuple[LayerDescription, ...]:
    return tuple(
        LayerDescription(
            module=part.trained_name,
            rank=part.rank,
            num_parameters=part.num_parameters,
            layer=part.spec.name,
            component=part.spec.component,
            scaling=part.scaling,
        )
        for part in fit.layers
    )


def _layer_json(layer: LayerDescription, has_model: bool) -> dict[str, Any]:
    plain = asdict(layer)
    if not has_model:
        plain["component"] = NO_MODEL
    return plain
