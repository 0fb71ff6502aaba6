"""KOSMOS-2: a picture at fixed places before the text, and tasks and places written as tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    Kosmos2Config,
    Kosmos2ForConditionalGeneration,
    Kosmos2Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from tests.families.recipes import SMALL_TOWER, vocab_size
from tests.families.tokenizers_and_templates import train_bpe

SIDE = 28
PATCH = 7
NUM_QUERIES = 64
"""The processor's own number of a picture's tokens."""
FIRST_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
"""A picture's tokens have the ids after these."""


def kosmos_tokenizer(added: Sequence[str], named: Mapping[str, str] | None = None) -> PreTrainedTokenizerBase:
    """Byte-level BPE that adds no tokens by itself."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    vocab, merges = train_bpe(backend, sorted(pre_tokenizers.ByteLevel.alphabet()))
    ordered = (*FIRST_TOKENS, *sorted(vocab, key=vocab.__getitem__))
    backend.model = models.BPE(vocab={token: index for index, token in enumerate(ordered)}, merges=merges)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in FIRST_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=list(added),
        **({"model_specific_special_tokens": dict(named)} if named else {}),
        model_max_length=2048,
    )


def kosmos_2_tokenizer() -> PreTrainedTokenizerBase:
    return kosmos_tokenizer(())


def kosmos_2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    kosmos_2_processor(tokenizer)  # it adds tokens to the tokenizer
    text = {
        "vocab_size": vocab_size(tokenizer),
        "max_position_embeddings": 2048,
        "embed_dim": 32,
        "layers": 2,
        "ffn_dim": 64,
        "attention_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        **SMALL_TOWER,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    config = Kosmos2Config(
        text_config=text, vision_config=vision, latent_query_num=NUM_QUERIES, tie_word_embeddings=False
    )
    return Kosmos2ForConditionalGeneration(config)


def kosmos_2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size)
    return Kosmos2Processor(images, tokenizer, num_patch_index_tokens=4)
