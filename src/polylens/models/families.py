"""What transformers does not tell generically, one entry a family. Kept small on purpose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class FamilyNotes:
    """Facts about one family (`config.model_type`).

    matmul_parameters: names of bare 2-D parameters (in, out) that act as linear layers, y = x W.
    bidirectional_images: the text model lets the tokens of one image see each other in both directions,
    so an image's tokens must be computed in one chunk.
    declared_rules: row rules by layer-name pattern, for layers the probe finds ambiguous; they are tested
    by the probe just the same.
    """

    matmul_parameters: tuple[str, ...] = ()
    bidirectional_images: bool = False
    declared_rules: Mapping[str, str] = field(default_factory=dict)


FAMILIES: Mapping[str, FamilyNotes] = {
    "qwen2_vl": FamilyNotes(),
    "qwen2_5_vl": FamilyNotes(),
    "qwen3_vl": FamilyNotes(),
    "gemma3": FamilyNotes(
        matmul_parameters=("mm_input_projection_weight",),
        bidirectional_images=True,
    ),
    "llava": FamilyNotes(),
}
"""The families whose parity with merged weights the test suite proves."""


def notes_for(model_type: str) -> FamilyNotes:
    """The notes of a family; a family without an entry has nothing special to note."""
    return FAMILIES.get(model_type, FamilyNotes())
