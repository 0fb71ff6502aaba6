"""Wrapped toy models against merged copies of themselves, one adapter and one item at a time, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from polylens.config import ApplyMode
from polylens.core import Component, LayerKind, LayerSpec
from polylens.errors import InternalError, ModelLoadError, RowRuleError
from polylens.lora.context import RoutingContext
from polylens.lora.cost import Calibration, CostModel
from polylens.lora.layers import WrappedLayers, wrap_layers
from polylens.lora.routing import segments
from polylens.models.row_rules import ItemSize, RowRule
from tests.lora.toys import (
    TEXT_COMPONENTS,
    TOWER_COMPONENTS,
    PackedTower,
    PaddedTower,
    PerCallTower,
    TextToy,
    TiledTower,
    make_adapter,
    merged,
    packed_size,
    specs_of,
    tiled_size,
)

MODES: tuple[ApplyMode, ...] = ("factored", "fused", "auto")
EVEN = Calibration(flops_per_s=1e9, values_per_s=1e9, call_s=0.0)
"""With these constants "auto" mixes both ways in one call of a toy layer."""


def wrapped_toy(
    model: nn.Module, components: dict[str, Component], mode: ApplyMode, rules: dict[str, RowRule] | None = None
) -> tuple[nn.Module, RoutingContext, list[LayerSpec], WrappedLayers]:
    specs = specs_of(model, components)
    ctx = RoutingContext(head_layer="lm_head")
    wrapped = wrap_layers(model, specs, ctx, rules or {}, CostModel(mode, EVEN))
    return model, ctx, specs, wrapped


def toy(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind().double().requires_grad_(False)


# Text: rows of sequences.


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    owners=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, 0, 1, 2])), max_size=8),
    mode=st.sampled_from(MODES),
    dims=st.sampled_from([2, 3]),
)
def test_ragged_text_batches_equal_each_sequence_alone_and_merged(
    owners: list[tuple[int, int | None]], mode: ApplyMode, dims: int
) -> None:
    base = toy(TextToy)
    model, ctx, specs, _ = wrapped_toy(copy.deepcopy(base), TEXT_COMPONENTS, mode)
    # The last adapter leaves a layer and the head alone.
    known = [make_adapter("a", specs, 1), make_adapter("b", specs, 2), make_adapter("c", specs[1:-1], 3, rank=1)]
    adapters = [None if owner is None else known[owner] for _, owner in owners]
    counts = [count for count, _ in owners]
    xs = list(torch.randn(sum(counts), 6, dtype=torch.float64).split(counts)) if counts else []
    last = [end - 1 for end, count in zip(torch.tensor(counts).cumsum(0).tolist(), counts, strict=True) if count]
    head = segments([min(count, 1) for count in counts], adapters)
    x = torch.cat(xs) if xs else torch.zeros(0, 6, dtype=torch.float64)
    with ctx.text(segments(counts, adapters), head):
        y = model(x if dims == 2 else x[None], last)
    assert y.shape == ((len(last), 9) if dims == 2 else (1, len(last), 9))
    expected = [merged(base, a)(part)[-1] for part, a in zip(xs, adapters, strict=True) if len(part)]
    expected_y = torch.stack(expected) if expected else torch.zeros(0, 9, dtype=torch.float64)
    torch.testing.assert_close(y.reshape(-1, 9), expected_y, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dims", [2, 3])
def test_modes_agree_in_float32(dims: int) -> None:
    outputs = []
    for mode in MODES:
        model, ctx, specs, _ = wrapped_toy(toy(TextToy).float(), TEXT_COMPONENTS, mode)
        adapters = [make_adapter(name, specs, seed, dtype=torch.float32) for seed, name in enumerate("abc")]
        x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
        with ctx.text(segments([13, 1, 20, 6], [adapters[0], None, adapters[1], adapters[2]])):
            outputs.append(model(x if dims == 2 else x[None]))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=0, atol=2e-5)


def test_one_layer_may_mix_both_ways() -> None:
    model, ctx, specs, wrapped = wrapped_toy(toy(TextToy), TEXT_COMPONENTS, "auto")
    few, many = make_adapter("few", specs, 1, rank=2), make_adapter("many", specs, 2, rank=2)
    assert CostModel("auto", EVEN).choose(1, 6, 10, 2) == "factored"
    assert CostModel("auto", EVEN).choose(60, 6, 10, 2) == "fused"
    x = torch.randn(63, 6, dtype=torch.float64)
    with ctx.text(segments([1, 1, 60, 1], [few, None, many, few])):
        y = model(x)
    assert wrapped.scratch_bytes > 0
    wrapped.unwrap()
    for rows, adapter in ((slice(0, 1), few), (slice(1, 2), None), (slice(2, 62), many), (slice(62, 63), few)):
        torch.testing.assert_close(y[rows], merged(model, adapter)(x[rows]), rtol=0, atol=1e-10)


def test_scratch_holds_no_more_than_the_largest_layer() -> None:
    model, ctx, specs, wrapped = wrapped_toy(toy(TextToy), TEXT_COMPONENTS, "fused")
    with ctx.text(segments([4], [make_adapter("a", specs, 1)])):
        model(torch.randn(4, 6, dtype=torch.float64))
    assert wrapped.scratch_bytes == 8 * max(spec.in_features * spec.out_features for spec in specs)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_that_are_not_contiguous(mode: ApplyMode) -> None:
    model, ctx, specs, wrapped = wrapped_toy(toy(TextToy), TEXT_COMPONENTS, mode)
    adapters = [make_adapter(name, specs, seed) for seed, name in enumerate("ab")]
    x = torch.randn(5, 2, 6, dtype=torch.float64).transpose(0, 1)
    with ctx.text(segments([7, 3], adapters)):
        y = model(x)
    wrapped.unwrap()
    flat = x.reshape(-1, 6)
    expected = torch.cat([merged(model, adapters[0])(flat[:7]), merged(model, adapters[1])(flat[7:])])
    torch.testing.assert_close(y.reshape(-1, 9), expected, rtol=0, atol=1e-10)


def test_inference_mode_and_parameters_that_require_grad() -> None:
    for mode in MODES:
        model, ctx, specs, _ = wrapped_toy(toy(TextToy).requires_grad_(True), TEXT_COMPONENTS, mode)
        with torch.inference_mode(), ctx.text(segments([4], [make_adapter("a", specs, 1)])):
            assert model(torch.randn(4, 6, dtype=torch.float64)).shape == (4, 9)


# Encoder: rows of media items.


def items_of(sizes: Sequence[int], inner: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(size, *inner, generator=generator, dtype=torch.float64) for size in sizes]


TOWERS: dict[str, tuple[type[nn.Module], tuple[int, ...], RowRule, RowRule, Callable[[int], ItemSize]]] = {
    "packed": (PackedTower, (5,), RowRule.PATCHES, RowRule.PATCHES, packed_size),
    "packed, connector by tokens": (PackedTower, (5,), RowRule.PATCHES, RowRule.TOKENS, packed_size),
    "tiled": (TiledTower, (3, 5), RowRule.TILES, RowRule.TILES, lambda tiles: tiled_size(tiles, 3 * tiles)),
    "padded": (PaddedTower, (5,), RowRule.IMAGES, RowRule.IMAGES, packed_size),
    "per call": (PerCallTower, (5,), RowRule.PATCHES, RowRule.PER_CALL, packed_size),
}


@settings(deadline=None, max_examples=60)
@given(
    tower=st.sampled_from(list(TOWERS)),
    sizes=st.lists(st.integers(1, 4).map(lambda n: 4 * n), min_size=1, max_size=5),
    owners=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=5, max_size=5),
    mode=st.sampled_from(MODES),
)
def test_mixed_encoder_batches_equal_each_item_alone_and_merged(
    tower: str, sizes: list[int], owners: list[int | None], mode: ApplyMode
) -> None:
    kind, inner, tower_rule, connector_rule, size_of = TOWERS[tower]
    base = toy(kind)
    specs = specs_of(base, TOWER_COMPONENTS)
    rules = {s.name: tower_rule if s.component is Component.VISION_TOWER else connector_rule for s in specs}
    model, ctx, _, _ = wrapped_toy(copy.deepcopy(base), TOWER_COMPONENTS, mode, rules)
    known = [make_adapter("a", specs, 1), make_adapter("b", specs, 2), make_adapter("c", specs[-1:], 3)]
    adapters = [None if owner is None else known[owner] for owner in owners[: len(sizes)]]
    items = items_of(sizes, inner)
    with ctx.encoder([size_of(size) for size in sizes], adapters):
        features = model(items)
    for item, adapter, rows in zip(items, adapters, features, strict=True):
        torch.testing.assert_close(rows, merged(base, adapter)([item])[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_without_proven_rules_one_adapter_at_a_time_is_right_and_two_are_refused(mode: ApplyMode) -> None:
    base = toy(PackedTower)
    model, ctx, specs, _ = wrapped_toy(copy.deepcopy(base), TOWER_COMPONENTS, mode)
    one, two = make_adapter("a", specs, 1), make_adapter("b", specs, 2)
    items = items_of([8, 4, 12], (5,))
    sizes = [packed_size(len(item)) for item in items]
    with ctx.encoder(sizes, [one] * 3):
        features = model(items)
    for item, rows in zip(items, features, strict=True):
        torch.testing.assert_close(rows, merged(base, one)([item])[0], rtol=0, atol=1e-10)
    with ctx.encoder(sizes, [one, two, one]), pytest.raises(RowRuleError, match=r"tower\.0"):
        model(items)


def test_a_planted_wrong_rule_raises_before_the_layer_computes() -> None:
    model, ctx, specs, _ = wrapped_toy(
        toy(PackedTower), TOWER_COMPONENTS, "auto", {"tower.0": RowRule.IMAGES, "tower.1": RowRule.PATCHES}
    )
    calls = []
    model.tower[1].register_forward_hook(lambda *_: calls.append(1))
    items = items_of([8, 4, 4], (5,))
    adapters = [make_adapter(name, specs, seed) for seed, name in enumerate("abc")]
    sizes = [packed_size(8), packed_size(4), packed_size(4)]
    with ctx.encoder(sizes, adapters), pytest.raises(RowRuleError, match=r"tower\.0: 16 rows"):
        model(items)
    assert not calls


@pytest.mark.parametrize(("fault", "message"), [("calls_left_out", "called 2 times"), ("calls_too_many", "number 4")])
@pytest.mark.parametrize("adapters", [(0, 1, None), (0, 0, 0)])
def test_per_call_counts(fault: str, message: str, adapters: tuple[int | None, ...]) -> None:
    rules = {"tower": RowRule.PATCHES, "connector": RowRule.PER_CALL}
    model, ctx, specs, _ = wrapped_toy(toy(PerCallTower), TOWER_COMPONENTS, "auto", rules)
    known = [make_adapter("a", specs, 1), make_adapter("b", specs, 2)]
    setattr(model, fault, 1)
    items = items_of([8, 4, 12], (5,))
    with (
        pytest.raises(RowRuleError, match=f"connector: .*{message}"),
        ctx.encoder([packed_size(len(item)) for item in items], [None if k is None else known[k] for k in adapters]),
    ):
        model(items)


# Wrapping itself.


@pytest.mark.parametrize("kind", [PackedTower, TiledTower])
def test_base_results_are_the_same_bits_when_no_adapter_is_active(kind: type[nn.Module]) -> None:
    base = toy(kind)
    model, ctx, _specs, _ = wrapped_toy(copy.deepcopy(base), TOWER_COMPONENTS, "auto")
    items = items_of([8, 4], (5,) if kind is PackedTower else (3, 5))
    expected = base(items)
    elsewhere = make_adapter("a", [LayerSpec("other", Component.VISION_TOWER, LayerKind.LINEAR, 1, 1)], 1)
    for owners in ([None, None], [elsewhere, None]):
        with ctx.encoder([packed_size(8), packed_size(4)], owners):
            assert all(torch.equal(y, e) for y, e in zip(model(items), expected, strict=True))
    assert all(torch.equal(y, e) for y, e in zip(model(items), expected, strict=True))


def test_wrap_keeps_modules_and_weights_and_unwrap_restores() -> None:
    model = toy(TiledTower)
    modules = dict(model.named_modules())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, ctx, specs, wrapped = wrapped_toy(model, TOWER_COMPONENTS, "fused", {"tower.0": RowRule.PER_CALL})
    assert isinstance(model.tower[0], nn.Linear)
    with ctx.text(segments([1], [None])), pytest.raises(InternalError, match="wrapped already"):
        wrap_layers(model, specs, RoutingContext(), {}, CostModel())
    assert "forward" in model.tower[0].__dict__
    wrapped.unwrap()
    wrapped.unwrap()
    assert dict(model.named_modules()) == modules
    assert not any("forward" in module.__dict__ for module in modules.values())
    assert dict.fromkeys(before, True) == {k: torch.equal(v, before[k]) for k, v in model.state_dict().items()}
    with ctx.encoder([packed_size(4)] * 2, [make_adapter("a", specs, 1)] * 2):
        pass  # the PER_CALL layer is no longer watched


def test_unwrap_restores_an_instance_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    original = model[0].forward
    model[0].forward = lambda input: original(input) + 1
    mine = model[0].forward
    spec = LayerSpec("0", Component.LANGUAGE_MODEL, LayerKind.LINEAR, 3, 3)
    wrapped = wrap_layers(model, [spec], RoutingContext(), {}, CostModel())
    assert wrapped.factored_only == ("0",)
    wrapped.unwrap()
    assert model[0].forward is mine


class OwnLinear(nn.Linear):
    """A linear layer that does not multiply by `weight` as it stands, as quantised ones do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (2 * super().forward(input)).mT.contiguous().mT


