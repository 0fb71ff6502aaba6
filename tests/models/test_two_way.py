"""Which tokens of a prompt see each other, where those of all pictures are one block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from polylens.models.families import TwoWay
from polylens.models.positions import span_holes, two_way_spans

PATCH, BORDER, WORD = 5, 6, 1
IDS = {PATCH, BORDER}


def prompt(*token_ids: int, num_items: int = 1) -> Any:
    return SimpleNamespace(token_ids=list(token_ids), items=[None] * num_items, slots=[])


def test_pictures_are_one_span_and_the_text_between_its_holes() -> None:
    two = prompt(WORD, BORDER, PATCH, PATCH, BORDER, WORD, WORD, PATCH, WORD, PATCH, WORD, num_items=3)
    assert two_way_spans(TwoWay.ALL_IMAGES, two, IDS) == ((1, 10),)
    assert span_holes(TwoWay.ALL_IMAGES, two, IDS) == ((5, 7), (8, 9))


def test_a_picture_that_ends_the_prompt() -> None:
    one = prompt(WORD, PATCH, BORDER)
    assert two_way_spans(TwoWay.ALL_IMAGES, one, IDS) == ((1, 3),)
    assert span_holes(TwoWay.ALL_IMAGES, one, IDS) == ()


def test_without_a_picture_typed_tokens_see_nothing_more() -> None:
    none = prompt(PATCH, PATCH, num_items=0)
    assert two_way_spans(TwoWay.ALL_IMAGES, none, IDS) == ()
    assert span_holes(TwoWay.ALL_IMAGES, none, IDS) == ()
