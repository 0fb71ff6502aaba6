"""Fuyu: patches embedded by one linear layer; a unigram vocabulary that has a picture's tokens as ordinary pieces."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import (
    FuyuConfig,
    FuyuForCausalLM,
    FuyuImageProcessor,
    FuyuProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from tests.families.recipes import HIDDEN, vocab_size

SIDE = 64
PATCH = 8
MARKS = ("|SPEAKER|", "|NEWLINE|", "|ENDOFTEXT|")
WORDS = ("▁the", "▁picture", "▁what", "▁is", "▁in", "▁a", "▁number", "SPEAKER", "er", "ing")


def fuyu_tokenizer() -> PreTrainedTokenizerBase:
    """Like Adept's: no mark of a picture is an added token."""
    letters = [chr(code) for code in range(0x20, 0x7F)] + ["▁", "\n"]
    pieces = [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    pieces += [(mark, 0.0) for mark in MARKS] + [(word, -3.0) for word in WORDS] + [(one, -6.0) for one in letters]
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces], unk_id=0, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="|ENDOFTEXT|", model_max_length=2048
    )


def fuyu(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = {
        "model_type": "persimmon",
        "vocab_size": vocab_size(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "qk_layernorm": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
    }
    config = FuyuConfig(
        text_config=text, patch_size=PATCH, image_size=SIDE, image_token_id=tokenizer.convert_tokens_to_ids("|SPEAKER|")
    )
    return FuyuForCausalLM(config)


def fuyu_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    sides = {"height": SIDE, "width": SIDE}
    return FuyuProcessor(FuyuImageProcessor(size=sides, patch_size={"height": PATCH, "width": PATCH}), tokenizer)
