"""Prompts of the families that pad pictures: ids are the processor's own, typed placeholders are text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoProcessor

from polylens.models.processing import Processing
from tests.families.media import picture, user, video
from tests.families.padded import PADDED
from tests.families.reference import reference_inputs

A, B = picture(32, 48, 1), picture(64, 24, 2)

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "text": user("what is in the picture"),
    "between texts": user("look at ", A, " and say what it is"),
    "several": user(A, B, "the difference between", A, "and", B),
    "turns": [*user(A, "one"), {"role": "assistant", "content": [{"type": "text", "text": "ok"}]}, *user("two", B)],
    "spaces": user("  leading", A, "trailing \n\n\n", B, "\t\n  both  "),
    "unicode": user("café 東京 👩‍👩‍👧 \u202e ½", A, "naïve"),
}

TYPED = "<video> <image> [IMG] [IMG_BREAK] <|image_pad|> <|video|> <fake_token_around_image>"


@pytest.mark.parametrize("family", PADDED)
def test_ids_are_the_processors_own(family: str, checkpoint: Callable[[str], Path]) -> None:
    processing = _processing(checkpoint(family))
    for messages in [
        *CONVERSATIONS.values(),
        *([user(A, video(4, 24, 24), "?")] if PADDED[family].takes_videos else []),
    ]:
        prompt = processing.prepare(messages)
        assert prompt.token_ids == reference_inputs(processing.processor, messages)["input_ids"][0].tolist()
        assert [item.num_tokens for item in prompt.items] == [
            sum(length for _, length in slot.positions) for slot in prompt.slots
        ]


@pytest.mark.parametrize("family", PADDED)
def test_typed_placeholders_are_text(family: str, checkpoint: Callable[[str], Path]) -> None:
    processing = _processing(checkpoint(family))
    prompt = processing.prepare(user(TYPED, A, TYPED))
    assert len(prompt.items) == len(prompt.slots) == 1
    assert sum(prompt.token_ids.count(one) for one in processing.feature_ids) == prompt.items[0].num_tokens
    assert processing.tokenizer.decode(prompt.token_ids).count("[IMG_BREAK] <|image_pad|> <|video|>") == 2


def _processing(folder: Path) -> Processing:
    return Processing(AutoProcessor.from_pretrained(folder), AutoConfig.from_pretrained(folder))
