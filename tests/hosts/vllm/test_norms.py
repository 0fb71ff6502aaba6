"""Norms that may add a residual in place, as vLLM's do, under adapters that have norms of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polylens.core import Adapter, Component, Digests, LayerKind, LayerSpec, Replacement
from polylens.errors import RowRuleError
from polylens.hosts.vllm.norms import NormModule
from polylens.lora.context import RoutingContext
from polylens.lora.routing import segments
from polylens.models.row_rules import RowRule

WIDTH, TOKENS = 4, 5


class InPlaceNorm(nn.Module):
    """As vLLM's `RMSNorm`: with a residual, both inputs are written into."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return plain(x, self.weight.data)
        residual += x
        x.copy_(plain(residual, self.weight.data))
        return x, residual


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def adapter(weight: torch.Tensor) -> Adapter:
    return Adapter("a", "", {"norm": Replacement("norm", weight)}, Digests("", "", "1", "", "1"), 0, special=True)


@pytest.fixture
def norm() -> nn.Module:
    torch.manual_seed(0)
    return InPlaceNorm()


def wrap(norm: nn.Module, kind: LayerKind) -> RoutingContext:
    ctx = RoutingContext()
    spec = LayerSpec("norm", Component.LANGUAGE_MODEL, kind, WIDTH, WIDTH)
    norm.forward = NormModule(norm, spec, RowRule.UNPROVEN, ctx).forward  # type: ignore[method-assign]
    return ctx


@torch.no_grad()
def test_each_row_gets_its_adapters_norm_and_all_the_same_residual(norm: nn.Module):
    base, new = norm.weight.data.clone(), torch.rand(WIDTH)
    ctx = wrap(norm, LayerKind.NORM)
    one = adapter(new)
    x, residual = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    summed = x + residual
    with ctx.text(segments([2, 2, 1], [None, one, None])):
        y, left = norm(x.clone(), residual=residual.clone())
    assert torch.equal(left, summed)
    assert torch.equal(y[[0, 1, 4]], plain(summed[[0, 1, 4]], base))
    assert torch.equal(y[2:4], plain(summed[2:4], new))
    assert torch.equal(norm.weight.data, base)


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, TOKENS])
def test_a_norm_inside_attention_has_a_row_a_token(norm: nn.Module, heads: int):
    base, new = norm.weight.data.clone(), torch.rand(WIDTH)
    ctx = wrap(norm, LayerKind.HEAD_NORM)
    x = torch.randn(TOKENS, heads, WIDTH)
    with ctx.text(segments([3, 2], [adapter(new), None])):
        y = norm(x)
    assert torch.equal(y[:3], plain(x[:3], new))
    assert torch.equal(y[3:], plain(x[3:], base))


@torch.no_grad()
def test_rows_in_another_shape_are_an_error(norm: nn.Module):
    ctx = wrap(norm, LayerKind.HEAD_NORM)
    with ctx.text(segments([TOKENS], [adapter(torch.rand(WIDTH))])), pytest.raises(RowRuleError, match="5 tokens"):
        norm(torch.randn(2 * TOKENS, WIDTH))


@torch.no_grad()
def test_without_an_adapter_it_is_the_base_models(norm: nn.Module):
    base = norm.weight.data.clone()
    wrap(norm, LayerKind.NORM)
    x = torch.randn(TOKENS, WIDTH)
    assert torch.equal(norm(x), plain(x, base))