@pytest.mark.parametrize("mode", MODES)
def test_layers_with_a_forward_of_their_own_are_applied_factored(mode: ApplyMode) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OwnLinear(3, 4)).double().requires_grad_(False)
    spec = LayerSpec("0", Component.LANGUAGE_MODEL, LayerKind.LINEAR, 3, 4)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    base = model(x)
    assert not base.is_contiguous()
    ctx = RoutingContext()
    wrapped = wrap_layers(model, [spec], ctx, {}, CostModel(mode, EVEN))
    adapter = make_adapter("a", [spec], 1)
    with ctx.text(segments([7, 3], [adapter, None])):
        y = model(x).reshape(10, 4)
    delta = adapter.deltas["0"]
    expected = base.reshape(10, 4).clone()
    expected[:7] += delta.scaling * (x.reshape(10, 3)[:7] @ delta.a.T @ delta.b.T)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    assert torch.equal(y[7:], base.reshape(10, 4)[7:])
    assert wrapped.scratch_bytes == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_kept_in_float32_takes_the_deltas_in_its_own_dtype(mode: ApplyMode) -> None:
    model = nn.Sequential(nn.Linear(3, 4)).requires_grad_(False)
    spec = LayerSpec("0", Component.LANGUAGE_MODEL, LayerKind.LINEAR, 3, 4)
    ctx = RoutingContext()
    wrapped = wrap_layers(model, [spec], ctx, {}, CostModel(mode, EVEN))
    adapter = make_adapter("a", [spec], 1, dtype=torch.bfloat16)
    x = torch.randn(5, 3)
    with ctx.text(segments([5], [adapter])):
        y = model(x)
    wrapped.unwrap()
    torch.testing.assert_close(y, merged(model, adapter)(x), rtol=0, atol=1e-5)


