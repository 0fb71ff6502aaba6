"""The families of vision-language models that need a note, and those the test suite proves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polylens.models.families import florence2, internvl, paligemma
from polylens.models.families.notes import FamilyNotes, ProcessorNotes, TwoWay

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "FamilyNotes", "TwoWay", "notes_for"]

FAMILIES: Mapping[str, FamilyNotes] = {
    "florence2": FamilyNotes(
        processor=ProcessorNotes(chat_template=florence2.TEMPLATE, commands=florence2.COMMANDS),
    ),
    "gemma3": FamilyNotes(
        matmul_parameters=("mm_input_projection_weight",),
        two_way=TwoWay.IMAGES,
    ),
    "internvl": FamilyNotes(
        collate=internvl.concat_frames,
        encode=internvl.encode,
        processor=ProcessorNotes(dropped_inputs=("num_patches",), plain_call=True),
    ),
    "llava": FamilyNotes(),
    "mllama": FamilyNotes(),
    "paligemma": FamilyNotes(
        two_way=TwoWay.PROMPT,
        first_position=1,
        processor=ProcessorNotes(chat_template=paligemma.TEMPLATE),
    ),
    "qwen2_5_vl": FamilyNotes(),
    "qwen2_vl": FamilyNotes(),
    "qwen3_5": FamilyNotes(),
    "qwen3_5_moe": FamilyNotes(),
    "qwen3_vl": FamilyNotes(),
    "qwen3_vl_moe": FamilyNotes(),
}
"""By `config.model_type`, in alphabetical order: the families whose parity with merged weights the tests prove."""


def notes_for(model_type: str) -> FamilyNotes:
    """The notes of a family; a family without an entry has nothing special to note."""
    return FAMILIES.get(model_type, FamilyNotes())
