"""The probe on made-up towers, one for each way in which rows can be laid out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from polylens.core import Component, LayerKind, LayerSpec
from polylens.errors import RowRuleError
from polylens.models.features import ItemFeatures
from polylens.models.probe import CONTRAST_FACTOR, ProbeResult, probe_row_rules
from polylens.models.probe_hooks import ProbeLayer
from polylens.models.row_rules import RowRule

WIDTH = 8


@dataclass(frozen=True, eq=False)
class Item:
    tensors: dict[str, torch.Tensor]
    num_tokens: int


def packed_items(*num_patches: int, patches_per_token: int = 2) -> list[Item]:
    generator = torch.Generator().manual_seed(1)
    return [
        Item({"pixel_values": torch.randn(n, WIDTH, generator=generator)}, n // patches_per_token) for n in num_patches
    ]


def tiled_items(*num_tiles: int) -> list[Item]:
    """Every tile is 2 x 2 pixels of 8 channels' worth of numbers: four rows of WIDTH, two tokens."""
    generator = torch.Generator().manual_seed(1)
    return [Item({"pixel_values": torch.randn(n, 4, 2, 4, generator=generator)}, 2 * n) for n in num_tiles]


class Tower(nn.Module):
    """Subclasses compute the feature rows of a batch from its items' pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.project = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        raise NotImplementedError

    def encode(self, items: Sequence[Item]) -> list[ItemFeatures]:
        rows = self([item.tensors["pixel_values"] for item in items], [item.num_tokens for item in items])
        return [ItemFeatures(x) for x in rows]


def mix(x_td: torch.Tensor) -> torch.Tensor:
    """What attention does to the rows of one item: each sees all."""
    return torch.tanh(x_td + x_td.mean(0))


def pairs(x_td: torch.Tensor) -> torch.Tensor:
    return x_td.reshape(-1, 2 * x_td.shape[-1])


class Packed(Tower):
    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        counts = [len(x) for x in pixels]
        x = self.embed(torch.cat(pixels))
        x = self.block(torch.cat([mix(part) for part in x.split(counts)]))
        return list(self.project(pairs(x)).split(num_tokens))


class Tiled(Tower):
    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        x = self.embed(torch.cat(pixels).reshape(-1, 4, WIDTH))
        x = torch.cat([x.mean(1, keepdim=True), x], 1)  # a class row per tile, dropped later
        x = self.block(torch.stack([mix(tile) for tile in x]))[:, 1:]
        x = self.project(x.reshape(len(x), 2, 2 * WIDTH))
        return list(x.reshape(-1, WIDTH).split(num_tokens))


class Padded(Tower):
    """Tower padded to the longest item, connector on the real rows only."""

    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        x = nn.utils.rnn.pad_sequence(pixels, batch_first=True)
        x = self.block(self.embed(x))
        real = torch.cat([mix(row[: len(part)]) for row, part in zip(x, pixels, strict=True)])
        return list(self.project(pairs(real)).split(num_tokens))


class ConnectorPerCall(Packed):
    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        x = self.block(self.embed(torch.cat(pixels)))
        return [self.project(pairs(mix(part))) for part in x.split([len(x) for x in pixels])]


class TokenPooled(Tower):
    """Items are pooled to their own number of tokens before the connector."""

    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        x = self.block(self.embed(torch.cat(pixels))).split([len(x) for x in pixels])
        pooled = [
            nn.functional.adaptive_avg_pool1d(mix(part).T, 2 * n).T for part, n in zip(x, num_tokens, strict=True)
        ]
        return list(self.project(pairs(torch.cat(pooled))).split(num_tokens))


class Views(Tower):
    """Each item is seen whole, then in parts, if it has any: two calls of every layer."""

    def encode(self, items: Sequence[Item]) -> list[ItemFeatures]:
        whole = self._view([item.tensors["pixel_values"] for item in items])
        parts = [item.tensors.get("pixel_values_local", torch.empty(0, 4, 2, 4)) for item in items]
        seen = self._view(parts) if any(map(len, parts)) else parts
        return [ItemFeatures(torch.cat([w, p.reshape(-1, WIDTH)])) for w, p in zip(whole, seen, strict=True)]

    def _view(self, pixels: list[torch.Tensor]) -> list[torch.Tensor]:
        x = self.block(self.embed(torch.cat(pixels).reshape(-1, 4, WIDTH)))
        x = self.project(torch.stack([mix(tile) for tile in x]).reshape(len(x), 2, 2 * WIDTH))
        return [part.reshape(-1, WIDTH) for part in x.split([len(x) for x in pixels])]


def viewed_items(*num_parts: int) -> list[Item]:
    whole, parts = tiled_items(*[1] * len(num_parts)), tiled_items(*(max(n, 1) for n in num_parts))
    tensors = [
        {**item.tensors, **({"pixel_values_local": part.tensors["pixel_values"]} if n else {})}
        for item, part, n in zip(whole, parts, num_parts, strict=True)
    ]
    return [Item(pixels, 2 + 2 * n) for pixels, n in zip(tensors, num_parts, strict=True)]


class Interleaved(Packed):
    """`block` sees its rows sorted by content: no rule of counts explains that."""

    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        x = self.embed(torch.cat(pixels))
        order = torch.cat(pixels)[:, 0].argsort()
        x = self.block(x[order])[order.argsort()]
        x = torch.cat([mix(part) for part in x.split([len(x) for x in pixels])])
        return list(self.project(pairs(x)).split(num_tokens))


def probe(tower: Tower, *batches: list[Item], **options: object) -> ProbeResult:
    layers = [
        ProbeLayer(LayerSpec(name, Component.VISION_TOWER, LayerKind.LINEAR, m.in_features, m.out_features), m)
        for name, m in tower.named_modules()
        if isinstance(m, nn.Linear)
    ]
    return probe_row_rules(tower.encode, batches, layers, **options)  # type: ignore[arg-type]


PATCHES = packed_items(16, 32, 60)
POOLED = [Item(item.tensors, n) for item, n in zip(PATCHES, (5, 3, 10), strict=True)]


@pytest.mark.parametrize(
    ("make", "items", "expected"),
    [
        (Packed, PATCHES, {"embed": RowRule.PATCHES, "block": RowRule.PATCHES, "project": RowRule.PATCHES}),
        (
            Tiled,
            tiled_items(1, 3, 2),
            {"embed": RowRule.TILES, "block": RowRule.TILES, "project": RowRule.TILES},
        ),
        (Padded, PATCHES, {"embed": RowRule.IMAGES, "block": RowRule.IMAGES, "project": RowRule.PATCHES}),
        (
            ConnectorPerCall,
            PATCHES,
            # These items have one tile each, so a call a tile and a call an item are the same.
            {"embed": RowRule.PATCHES, "block": RowRule.PATCHES, "project": RowRule.PER_TILE},
        ),
        (Views, viewed_items(1, 3, 2), dict.fromkeys(("embed", "block", "project"), RowRule.VIEWS)),
        (Views, viewed_items(2, 0, 1), dict.fromkeys(("embed", "block", "project"), RowRule.VIEWS)),
        (TokenPooled, POOLED, {"embed": RowRule.PATCHES, "block": RowRule.PATCHES, "project": RowRule.TOKENS}),
    ],
)
def test_each_layout_gets_its_rule(make: Callable[[], Tower], items: list[Item], expected: dict[str, RowRule]) -> None:
    result = probe(make(), items)
    assert result.rules == expected
    assert result.mixed
    assert result.contrast >= CONTRAST_FACTOR
    assert result.worst_error <= 10 * result.noise_floor < 1e-3


def test_a_rule_that_divides_evenly_and_is_wrong_is_rejected_by_outputs() -> None:
    """Padded to 30 rows an item, 90 rows divide among patches 10, 20, 30 as 15, 30, 45: even, and wrong."""
    result = probe(Padded(), packed_items(10, 20, 30))
    assert result.rules == {"embed": RowRule.IMAGES, "block": RowRule.IMAGES, "project": RowRule.PATCHES}


@pytest.mark.parametrize(
    ("make", "items", "declared"),
    [
        (Packed, PATCHES, {"block": RowRule.TILES}),  # 108 rows divide evenly by three
        (Packed, PATCHES, {"block": RowRule.PER_CALL}),
        (Padded, packed_items(10, 20, 30), {"block": RowRule.PATCHES}),
        (Tiled, tiled_items(1, 3, 2), {"block": RowRule.IMAGES}),
        (Tiled, tiled_items(1, 2, 4), {"block": RowRule.IMAGES}),  # does not even divide
    ],
)
def test_a_planted_wrong_rule_is_rejected(
    make: Callable[[], Tower], items: list[Item], declared: dict[str, RowRule]
) -> None:
    result = probe(make(), items, declared=declared)
    assert result.rules["block"] is RowRule.UNPROVEN
    assert "block" in result.reasons
    assert not result.mixed
    assert RowRule.UNPROVEN not in (result.rules["embed"], result.rules["project"])


def test_a_right_declaration_is_tested_and_kept() -> None:
    result = probe(TokenPooled(), POOLED, declared={"proj": RowRule.TOKENS})
    assert result.rules["project"] is RowRule.TOKENS
    assert result.contrast >= CONTRAST_FACTOR


def test_a_layer_that_obeys_no_rule_is_unproven_and_does_not_spoil_the_others() -> None:
    result = probe(Interleaved(), PATCHES)
    assert result.rules == {"embed": RowRule.PATCHES, "block": RowRule.UNPROVEN, "project": RowRule.PATCHES}
    assert not result.mixed
    assert "outputs" in result.reasons["block"]


@pytest.mark.parametrize(
    ("make", "items", "rule"),
    [(Tiled, tiled_items(1, 1, 1), RowRule.TILES), (Packed, packed_items(8, 8), RowRule.PATCHES)],
)
def test_equal_items_prove_nothing_unless_declared(make: Callable[[], Tower], items: list[Item], rule: RowRule) -> None:
    result = probe(make(), items)
    assert result.layers_with(RowRule.UNPROVEN) == ("embed", "block", "project")
    assert "equal in size" in result.reasons["block"]
    assert probe(make(), items, declared={"": rule}).mixed


def test_a_rule_must_hold_for_every_kind_of_media() -> None:
    """Images alone suit both patches and tokens; videos, pooled in time, decide."""
    assert probe(TokenPooled(), PATCHES).rules["project"] is RowRule.PATCHES
    assert probe(TokenPooled(), PATCHES, POOLED).rules["project"] is RowRule.TOKENS


class WithIdleLayers(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.dead = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        self.dead(torch.cat(pixels)[:7])
        return super().forward(pixels, num_tokens)


def test_layers_without_effect() -> None:
    result = probe(WithIdleLayers(), PATCHES)
    assert result.layers_with(RowRule.NO_EFFECT) == ("dead", "never")
    assert result.mixed
    assert not result.reasons


class ReadsAWeight(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        return super().forward([nn.functional.linear(x, self.read.weight) for x in pixels], num_tokens)


def test_a_weight_used_without_its_layer_is_not_called_idle() -> None:
    tower = ReadsAWeight()
    before = tower.read.weight.detach().clone()
    result = probe(tower, PATCHES)
    assert result.unreachable == ("read",)
    assert result.rules["read"] is RowRule.UNPROVEN
    assert result.mixed, "an adapter that touches the layer is refused, so it forces nothing"
    assert torch.equal(tower.read.weight, before)


class FaintLayer(Packed):
    """A layer whose contribution drowns in rounding: agreement of outputs would prove nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.faint = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        faint = self.faint(torch.cat(pixels)).split([len(x) for x in pixels])
        return super().forward([x + 1e-5 * y for x, y in zip(pixels, faint, strict=True)], num_tokens)


