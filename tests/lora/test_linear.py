"""Linear layers on few rows: the same values, by the compiled kernel, by oneDNN, and by torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from polylens.lora.linear import KERNEL_ROWS, ONEDNN_ROWS, FewRowsLinear, make_linears_fast
from polylens.native import Kernels, compiled_kernels


@pytest.fixture(params=[True, False], ids=["compiled", "without a compiler"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    if not request.param:
        return None
    return compiled_kernels() or pytest.skip("no C compiler here")


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 280)
        self.tower = nn.Linear(280, 270)
        self.text = nn.Sequential(nn.Linear(280, 300), nn.Linear(300, 280, bias=False), nn.Linear(280, 10))
        self.head = nn.Linear(280, 300, bias=False)


@pytest.mark.parametrize(
    "shape",
    [
        (280,),
        (1, 280),
        (1, 1, 280),
        (KERNEL_ROWS, 280),
        (3, 5, 280),
        (KERNEL_ROWS + 1, 280),
        (ONEDNN_ROWS + 1, 280),
        (0, 280),
    ],
)
def test_values_do_not_change(kernels: Kernels | None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Toy()
    fast = copy.deepcopy(plain)
    assert make_linears_fast(fast, kernels) == 5
    x = torch.randn(shape)
    for path in ("tower", "text", "head"):
        expected = plain.get_submodule(path).double()(x.double())
        ours = fast.get_submodule(path)(x)
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-5)


def test_inputs_and_weights_with_gaps(kernels: Kernels | None) -> None:
    layer = nn.Linear(280, 300)
    x = torch.randn(4, 3, 280).transpose(0, 1)
    expected = layer(x)
    make_linears_fast(layer, kernels)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=2e-5)
    layer.weight.data = layer.weight.data.t().contiguous().t()
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("x", [torch.ones(3, 279), torch.ones(3, 280, dtype=torch.float64)], ids=["width", "dtype"])
def test_inputs_that_do_not_fit_are_refused(kernels: Kernels | None, x: torch.Tensor) -> None:
    layer = nn.Linear(280, 300)
    make_linears_fast(layer, kernels)
    with pytest.raises(RuntimeError):
        layer(x)


def test_parameters_stay_what_they_are(kernels: Kernels | None) -> None:
    model = Toy()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    make_linears_fast(model, kernels)
    assert isinstance(model.text[0], FewRowsLinear)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_other_linears_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4).bfloat16())
    assert make_linears_fast(model, None) == 0
    assert [type(module) for module in model] == [Own, nn.Linear]
    hooked = nn.Linear(4, 4)
    hooked.forward = lambda x: x
    assert make_linears_fast(hooked, None) == 0
