"""Token ids that a checkpoint's files give a meaning: those of media, the first and the last of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polylens.core import MediaKind
from polylens.models.item_processor import kinds_taken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.models.families.notes import ProcessorNotes


def feature_ids(processor: Any, config: Any, notes: ProcessorNotes) -> list[int]:
    """Ids of the tokens that features replace: the model's own, as processors may name others beside them."""
    named = [getattr(config, f"{kind}_token_id", None) for kind in kinds_taken(processor)]
    if not any(named):
        named = [token_id for kind in MediaKind for token_id in getattr(processor, f"{kind}_token_ids", ())]
    more = [token_id for entry in notes.feature_ids_entries for token_id in getattr(config, entry)]
    return list(dict.fromkeys(token_id for token_id in (*named, *more) if token_id is not None))


def decoder_start(config: Any, generation_config: Any) -> int | None:
    """The first token of every answer of an encoder-decoder."""
    text_config = config.get_text_config(decoder=True) if config is not None else None
    for holder in (generation_config, config, text_config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if (token_id := getattr(holder, name, None)) is not None:
                return token_id
    return None


def stop_token_ids(
    tokenizer: Any, config: Any, generation_config: Any, more_entries: Sequence[str] = ()
) -> tuple[int, ...]:
    """Every id that any part of the checkpoint says ends an answer, sorted."""
    text_config = config.get_text_config() if config is not None else None
    found: set[int] = {getattr(text_config, entry) for entry in more_entries}
    for holder in (tokenizer, config, text_config, generation_config):
        value = getattr(holder, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))
