"""The project's own merge; it is compared with PEFT's in test_against_peft."""

from __future__ import annotations

import pytest
import torch

from polylens.adapters.merge import merge_into, merged_weight
from polylens.core import FACTOR_KINDS, Delta, LayerKind
from polylens.errors import InternalError
from tests.adapters.fake_layers import IN, OUT, PARAMETER, TOWER, fake_layers


def delta(layer: str) -> Delta:
    return Delta(layer, torch.randn(2, IN), torch.randn(OUT, 2), 0.5)


IN_FIRST = (LayerKind.MATMUL, LayerKind.EMBEDDING, LayerKind.EXPERTS_IN_FIRST)


@pytest.mark.parametrize("kind", sorted(FACTOR_KINDS))
def test_acts_like_the_delta(kind: LayerKind) -> None:
    d, x = delta("x"), torch.randn(3, IN)
    weight = torch.randn(IN, OUT) if kind in IN_FIRST else torch.randn(OUT, IN)
    as_linear = (lambda w: w.T) if kind in IN_FIRST else (lambda w: w)
    expected = x @ as_linear(weight).T + 0.5 * (x @ d.a.T) @ d.b.T
    torch.testing.assert_close(x @ as_linear(merged_weight(weight, d, kind)).T, expected)


def test_rounds_once() -> None:
    d, weight = delta("x"), torch.randn(OUT, IN).bfloat16()
    half = Delta("x", d.a.bfloat16(), d.b.bfloat16(), 0.5)
    exact = weight.double() + 0.5 * half.b.double() @ half.a.double()
    assert torch.equal(merged_weight(weight, half, LayerKind.LINEAR), exact.bfloat16())


def test_state_keeps_other_tensors_and_the_old_ones() -> None:
    state = {f"{TOWER}.weight": torch.zeros(OUT, IN), PARAMETER: torch.zeros(IN, OUT), "x": torch.zeros(1)}
    before = dict(state)
    merge_into(state, [delta(TOWER), delta(PARAMETER)], fake_layers())
    assert state["x"] is before["x"]
    assert state[PARAMETER].any()
    assert not before[f"{TOWER}.weight"].any()


def test_shapes_are_checked() -> None:
    with pytest.raises(InternalError):
        merged_weight(torch.zeros(OUT, IN), delta("x"), LayerKind.MATMUL)
