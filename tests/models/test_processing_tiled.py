"""Peculiarities of processors of families with tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoProcessor

from polylens.core import MediaKind
from polylens.errors import RequestError
from polylens.models.processing import Processing
from tests.families.media import picture, user, video

A, B = picture(32, 24, 1), picture(64, 20, 2)


@pytest.fixture(scope="module")
def processing_of(checkpoint: Callable[[str], Path]) -> Callable[[str], Processing]:
    def load(family: str) -> Processing:
        folder = checkpoint(family)
        return Processing(AutoProcessor.from_pretrained(folder), AutoConfig.from_pretrained(folder))

    return load


ProcessingOf = Callable[[str], Processing]


@pytest.mark.parametrize("family", ["aya_vision", "paligemma", "internvl", "ovis2", "got_ocr2", "llava_onevision"])
def test_a_typed_placeholder_is_text(family: str, processing_of: ProcessingOf) -> None:
    processing = processing_of(family)
    placeholder = processing.processor.image_token
    prompt = processing.prepare(user(A, f"what is {placeholder}?"))
    assert len(prompt.items) == 1
    assert placeholder in processing.tokenizer.decode(prompt.token_ids)
    media_tokens = sum(token_id in processing.feature_ids for token_id in prompt.token_ids)
    assert media_tokens == prompt.items[0].num_tokens == sum(n for _, n in prompt.slots[0].positions)


@pytest.mark.parametrize("family", ["internvl", "llava_onevision"])
def test_items_are_in_the_order_of_the_text(family: str, processing_of: ProcessingOf) -> None:
    """InternVL's pictures and videos share one token; LLaVA-OneVision's template puts pictures first."""
    prompt = processing_of(family).prepare(user(video(3, 24, 24, 1), A, "and", B))
    starts = [slot.positions[0][0] for slot in prompt.slots]
    assert starts == sorted(starts)
    order = [MediaKind.VIDEO, MediaKind.IMAGE, MediaKind.IMAGE]
    assert [item.kind for item in prompt.items] == (order if family == "internvl" else sorted(order))


def test_a_picture_with_company_is_another_item(processing_of: ProcessingOf) -> None:
    processing = processing_of("llava_onevision")
    alone, together = processing.prepare(user(A)).items[0], processing.prepare(user(A, B)).items[0]
    assert alone.media_key == together.media_key
    assert alone.settings_key != together.settings_key
    assert alone.tensors["pixel_values"].shape[1] > together.tensors["pixel_values"].shape[1] == 1


def test_a_small_picture_has_no_tiles_beside_its_view(processing_of: ProcessingOf) -> None:
    prompt = processing_of("deepseek_ocr2").prepare(user(A, B, "read"))
    assert ["pixel_values_local" in item.tensors for item in prompt.items] == [False, True]
    assert [item.num_tokens for item in prompt.items] == [
        145,
        145 + 144 * len(prompt.items[1].tensors["pixel_values_local"]),
    ]


@pytest.mark.parametrize("family", ["got_ocr2", "paligemma"])
def test_a_picture_is_needed(family: str, processing_of: ProcessingOf) -> None:
    with pytest.raises(RequestError, match="images"):
        processing_of(family).prepare(user("no picture"))


def test_got_without_text_asks_for_ocr(processing_of: ProcessingOf) -> None:
    processing = processing_of("got_ocr2")
    expected = processing.processor(images=[A], return_tensors="pt")["input_ids"][0].tolist()
    assert processing.prepare(user(A)).token_ids == expected
