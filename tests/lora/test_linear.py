"""Linear layers on few rows: the same values, whatever the order of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from polylens.lora.linear import FEW_ROWS, FewRowsLinear, make_linears_fast


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 280)
        self.tower = nn.Linear(280, 270)
        self.text = nn.Sequential(nn.Linear(280, 300), nn.Linear(300, 280, bias=False), nn.Linear(280, 10))
        self.head = nn.Linear(280, 300, bias=False)


@pytest.mark.parametrize("shape", [(1, 280), (2, 280), (1, 1, 280), (3, 5, 280), (FEW_ROWS + 1, 280), (0, 280)])
def test_values_do_not_change(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Toy()
    fast = copy.deepcopy(plain)
    assert make_linears_fast(fast, fast.text, fast.head) == 5
    x = torch.randn(shape)
    for path in ("tower", "text", "head"):
        expected = plain.get_submodule(path).double()(x.double())
        ours = fast.get_submodule(path)(x)
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-5)


def test_inputs_with_gaps() -> None:
    layer = nn.Linear(280, 300)
    x = torch.randn(4, 3, 280).transpose(0, 1)
    expected = layer(x)
    make_linears_fast(layer, layer)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=2e-5)


def test_parameters_keep_identity_shape_and_values() -> None:
    model = Toy()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    make_linears_fast(model, model.text, model.head)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert model.text[0].weight.stride(0) == 1
    assert isinstance(model.text[0], FewRowsLinear)
    assert model.tower.weight.is_contiguous()  # a tower has many rows
    assert model.text[2].weight.is_contiguous()  # too narrow to gain


def test_a_head_tied_to_the_embedding_keeps_its_order() -> None:
    model = Toy()
    model.head.weight = model.embed.weight
    make_linears_fast(model, model.text, model.head)
    assert model.embed.weight.is_contiguous()


def test_other_linears_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4).bfloat16())
    assert make_linears_fast(model, model) == 0
    assert [type(module) for module in model] == [Own, nn.Linear]
    hooked = nn.Linear(4, 4)
    hooked.forward = lambda x: x
    assert make_linears_fast(hooked) == 0