def test_a_layer_too_faint_to_test_is_unproven() -> None:
    result = probe(FaintLayer(), PATCHES)
    assert result.rules["faint"] is RowRule.UNPROVEN
    assert "noise" in result.reasons["faint"]


class Deepstack(Packed):
    """One layer reaches the text model only through the deepstack features."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Linear(2 * WIDTH, WIDTH)

    def encode(self, items: Sequence[Item]) -> list[ItemFeatures]:
        deep = self.deep(pairs(torch.cat([item.tensors["pixel_values"] for item in items])))
        levels = deep.split([item.num_tokens for item in items])
        return [ItemFeatures(x.rows, (level,)) for x, level in zip(super().encode(items), levels, strict=True)]


def test_deepstack_features_count() -> None:
    assert probe(Deepstack(), PATCHES).rules["deep"] is RowRule.PATCHES


class WithNormAndConvolution(Packed):
    """A patch embedding over (patches, 2, 2, 2) pixels, and norms of a residual stream that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, WIDTH, kernel_size=2, stride=2)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(12))

    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        x = self.patch(torch.cat(pixels).reshape(-1, 2, 2, 2)).flatten(1)
        for norm in self.norms:
            x = x + norm(x)
        return super().forward(list(x.split([len(p) for p in pixels])), num_tokens)


