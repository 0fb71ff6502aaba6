"""Whether vLLM's text model runs a layer's module at all, and on one row a token: told by running it once.

vLLM may compute a layer without calling its module (weights folded into others, kernels over several layers); a change
of such a layer would be lost in silence. Rows in another shape could not be told apart by token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polylens.core import LayerKind

if TYPE_CHECKING:
    import torch
    from torch import nn

    from polylens.core import LayerSpec

NUM_TOKENS = 13
"""Tokens of the run: a number of heads that no model has, so that a dimension of this size is the tokens'."""

Calls = Mapping[str, list[tuple[int, ...]]]
"""Shapes of the first argument of every call, by module path."""


@contextmanager
def record_calls(model: nn.Module, paths: Iterable[str]) -> Iterator[Calls]:
    """Note the calls of the modules at `paths`."""
    calls: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    modules = {path: model.get_submodule(path) for path in paths}
    before = {path: module.__dict__.get("forward") for path, module in modules.items()}
    for path, module in modules.items():
        module.forward = _recorder(module.forward, calls[path])
    try:
        yield calls
    finally:
        for path, forward in before.items():
            if forward is None:
                del modules[path].forward
            else:
                modules[path].forward = forward


def _recorder(forward: Any, shapes: list[tuple[int, ...]]) -> Any:
    def recorded(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(x.shape))
        return forward(x, *args, **kwargs)

    return recorded


def fault_of_calls(spec: LayerSpec, shapes: list[tuple[int, ...]], num_tokens: int) -> str | None:
    """Why a layer whose module was called like this for `num_tokens` tokens takes no change; None if it does."""
    if not shapes:
        return "vLLM's text model computes it without calling its module"
    rows = {_num_rows(spec, shape) for shape in shapes}
    if rows != {num_tokens}:
        return f"vLLM calls its module with {sorted(rows)} rows for {num_tokens} tokens"
    return None


def _num_rows(spec: LayerSpec, shape: tuple[int, ...]) -> int:
    if spec.kind is LayerKind.HEAD_NORM:
        return shape[0]
    num_values = 1
    for size in shape:
        num_values *= size
    return num_values if spec.kind is LayerKind.EMBEDDING else num_values // shape[-1]
