"""docs/families.md is what its generator writes, as far as that is told without running a model."""

from __future__ import annotations

import pytest
from tools.families_table import HEAD, TABLE, UNTESTED, told
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from polylens.models.families import FAMILIES
from tests.families.build import ALL_FAMILIES

TEXT = TABLE.read_text(encoding="utf-8")
ROWS = {line.split("|")[1].strip(): line for line in TEXT.removeprefix(HEAD).splitlines()}
LEVELS = ("mixed", "one adapter at a time in the encoder", "host path: ")


def test_the_head_is_the_generators() -> None:
    assert TEXT.startswith(HEAD), "run make families"


def test_every_family_of_transformers_has_a_row() -> None:
    assert not MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - ROWS.keys(), "run make families"
    assert list(ROWS) == sorted(ROWS)


def test_rows_without_a_build_are_told_from_transformers() -> None:
    for family in ROWS.keys() - ALL_FAMILIES.keys():
        assert ROWS[family] == told(family).line(), "run make families"


@pytest.mark.full  # `make test-all` writes the table first
def test_rows_with_a_build_are_measured() -> None:
    """Their contents are measured again by `make families`; here only that they have any."""
    assert not ALL_FAMILIES.keys() - ROWS.keys(), "run make families"
    for family in ALL_FAMILIES:
        level, tower, connector, language = (cell.strip() for cell in ROWS[family].split("|")[2:6])
        assert level.startswith(LEVELS), family
        assert language, family
        if level == "mixed":
            assert tower or "tower" in ALL_FAMILIES[family].lacks, family
            assert connector or "connector" in ALL_FAMILIES[family].lacks, family


@pytest.mark.full
def test_every_family_with_notes_is_measured() -> None:
    assert FAMILIES.keys() <= ROWS.keys()
    assert not [family for family in FAMILIES if UNTESTED in ROWS[family]]
