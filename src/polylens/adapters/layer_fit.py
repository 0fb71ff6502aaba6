"""What an adapter's file has for one layer of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polylens.core import LayerSpec


@dataclass(frozen=True, eq=False)
class LayerFit:
    """One layer with all that the file has for it, turned to the layer's own sides, in the file's dtype on the CPU.

    trained_name: what PEFT matched patterns against when the adapter was trained. a: (rank, in_features),
    b: (out_features, rank), of rank 0 where the file has no factors for the layer; of experts with the expert in
    front. magnitude: DoRA's, (out,). lora_bias: of B, (out,). values: parameters that replace the base model's
    ("weight", "bias"), in their own shapes. token_ids, token_rows: rows of the embedding that replace the base
    model's. num_tensors: in the file.
    """

    spec: LayerSpec
    trained_name: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    magnitude: torch.Tensor | None = None
    lora_bias: torch.Tensor | None = None
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    token_rows: torch.Tensor | None = None
    num_tensors: int = 2

    @classmethod
    def empty(cls, spec: LayerSpec, trained_name: str) -> LayerFit:
        """Nothing yet: factors of rank 0."""
        a, b = torch.zeros(0, spec.in_features), torch.zeros(spec.out_features, 0)
        return cls(spec, trained_name, a, b, 0.0, num_tensors=0)

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by what it is, those of rank 0 left out."""
        optional = {"magnitude": self.magnitude, "lora_bias": self.lora_bias, "token_rows": self.token_rows}
        factors = {"a": self.a, "b": self.b} if self.rank else {}
        return {**factors, **{name: x for name, x in optional.items() if x is not None}, **self.values}

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors().values())
