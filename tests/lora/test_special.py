"""More than plain factors, mixed with plain ones: every row equals its own adapter's merged module, in float64."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from polylens.adapters.merge import merged_parameters
from polylens.config import ApplyMode
from polylens.core import (
    Adapter,
    Change,
    Component,
    LayerKind,
    LayerSpec,
    Replacement,
    ScaledDelta,
    TokenRows,
)
from polylens.errors import RowRuleError
from polylens.lora.context import RoutingContext
from polylens.lora.cost import CostModel
from polylens.lora.layers import wrap_layers
from polylens.lora.routing import segments
from polylens.models.row_rules import ItemSize, RowRule
from tests.lora.toys import NO_DIGESTS, make_delta

WIDTH, OUT, VOCABULARY = 6, 9, 11
COUNTS = (3, 1, 4, 2, 5, 1)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class OwnForward(nn.Linear):
    """A linear layer whose forward is not torch's, as quantised ones have."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.0


def linear(bias: bool = True) -> nn.Module:
    return nn.Linear(WIDTH, OUT, bias=bias)


def scaled(layer: str, i: int = WIDTH, o: int = OUT, *, scale: bool = True, shift: bool = True) -> Change:
    delta = make_delta(layer, i, o, 3, seed=1)
    return ScaledDelta(
        layer,
        delta.a,
        delta.b,
        delta.scaling,
        scale_o=1 + 0.5 * randn(o, seed=2) if scale else None,
        shift_o=randn(o, seed=3) if shift else None,
    )


CASES: dict[str, tuple[Callable[[], nn.Module], LayerKind, list[Change]]] = {
    "linear": (
        linear,
        LayerKind.LINEAR,
        [
            scaled("m"),
            scaled("m", scale=False),
            Replacement("m", randn(OUT, WIDTH), randn(OUT)),
            Replacement("m", bias=randn(OUT)),
            TokenRows("m", (1, 4), randn(2, WIDTH)),
            make_delta("m", WIDTH, OUT, 2, seed=9),
        ],
    ),
    "linear without bias": (
        lambda: linear(bias=False),
        LayerKind.LINEAR,
        [scaled("m", shift=False), Replacement("m", randn(OUT, WIDTH)), TokenRows("m", (0,), randn(1, WIDTH))],
    ),
    "own forward": (
        lambda: OwnForward(WIDTH, OUT),
        LayerKind.LINEAR,
        [scaled("m"), Replacement("m", randn(OUT, WIDTH), randn(OUT)), make_delta("m", WIDTH, OUT, 2, seed=9)],
    ),
    "norm": (
        lambda: nn.LayerNorm(WIDTH),
        LayerKind.NORM,
        [Replacement("m", randn(WIDTH), randn(WIDTH)), Replacement("m", bias=randn(WIDTH, seed=4))],
    ),
    "convolution": (
        lambda: nn.Conv2d(3, OUT, 2, stride=2),
        LayerKind.CONV,
        [scaled("m", 12), make_delta("m", 12, OUT, 2, seed=9), Replacement("m", randn(OUT, 3, 2, 2))],
    ),
    "embedding": (
        lambda: nn.Embedding(VOCABULARY, WIDTH),
        LayerKind.EMBEDDING,
        [
            make_delta("m", VOCABULARY, WIDTH, 2, seed=9),
            Replacement("m", randn(VOCABULARY, WIDTH)),
            TokenRows("m", (0, 3, 7), randn(3, WIDTH)),
            scaled("m", VOCABULARY, WIDTH, shift=False),
        ],
    ),
}


def inputs(kind: LayerKind, rows: int) -> torch.Tensor:
    if kind is LayerKind.EMBEDDING:
        return torch.arange(rows) % VOCABULARY
    return randn(rows, 3, 4, 6) if kind is LayerKind.CONV else randn(rows, WIDTH)


def merged(model: nn.Module, change: Change | None, kind: LayerKind) -> nn.Module:
    """A copy of the module with the change in its parameters."""
    clone = copy.deepcopy(model)
    if change is not None:
        own = clone.m._parameters
        weight, bias = own["weight"], own.get("bias")
        assert weight is not None
        for role, tensor in merged_parameters(change, kind, weight.detach(), bias).items():
            own[role] = nn.Parameter(tensor.double())
    return clone