def test_norms_and_patch_embeddings_are_probed() -> None:
    tower = WithNormAndConvolution()
    layers = [ProbeLayer(LayerSpec("patch", Component.VISION_TOWER, LayerKind.CONV, WIDTH, WIDTH), tower.patch)]
    layers += [
        ProbeLayer(LayerSpec(f"norms.{i}", Component.VISION_TOWER, LayerKind.NORM, WIDTH, WIDTH), norm)
        for i, norm in enumerate(tower.norms)
    ]
    assert set(probe_row_rules(tower.encode, [PATCHES], layers).rules.values()) == {RowRule.PATCHES}
    wrong = probe_row_rules(tower.encode, [PATCHES], layers, declared={"patch|5": RowRule.IMAGES})
    assert wrong.layers_with(RowRule.UNPROVEN) == ("patch", "norms.5")


class Leaky(Packed):
    """Features of an item depend on its batch mates: batching is never equal to alone."""

    def encode(self, items: Sequence[Item]) -> list[ItemFeatures]:
        leak = torch.cat([item.tensors["pixel_values"] for item in items]).mean()
        return [ItemFeatures(x.rows + leak) for x in super().encode(items)]


def test_an_encoder_whose_items_influence_each_other_is_never_mixed() -> None:
    result = probe(Leaky(), PATCHES)
    assert set(result.rules.values()) == {RowRule.UNPROVEN}
    assert math.isinf(result.contrast)


