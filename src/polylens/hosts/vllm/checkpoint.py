"""The base model's own parameters, read from its checkpoint when they are asked for.

vLLM packs its weights for the machine and drops the plain ones, yet DoRA's norms, biases and the proof that a layer
of vLLM's is the one an adapter was trained on need them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open

from polylens.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable


class Checkpoint:
    """The safetensors files of a model. rename: from a module path as files have it to the loaded model's."""

    def __init__(self, source: str, rename: Callable[[str], str]) -> None:
        """Raises ModelLoadError where `source` (a folder, or a hub id fetched before) has no safetensors files."""
        folder = _folder(source)
        self._file_of: dict[str, Path] = {}
        names: dict[str, list[str]] = defaultdict(list)
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as content:
                for stored in content.keys():  # noqa: SIM118
                    self._file_of[stored] = file
        if not self._file_of:
            raise ModelLoadError(f"model {source!r} has no safetensors files, by which its layers are told apart")
        for stored in self._file_of:
            path, _, role = stored.rpartition(".")
            names[f"{rename(path)}.{role}" if role in ("weight", "bias") else rename(stored)].append(stored)
        # Several stored tensors of one name are the parts of one parameter (experts, say): not read here.
        self._shared: dict[str, str] = {}
        self._stored = {name: found[0] for name, found in names.items() if len(found) == 1}

    def share(self, names: Iterable[str]) -> None:
        """Let `names`, which are one parameter of the model, be read from whichever of them the files have."""
        names = tuple(names)
        stored = next((self._stored[name] for name in names if name in self._stored), None)
        if stored is not None:
            self._shared.update(dict.fromkeys(names, stored))

    def stored_name(self, name: str) -> str | None:
        """What the files call the parameter `name` of the loaded model; None where that is not one tensor."""
        return self._stored.get(name)

    def read(self, name: str) -> torch.Tensor | None:
        """The parameter `name`, as stored, on the CPU."""
        stored = self._stored.get(name, self._shared.get(name))
        if stored is None:
            return None
        with safe_open(self._file_of[stored], framework="pt") as content:
            return content.get_tensor(stored)

    def rows(self, name: str, ranges: list[slice]) -> torch.Tensor | None:
        """Some rows of the parameter `name`, without reading the others."""
        stored = self._stored.get(name, self._shared.get(name))
        if stored is None:
            return None
        with safe_open(self._file_of[stored], framework="pt") as content:
            part = content.get_slice(stored)
            return torch.cat([part[rows] for rows in ranges])


class StoredParameters(Mapping[str, torch.Tensor]):
    """The parameters of an outlined model with their values: read when looked up, and not kept.

    A parameter of which the files have no tensor of the same shape stays the outline's own, without values. outline:
    the parameters without values; two names are one parameter if they are one object there.
    """

    def __init__(self, outline: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
        self.outline = outline
        self._checkpoint = checkpoint
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in outline.items():
            names[id(parameter)].append(name)
        for shared in names.values():
            if len(shared) > 1:
                checkpoint.share(shared)

    def __getitem__(self, name: str) -> torch.Tensor:
        own = self.outline[name]
        value = self._checkpoint.read(name)
        return own if value is None or value.shape != own.shape else value

    def __contains__(self, name: object) -> bool:
        return name in self.outline

    def __iter__(self) -> Iterator[str]:
        return iter(self.outline)

    def __len__(self) -> int:
        return len(self.outline)


def _folder(source: str) -> Path:
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return path
    try:
        return Path(snapshot_download(source, local_files_only=True, allow_patterns=["*.safetensors", "*.json"]))
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelLoadError(f"the files of model {source!r} are not on this machine") from error