@pytest.mark.parametrize("mode", ["factored", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_mixed_rows_equal_merged_modules(name: str, mode: ApplyMode) -> None:
    make, kind, changes = CASES[name]
    torch.manual_seed(0)
    model = nn.Module()
    model.m = make().double().requires_grad_(False)
    sides = {LayerKind.CONV: (12, OUT), LayerKind.NORM: (WIDTH, WIDTH), LayerKind.EMBEDDING: (VOCABULARY, WIDTH)}
    spec = LayerSpec("m", Component.LANGUAGE_MODEL, kind, *sides.get(kind, (WIDTH, OUT)))
    owners = [None, *(adapter(change) for change in changes)]
    counts = [COUNTS[index % len(COUNTS)] for index in range(len(owners))]
    x = inputs(kind, sum(counts))
    expected = torch.cat(
        [
            merged(model, None if owner is None else owner.deltas["m"], kind).m(part)
            for owner, part in zip(owners, x.split(counts), strict=True)
        ]
    )
    base = model.m(x)
    alone = [merged(model, None if owner is None else owner.deltas["m"], kind).m(x) for owner in owners]
    ctx = RoutingContext()
    wrap_layers(model, [spec], ctx, {}, CostModel(mode))
    with ctx.text(segments(counts, owners)):
        # merged_parameters computes in float32, so that is how near they can be.
        torch.testing.assert_close(model.m(x), expected, atol=1e-5, rtol=1e-5)
    for owner, own in zip(owners, alone, strict=True):  # one adapter on all rows takes another way through the layer
        with ctx.text(segments([len(x)], [owner])):
            torch.testing.assert_close(model.m(x), own, atol=1e-5, rtol=1e-5)
    assert not ctx.special
    assert torch.equal(model.m(x), base)


def adapter(change: Change) -> Adapter:
    return Adapter(name="a", source="toy", deltas={"m": change}, digests=NO_DIGESTS, num_bytes=0, special=True)


def test_changes_survive_replacing_their_tensors() -> None:
    for _, _, changes in CASES.values():
        for change in changes:
            same = dataclasses.replace(change, **{name: x.clone() for name, x in change.tensors().items()})
            assert same.tensors().keys() == change.tensors().keys()


def test_patches_of_one_strip_are_the_rows() -> None:
    """A patch embedding called on all items' patches side by side, (1, 3, 2, 2 n), where its rule is by patches."""
    model = nn.Module()
    model.m = nn.Conv2d(3, OUT, 2, stride=2).double().requires_grad_(False)
    spec = LayerSpec("m", Component.VISION_TOWER, LayerKind.CONV, 12, OUT)
    owners = [None, adapter(scaled("m", 12)), adapter(Replacement("m", randn(OUT, 3, 2, 2)))]
    sizes = [ItemSize(num_patches=count, num_tiles=1, num_tokens=1) for count in (3, 1, 4)]
    x = randn(1, 3, 2, 16)
    expected = [
        merged(model, None if owner is None else owner.deltas["m"], LayerKind.CONV).m(part)
        for owner, part in zip(owners, x.split([6, 2, 8], dim=-1), strict=True)
    ]
    ctx = RoutingContext()
    wrap_layers(model, [spec], ctx, {"m": RowRule.PATCHES}, CostModel("auto"))
    with ctx.encoder(sizes, owners):
        torch.testing.assert_close(model.m(x), torch.cat(expected, dim=-1), atol=1e-5, rtol=1e-5)


class Gated(nn.LayerNorm):
    """A norm that takes more than its rows."""

    def forward(self, input: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input) if gate is None else super().forward(input) * gate


def test_a_norm_used_otherwise_is_no_norm_of_rows() -> None:
    """Whatever the base model does is left alone; with a change, a call that is not one of rows is an error."""
    model = nn.Module()
    model.m = Gated(WIDTH).double().requires_grad_(False)
    spec = LayerSpec("m", Component.LANGUAGE_MODEL, LayerKind.NORM, WIDTH, WIDTH)
    x, gate = randn(4, WIDTH), randn(4, WIDTH, seed=1)
    gated = model.m(x, gate=gate)
    ctx = RoutingContext()
    wrap_layers(model, [spec], ctx, {}, CostModel("factored"))
    owner = adapter(Replacement("m", bias=randn(WIDTH)))
    with ctx.text(segments([4], [None])):
        assert torch.equal(model.m(x, gate=gate), gated)
    with ctx.text(segments([4], [owner])):
        with pytest.raises(RowRuleError, match="called with 2 arguments"):
            model.m(x, gate=gate)
        with pytest.raises(RowRuleError, match="which are not its vectors"):
            model.m(randn(WIDTH, 4))
        with pytest.raises(RowRuleError, match="gives it 4 rows"):
            model.m(randn(5, WIDTH))


HEADS = 4


class Attention(nn.Module):
    """Query norms as families have them: heads behind tokens, or before them."""

    def __init__(self, heads_first: bool) -> None:
        super().__init__()
        self.m = nn.LayerNorm(WIDTH)
        self._heads_first = heads_first

    def forward(self, x_thd: torch.Tensor) -> torch.Tensor:
        x = x_thd[None]
        return self.m(x.transpose(1, 2)).transpose(1, 2)[0] if self._heads_first else self.m(x)[0]


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_norm_of_heads(heads_first: bool) -> None:
    """Each token's heads get its adapter's norm, also where there are as many tokens as heads."""
    model = Attention(heads_first).double().requires_grad_(False)
    spec = LayerSpec("m", Component.LANGUAGE_MODEL, LayerKind.HEAD_NORM, WIDTH, WIDTH)
    changes = [None, Replacement("m", randn(WIDTH, seed=1)), Replacement("m", bias=randn(WIDTH, seed=2))]
    owners = [None if change is None else adapter(change) for change in changes]
    references = [merged(model, change, LayerKind.NORM) for change in changes]
    ctx = RoutingContext()
    wrap_layers(model, [spec], ctx, {}, CostModel("factored"))
    x = randn(HEADS, HEADS, WIDTH)
    with ctx.text(segments([1, 2, 1], owners)), pytest.raises(RowRuleError, match="4 tokens is not known"):
        model(x)
    with ctx.text(segments([HEADS], owners[1:2])):  # nothing to be told apart
        torch.testing.assert_close(model(x), references[1](x))
    for counts in ([2, 3, 1], [1, 2, 1], [0, 0, 1]):
        x = randn(sum(counts), HEADS, WIDTH)
        parts = [one(part) for one, part in zip(references, x.split(counts), strict=True)]
        with ctx.text(segments(counts, owners)):
            torch.testing.assert_close(model(x), torch.cat(parts))
