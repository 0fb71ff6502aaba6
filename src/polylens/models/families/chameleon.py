"""Chameleon: pictures become tokens of the vocabulary, by a picture tokenizer that is frozen."""

from __future__ import annotations

from typing import Any

NOT_ADAPTABLE = {
    r"\bvqmodel\.": "part of the picture tokenizer, whose tokens no adapter can be trained to change",
    r"\bembed_tokens$": "the embedding, which embeds the tokens of pictures too",
}


def picture_tokens(config: Any) -> list[int]:
    """Tokens that stand for pieces of pictures, by which transformers knows them too."""
    return [token_id for name, token_id in config.vocabulary_map.items() if name.startswith("IMGIMG")]
