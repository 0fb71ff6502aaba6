"""Tokenizers and chat templates of the families that transformers generates for."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import BartTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.families.tokenizers_and_templates import train_bpe
from tests.families.turns import turns

MLLAMA_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)

MLLAMA_TEMPLATE = "{{- bos_token }}" + turns(
    "<|start_header_id|>", "<|end_header_id|>\\n\\n", "<|eot_id|>", image="<|image|>"
)
"""Llama 3.2 Vision's, without tools and dates."""

NUM_LOCATIONS = 10
"""Florence-2 has 1000 of its location tokens."""


def mllama_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE with Llama 3's special tokens; the picture's token is the last, beyond the head's rows."""
    backend = _byte_level()
    vocab, merges = train_bpe(backend, sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend.model = models.BPE(vocab=vocab, merges=merges)
    special = [AddedToken(token, special=True, normalized=False) for token in (*MLLAMA_SPECIAL_TOKENS, "<|image|>")]
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|finetune_right_pad_id|>",
        model_max_length=2048,
    )


def florence2_tokenizer() -> PreTrainedTokenizerBase:
    """BART's byte-level BPE, with the picture's token and the location tokens that answers and questions have."""
    vocab, merges = train_bpe(_byte_level(), sorted(pre_tokenizers.ByteLevel.alphabet()))
    first = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    numbered = {token: index for index, token in enumerate((*first, *sorted(vocab, key=vocab.__getitem__)))}
    tokenizer = BartTokenizer(
        vocab=numbered,
        merges=merges,
        model_specific_special_tokens={"image_token": "<image>"},
        extra_special_tokens=[
            AddedToken(f"<loc_{index}>", special=True, normalized=False) for index in range(NUM_LOCATIONS)
        ],
        model_max_length=1024,
    )
    assert isinstance(tokenizer, BartTokenizer)
    return tokenizer


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
