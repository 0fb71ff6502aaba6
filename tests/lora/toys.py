"""Toy models and adapters: small enough to check every number against a merged copy, in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from polylens.core import Adapter, Component, Delta, Digests, LayerKind, LayerSpec
from polylens.models.row_rules import ItemSize

NO_DIGESTS = Digests("", "", "", "", "")


def make_delta(
    layer: str, in_features: int, out_features: int, rank: int, seed: int, dtype: torch.dtype = torch.float64
) -> Delta:
    """A random delta about as large as the weight it changes."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, in_features, generator=generator, dtype=torch.float64) / in_features**0.5
    b = torch.randn(out_features, rank, generator=generator, dtype=torch.float64)
    return Delta(layer, a.to(dtype), b.to(dtype), 0.3 + 0.1 * (seed % 5))


def make_adapter(
    name: str, specs: Sequence[LayerSpec], seed: int, rank: int = 3, dtype: torch.dtype = torch.float64
) -> Adapter:
    """An adapter with a delta on each of the layers; ranks differ from layer to layer."""
    deltas = {
        spec.name: make_delta(
            spec.name, spec.in_features, spec.out_features, rank + index % 2, 100 * seed + index, dtype
        )
        for index, spec in enumerate(specs)
    }
    return Adapter(name=name, source="toy", deltas=deltas, digests=Digests(*[name] * 5), num_bytes=0)


def specs_of(model: nn.Module, components: Mapping[str, Component]) -> list[LayerSpec]:
    """Specs of all `nn.Linear` and bare 2-D parameters; the component by the first part of the name."""
    found = [
        LayerSpec(name, components[name.split(".")[0]], LayerKind.LINEAR, module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    linear = {f"{spec.name}.{leaf}" for spec in found for leaf in ("weight", "bias")}
    for name, parameter in model.named_parameters():
        if name not in linear and parameter.dim() == 2:
            component = components[name.split(".")[0]]
            found.append(LayerSpec(name, component, LayerKind.MATMUL, parameter.shape[0], parameter.shape[1]))
    return found


def merged(model: nn.Module, adapter: Adapter | None) -> nn.Module:
    """A copy with the adapter's deltas added to the weights: the reference, one adapter alone."""
    clone = copy.deepcopy(model)
    for name, delta in (adapter.deltas if adapter else {}).items():
        update = (delta.scaling * (delta.b.double() @ delta.a.double())).detach()
        parameters = dict(clone.named_parameters())
        with torch.no_grad():
            if name in parameters:
                parameters[name] += update.T.to(parameters[name].dtype)
            else:
                parameters[f"{name}.weight"] += update.to(parameters[f"{name}.weight"].dtype)
    return clone


class TextToy(nn.Module):
    """Token rows through two blocks and a head; (1, t, d) or (t, d) in. Rows do not mix."""

    def __init__(self, width: int = 6, vocab: int = 9) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 10), nn.GELU(), nn.Linear(10, width, bias=False)) for _ in range(2)]
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor, wanted: Sequence[int] | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        if wanted is not None:
            x = x[..., list(wanted), :]
        return self.lm_head(x)


TEXT_COMPONENTS = {"blocks": Component.LANGUAGE_MODEL, "lm_head": Component.LANGUAGE_MODEL}
TOWER_COMPONENTS = {"tower": Component.VISION_TOWER, "connector": Component.CONNECTOR}


def mix(x: torch.Tensor) -> torch.Tensor:
    """Stand-in for attention: every row of one item or tile depends on all of them. (..., n, d)."""
    return x + x.mean(dim=-2, keepdim=True)


class PackedTower(nn.Module):
    """Items of different patch counts packed in one (patches, d); the connector joins 4 patches to a row."""

    MERGE = 4

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.tower = nn.ModuleList([nn.Linear(width, 2 * width), nn.Linear(2 * width, width)])
        self.connector = nn.Linear(self.MERGE * width, 7)

    def forward(self, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        patches = [item.shape[0] for item in items]
        x = self.tower[0](torch.cat(list(items)))
        x = torch.cat([mix(part) for part in x.split(patches)])
        x = self.tower[1](torch.tanh(x))
        y = self.connector(x.reshape(-1, self.connector.in_features))
        return list(y.split([n // self.MERGE for n in patches]))


class TiledTower(nn.Module):
    """Tiles (n, rows, d) with a class row added in the tower and dropped before the connector, a bare parameter."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.tower = nn.ModuleList([nn.Linear(width, 8), nn.Linear(8, width)])
        self.connector = Projector(width, 7)

    def forward(self, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tiles = [item.shape[0] for item in items]
        x = torch.cat(list(items))
        x = torch.cat([torch.ones_like(x[:, :1]), x], dim=1)
        x = mix(self.tower[0](x))
        x = self.tower[1](torch.tanh(x))[:, 1:]
        return list(self.connector(x).split(tiles))


class Projector(nn.Module):
    """Multiplies with a bare parameter, as Gemma 3's projector does."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight_io = nn.Parameter(torch.randn(in_features, out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.tanh(x), self.weight_io).type_as(x)


class PaddedTower(nn.Module):
    """Items padded to the largest, (items, most patches, d); padding is zero and is cut off at the end."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.tower = nn.Linear(width, 8)
        self.connector = nn.Linear(8, 7)

    def forward(self, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        x = nn.utils.rnn.pad_sequence(list(items), batch_first=True)
        y = self.connector(torch.tanh(self.tower(x)))
        return [y[k, : item.shape[0]] for k, item in enumerate(items)]


class PerCallTower(nn.Module):
    """A packed tower whose connector runs once per item, in order."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.tower = nn.Linear(width, 8)
        self.connector = nn.Linear(8, 7)
        self.calls_left_out = 0
        self.calls_too_many = 0

    def forward(self, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        x = torch.tanh(self.tower(torch.cat(list(items))))
        parts = list(x.split([item.shape[0] for item in items]))
        parts = parts[: len(parts) - self.calls_left_out] + parts[:1] * self.calls_too_many
        return [self.connector(mix(part)) for part in parts]


def packed_size(patches: int) -> ItemSize:
    return ItemSize(num_patches=patches, num_tiles=1, num_tokens=patches // PackedTower.MERGE)


def tiled_size(tiles: int, tokens: int) -> ItemSize:
    return ItemSize(num_patches=tiles, num_tiles=tiles, num_tokens=tokens)