class BareParameter(Tower):
    """A connector that is a parameter of a module, used by matmul (Gemma 3)."""

    def __init__(self) -> None:
        super().__init__()
        del self.project
        self.connector = nn.Module()
        self.connector.weight_io = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    def forward(self, pixels: list[torch.Tensor], num_tokens: list[int]) -> list[torch.Tensor]:
        counts = [len(x) for x in pixels]
        x = self.block(self.embed(torch.cat(pixels)))
        x = torch.cat([mix(part) for part in x.split(counts)])
        return list(torch.matmul(pairs(x), self.connector.weight_io).split(num_tokens))


def test_a_bare_parameter_is_probed() -> None:
    tower = BareParameter()
    spec = LayerSpec("connector.weight_io", Component.CONNECTOR, LayerKind.MATMUL, 2 * WIDTH, WIDTH)
    layer = ProbeLayer(spec, tower.connector)
    result = probe_row_rules(tower.encode, [PATCHES], [layer])
    assert result.rules == {"connector.weight_io": RowRule.PATCHES}
    wrong = probe_row_rules(tower.encode, [PATCHES], [layer], declared={"connector": RowRule.IMAGES})
    assert wrong.rules == {"connector.weight_io": RowRule.UNPROVEN}


def test_no_hook_is_left_behind() -> None:
    tower = Packed()
    before = tower.encode(PATCHES)
    probe(tower, PATCHES)
    assert all(not m._forward_hooks for m in tower.modules())
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(before, tower.encode(PATCHES), strict=True))


def test_a_single_item_is_no_batch() -> None:
    with pytest.raises(RowRuleError, match="at least 2 items"):
        probe(Packed(), PATCHES[:1])
