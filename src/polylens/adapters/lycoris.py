"""LoHa and LoKr as factors A and B: both are products that have exact ones, often of a small rank.

LoHa (arXiv 2108.06098): ΔW = (w1a w1b) ⊙ (w2a w2b), whose rank is at most r². LoKr (arXiv 2309.14859, 2212.10650):
ΔW = w1 ⊗ w2, where each of the two may be a product of factors itself; and (L₁ R₁) ⊗ (L₂ R₂) = (L₁ ⊗ L₂)(R₁ ⊗ R₂).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

LYCORIS_TYPES = ("LOHA", "LOKR")
"""`peft_type`s whose tensors become plain factors."""

_LOHA = ({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}, {"hada_t1", "hada_t2"})
_LOKR_FIRST = ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"})
_LOKR_SECOND = ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}, {"lokr_t2", "lokr_w2_a", "lokr_w2_b"})


class Factors(NamedTuple):
    """A (rank, in), B (out, rank) with ΔW = B A, float32. config_rank: r of the method, None where shapes hide it."""

    a: torch.Tensor
    b: torch.Tensor
    config_rank: int | None


def lycoris_factors(parts: Mapping[str, torch.Tensor]) -> Factors | str:
    """From one module's tensors by PEFT's names (`hada_w1_a`, `lokr_w2`, …) to factors; or what is wrong with them."""
    if not _is_whole(parts.keys()):
        return f"has {', '.join(sorted(parts))}, which together are neither LoHa nor LoKr"
    if any(0 in tensor.shape or tensor.dim() < 2 for tensor in parts.values()):
        return "has empty factors (rank 0), or some of one dimension"
    floats = {name: tensor.float() for name, tensor in parts.items()}
    try:
        return _loha(floats) if "hada_w1_a" in floats else _lokr(floats)
    except RuntimeError:  # torch's word for shapes that do not multiply
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(parts.items()))
        return f"has tensors that do not fit together: {shapes}"


def _is_whole(names: object) -> bool:
    found = set(names)  # type: ignore[call-overload]
    plain, more = _LOHA
    lokr = [first | second for first in _LOKR_FIRST for second in _LOKR_SECOND]
    return found in (plain, plain | more, *lokr)


def _loha(parts: Mapping[str, torch.Tensor]) -> Factors:
    w1a, w1b, w2a, w2b = (parts[f"hada_w{index}_{side}"] for index in (1, 2) for side in "ab")
    if "hada_t1" in parts:  # a convolution's kernel apart: w?a is (r, out) there
        product = _kernel(parts["hada_t1"], w1a, w1b) * _kernel(parts["hada_t2"], w2a, w2b)
        return Factors(*_of_whole(product.flatten(1)), w1a.shape[0])
    rank, (out, inputs) = w1b.shape[0], (w1a.shape[0], w1b.shape[1])
    if rank * w2b.shape[0] >= min(out, inputs):
        return Factors(*_of_whole((w1a @ w1b) * (w2a @ w2b)), rank)
    # Row by row and column by column, every pair of ranks gives one rank of the product.
    a = (w1b[:, None, :] * w2b[None, :, :]).flatten(0, 1)
    b = (w1a[:, :, None] * w2a[:, None, :]).flatten(1, 2)
    return Factors(a, b, rank)


def _lokr(parts: Mapping[str, torch.Tensor]) -> Factors:
    first = _halves(parts, "lokr_w1")
    second = _halves(parts, "lokr_w2")
    rank = next((parts[name].shape[0] for name in ("lokr_w1_b", "lokr_w2_b") if name in parts), None)
    return Factors(torch.kron(first[0], second[0]).contiguous(), torch.kron(first[1], second[1]).contiguous(), rank)


def _halves(parts: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(right, left) with left @ right the one side of the Kronecker product, through its smallest dimension."""
    if name in parts:
        return _of_whole(parts[name].flatten(1))
    left, right = parts[f"{name}_a"], parts[f"{name}_b"]
    if "lokr_t2" in parts and name == "lokr_w2":
        return _of_whole(_kernel(parts["lokr_t2"], left, right).flatten(1))
    if right.shape[0] >= min(left.shape[0], right.shape[1]):
        return _of_whole(left @ right)
    return right, left


def _of_whole(weight_oi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors (A, B) of a full matrix: itself and the identity of its smaller side."""
    out, inputs = weight_oi.shape
    if out <= inputs:
        return weight_oi.contiguous(), torch.eye(out)
    return torch.eye(inputs), weight_oi.contiguous()


def _kernel(core: torch.Tensor, w_a: torch.Tensor, w_b: torch.Tensor) -> torch.Tensor:
    """(out, in, height, width) from a core (r, r, height, width) and factors (r, out), (r, in)."""
    return torch.einsum("ijkl,ip,jr->prkl", core, w_a, w_b)