class LostProjector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_io = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ti,io->to", x, self.weight_io)


def test_a_bare_parameter_used_otherwise_than_as_a_product_is_refused() -> None:
    model = nn.Sequential(LostProjector())
    spec = LayerSpec("0.weight_io", Component.CONNECTOR, LayerKind.MATMUL, 3, 4)
    ctx = RoutingContext()
    wrap_layers(model, [spec], ctx, {spec.name: RowRule.PATCHES}, CostModel())
    with torch.no_grad():
        model(torch.randn(4, 3))
        adapters = [make_adapter("a", [spec], 1)]
        with ctx.encoder([packed_size(4)], adapters), pytest.raises(RowRuleError, match=r"0\.weight_io.*not used"):
            model(torch.randn(4, 3))


@pytest.mark.parametrize("product", [torch.matmul, torch.mm, torch.Tensor.matmul, lambda x, w: x @ w])
@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_write_a_product_is_caught(product: Callable, mode: ApplyMode) -> None:
    class Projector(LostProjector):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return product(x, self.weight_io)

    model = nn.Sequential(Projector()).requires_grad_(False)
    spec = LayerSpec("0.weight_io", Component.CONNECTOR, LayerKind.MATMUL, 3, 4)
    ctx = RoutingContext()
    wrapped = wrap_layers(model, [spec], ctx, {spec.name: RowRule.PATCHES}, CostModel(mode, EVEN))
    adapter = make_adapter("a", [spec], 1, dtype=torch.float32)
    x = torch.randn(12, 3)
    with ctx.encoder([packed_size(4), packed_size(8)], [None, adapter]):
        y = model(x)
    wrapped.unwrap()
    expected = torch.cat([model(x[:4]), merged(model, adapter)(x[4:])])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "shape", "message"),
    [
        ("9", LayerKind.LINEAR, (3, 3), "no module"),
        ("1", LayerKind.LINEAR, (3, 3), "is a GELU"),
        ("0", LayerKind.LINEAR, (3, 4), "has shape"),
        ("0.nothing", LayerKind.MATMUL, (3, 3), "no such parameter"),
        ("9.weight", LayerKind.MATMUL, (3, 3), "no module"),
    ],
)
def test_specs_that_do_not_fit_are_refused_and_nothing_stays_wrapped(
    name: str, kind: LayerKind, shape: tuple[int, int], message: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3))
    specs = [
        LayerSpec("2", Component.LANGUAGE_MODEL, LayerKind.LINEAR, 3, 3),
        LayerSpec(name, Component.LANGUAGE_MODEL, kind, *shape),
    ]
    with pytest.raises(ModelLoadError, match=message):
        wrap_layers(model, specs, RoutingContext(), {}, CostModel())
    assert not any("forward" in module.__dict__ for module in model.modules())
