"""From module paths as an adapter's file gives them to the layers of the loaded model."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from polylens.core import EXPERT_KINDS, Component, LayerKind

if TYPE_CHECKING:
    from polylens.core import LayerSpec, ModelLayers

LOOSE_PREFIXES = ("module.", "base_model.model.", "model.")
"""What data-parallel wrappers, PEFT around PEFT, and training with one wrapper more leave in front."""

_TEXT_PREFIXES = (*LOOSE_PREFIXES, "language_model.", "text_model.")
"""What stands in front of a text model's own paths, in a causal language model and in a model around it."""

_OF_VISION = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|\w+_vision|image_\w+|vit|patch_\w+|connector|aligner|merger|\w*projector\w*)(?:\.|$)"
)
"""Paths of towers and connectors, as families call them."""

MAX_NEAREST = 2
"""How many near names a message gives."""

_OWNED = EXPERT_KINDS | {LayerKind.SHARED}
"""Kinds of layer that go by their own name as well as by that of the module that owns them."""

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Found:
    """The layer a path means. parameters: all layers, where these are the parameters of the module that it means."""

    spec: LayerSpec
    parameters: tuple[LayerSpec, ...] = ()


@dataclass(frozen=True)
class NotFound:
    """Why a path means no layer. `module_type` is set if it is a module that cannot take a delta."""

    reason: str
    module_type: str | None = None


class LayerNames:
    """Looks up layers of one loaded model by the paths adapters use."""

    def __init__(self, layers: ModelLayers) -> None:
        self._layers = layers
        self._targets: dict[str, list[LayerSpec]] = {}
        for spec in layers.specs.values():
            # PEFT names a bare parameter's factors after the module that owns it (`target_parameters`).
            self._targets.setdefault(spec.module, []).append(spec)
            if spec.kind in _OWNED:
                self._targets.setdefault(spec.name, []).append(spec)

    def find(self, module: str) -> Found | NotFound:
        """The one layer `module` means: under its own name, renamed, or without what wrappers add in front."""
        for spelling in self._spellings(module):
            hits = {path for path in spelling if path in self._targets}
            if len(hits) > 1:
                return NotFound(f"{module} may mean any of {', '.join(sorted(hits))}")
            if hits:
                return self._only(module, self._targets[hits.pop()])
        for spelling in self._spellings(module):
            for path in sorted(spelling):
                if path in self._layers.other_modules:
                    kind = self._layers.other_modules[path]
                    what = f"a {kind}, which takes no delta yet" if kind.isidentifier() else kind
                    return NotFound(f"{module} is {what}", kind)
        return NotFound(self._why_missing(module))

    def layer(self, module: str) -> LayerSpec | None:
        """The layer `module` means; None where there is none, or more than one."""
        for spelling in self._spellings(module):
            hits = {path for path in spelling if path in self._targets}
            if hits:
                specs = self._targets[hits.pop()]
                return specs[0] if not hits and len(specs) == 1 else None
        return None

    def is_of_missing_vision(self, module: str) -> bool:
        """Whether the model is a text model alone, and `module` the path of a tower or connector it does not have."""
        return not self._has_vision and _OF_VISION.search(module) is not None and self.layer(module) is None

    @cached_property
    def _has_vision(self) -> bool:
        return any(spec.component is not Component.LANGUAGE_MODEL for spec in self._layers.specs.values())

    @cached_property
    def _text_root(self) -> str | None:
        """The path of the text model: what owns the token embedding."""
        kinds = self._layers.specs.values()
        return next((spec.name.rpartition(".")[0] for spec in kinds if spec.kind is LayerKind.EMBEDDING), None)

    def experts(self, module: str) -> tuple[LayerSpec, ...]:
        """The parameters of the experts that `module` means; empty where it means none."""
        found = self.find(module)
        return found.parameters if isinstance(found, Found) and found.spec.kind in EXPERT_KINDS else ()

    def _only(self, module: str, specs: list[LayerSpec]) -> Found | NotFound:
        if all(spec.kind in _OWNED for spec in specs):
            return Found(specs[0], tuple(specs))
        if len(specs) > 1:
            listed = ", ".join(spec.name for spec in specs)
            return NotFound(f"{module} owns several parameters ({listed}); which one is meant cannot be told")
        return Found(specs[0])

    def _spellings(self, module: str) -> list[set[str]]:
        """Sets of paths to look for, surest first; inside one set no path is better than another."""
        rename = self._layers.rename
        bare = module
        stripped = set()
        while (shorter := _without_prefix(bare, LOOSE_PREFIXES)) != bare:
            bare = shorter
            stripped.add(bare)
        loose = {*stripped, f"model.{bare}"} - {module}
        spellings = [{rename(module), module}, {rename(path) for path in loose} | loose]
        if self._text_root is not None:
            # Saved from the causal language model alone, or from a vision-language model around this one.
            of_text = _stripped(module, _TEXT_PREFIXES)
            spellings.append({of_text, f"{self._text_root}.{of_text}"})
        return spellings

    def _why_missing(self, module: str) -> str:
        path = self._layers.rename(module)
        if reason := self._index_out_of_range(path):
            return f"{module}: {reason}"
        near = self._nearest(path)
        hint = f" (nearest: {', '.join(near)})" if near else ""
        return f"the model has no layer {module}{hint}"

    def _index_out_of_range(self, path: str) -> str | None:
        for index in _INDEX.finditer(path):
            key = (path[: index.start()], _INDEX.sub("N", path[index.end() :]))
            if key in self._last_index:
                last = self._last_index[key]
                return f"index {index.group()} of {key[0].rstrip('.')} is out of range (0 to {last})"
        return None

    @cached_property
    def _last_index(self) -> dict[tuple[str, str], int]:
        """(path before an index, path after it with later indices blanked) -> largest index the model has."""
        last: dict[tuple[str, str], int] = {}
        for path in self._targets:
            for index in _INDEX.finditer(path):
                key = (path[: index.start()], _INDEX.sub("N", path[index.end() :]))
                last[key] = max(last.get(key, 0), int(index.group()))
        return last

    @cached_property
    def _templates(self) -> dict[str, str]:
        """Paths with their indices blanked -> one path of that form."""
        return {_INDEX.sub("N", path): path for path in self._targets}

    def _nearest(self, path: str) -> list[str]:
        """Near names. Compared with indices blanked, so that a big model has a few dozen names, not thousands."""
        blanked = _INDEX.sub("N", path)
        if blanked not in self._nearest_memo:
            close = difflib.get_close_matches(blanked, self._templates, MAX_NEAREST, cutoff=0.6)
            self._nearest_memo[blanked] = sorted(close)
        return [self._with_indices(template, path) for template in self._nearest_memo[blanked]]

    def _with_indices(self, template: str, path: str) -> str:
        """`template` with the indices of `path`, if the model has that layer; else some layer of that form."""
        indices = iter(_INDEX.findall(path))
        filled = re.sub(r"(?<=\.)N(?=\.|$)", lambda _: next(indices, "N"), template)
        return filled if filled in self._targets else self._templates[template]

    @cached_property
    def _nearest_memo(self) -> dict[str, list[str]]:
        return {}


def _without_prefix(path: str, prefixes: tuple[str, ...]) -> str:
    """`path` without the first of the prefixes that it has, if any."""
    return path.removeprefix(next((prefix for prefix in prefixes if path.startswith(prefix)), ""))


def _stripped(path: str, prefixes: tuple[str, ...]) -> str:
    """`path` without all of the prefixes that it has, in any order."""
    while (shorter := _without_prefix(path, prefixes)) != path:
        path = shorter
    return path
