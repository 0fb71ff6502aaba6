"""An adapter in memory: what it does to each layer, and what its folder says about requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

BASE_NAME = "base"
"""What commands call the model without an adapter; no adapter may take this name."""


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to one layer: `y += scaling * (x Aᵀ) Bᵀ`.

    a: (rank, in_features), b: (out_features, rank), both contiguous, in the engine's dtype and device; for EXPERT_KINDS
    with one dimension more in front, the expert's index.
    """

    layer: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field name; `with_tensors` puts others in their place."""
        return {"a": self.a, "b": self.b}


@dataclass(frozen=True)
class ScaledDelta(Delta):
    """A delta that also scales the layer's outputs (DoRA) or shifts them (a new bias):

        y = scale_o ⊙ (y_base + scaling · (x Aᵀ) Bᵀ) + shift_o

    y_base includes the base layer's bias. scale_o, shift_o: (out_features,), None where nothing is to be done.
    """

    scale_o: torch.Tensor | None = None
    shift_o: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        optional = {"scale_o": self.scale_o, "shift_o": self.shift_o}
        return super().tensors() | {name: x for name, x in optional.items() if x is not None}


@dataclass(frozen=True)
class Replacement:
    """Parameters of one layer that take the place of the base model's, on the adapter's rows (`modules_to_save`).

    weight: as the base layer's own, None to keep that; bias likewise. Of the token embedding and the head, weight may
    have more rows, for tokens that the base model does not have.
    """

    layer: str
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field name, which is also the parameter's name."""
        return {name: x for name, x in (("weight", self.weight), ("bias", self.bias)) if x is not None}


@dataclass(frozen=True)
class TokenRows:
    """Rows of the embedding (or, where it is tied, of the head) that take the place of the base model's.

    rows_nd: (n, width), the new rows of `token_ids` (n ascending ids).
    """

    layer: str
    token_ids: tuple[int, ...]
    rows_nd: torch.Tensor

    @property
    def rank(self) -> int:
        return 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"rows_nd": self.rows_nd}


Change = Delta | Replacement | TokenRows
"""What one adapter does to one layer. `type(change) is Delta`: the plain factors that the fast path knows."""


def with_tensors(change: Change, tensors: Mapping[str, torch.Tensor]) -> Change:
    """`change` with other tensors, by the names that `change.tensors()` has."""
    return replace(change, **tensors)  # type: ignore[arg-type]  # mypy knows no fields of a union


@dataclass(frozen=True)
class Digests:
    """Content hashes (hex, 256 bit) of an adapter's tensors and scalings.

    A component without any delta has the digest "" (equal to the base model's), so caches keyed by
    it are shared with the base model. `vision` covers tower and connector together.
    """

    vision_tower: str
    connector: str
    language_model: str
    vision: str
    whole: str


@dataclass(frozen=True)
class ProcessingFiles:
    """What an adapter's folder says about how its requests become tokens and pixels.

    settings: JSON objects by file name (`preprocessor_config.json`, …). tokenizer: contents by file name.
    template: the chat template. digest: a hash of all that (hex, 256 bit).
    """

    settings: Mapping[str, Mapping[str, Any]]
    tokenizer: Mapping[str, bytes]
    template: str | None
    digest: str


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: immutable, compared by identity, addressed by content through `content`."""

    name: str
    source: str
    deltas: Mapping[str, Change]
    digests: Digests
    num_bytes: int
    special: bool = False
    """Whether any of `deltas` is more than plain factors of a linear layer."""
    undivided: bool = False
    """Whether any of `deltas` changes what all items of an encoder batch share: there it runs alone."""
    processing: Any = None
    """The `models.processing.Processing` of its requests where its folder brings one; None: the base model's."""
    processing_digest: str = ""
    """Hash of the files that `processing` was made of; "" where it is the base model's."""
    num_more_tokens: int = 0
    """Tokens beyond the base model's vocabulary, of which it brings embeddings and logits."""

    @property
    def content(self) -> tuple[Digests, str]:
        """Equal for adapters that do the same to every request."""
        return self.digests, self.processing_digest

    @property
    def vision_digest(self) -> str:
        return self.digests.vision

    @property
    def language_digest(self) -> str:
        return self.digests.language_model
