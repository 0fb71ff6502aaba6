"""Families whose pictures become tokens of the vocabulary: Chameleon, Emu 3."""

from __future__ import annotations

from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    ChameleonImageProcessor,
    ChameleonProcessor,
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3ImageProcessor,
    Emu3Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import text_config
from tests.families.tokenizers_and_templates import LLAVA_TEMPLATE, qwen_tokenizer

SIDE = 16
NUM_CODES = 16
CHAMELEON_NAMED = {"image_token": "<image>", "boi_token": "<racm3:break>", "eoi_token": "<eoss>"}


def _code(index: int) -> str:
    """Digits as letters, as Chameleon's vocabulary has it: 12 is `IMGIMGBCZ`."""
    return "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(index)) + "Z"


def chameleon_tokenizer() -> PreTrainedTokenizerBase:
    special = ("<s>", "<pad>", "</s>", "<reserved08706>", *map(_code, range(NUM_CODES)))
    tokenizer = qwen_tokenizer(special, CHAMELEON_NAMED, eos="</s>", pad="<pad>", bos="<s>")
    tokenizer.sep_token = "<reserved08706>"
    return tokenizer


def chameleon(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vocabulary = tokenizer.get_vocab()
    vq_config = {
        "embed_dim": 8,
        "num_embeddings": NUM_CODES,
        "latent_channels": 8,
        "resolution": SIDE,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "num_res_blocks": 1,
    }
    config = ChameleonConfig(
        **text_config(tokenizer, "</s>"),
        vq_config=vq_config,
        vocabulary_map={name: vocabulary[name] for name in ("<image>", *map(_code, range(NUM_CODES)))},
    )
    return ChameleonForConditionalGeneration(config)


def chameleon_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = ChameleonImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return ChameleonProcessor(image_processor=images, tokenizer=tokenizer, image_seq_length=(SIDE // 4) ** 2)


EMU3_NAMED = {
    "image_token": "<image>",
    "boi_token": "<|image start|>",
    "eoi_token": "<|image end|>",
    "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>",
}
EMU3_CODES = tuple(f"<|visual token {index:06d}|>" for index in range(NUM_CODES))


def emu3_tokenizer() -> PreTrainedTokenizerBase:
    special = ("<|extra_203|>", "<|extra_204|>", "<|endoftext|>", "<|extra_200|>", *EMU3_CODES)
    return qwen_tokenizer(special, EMU3_NAMED, eos="<|extra_204|>", pad="<|endoftext|>", bos="<|extra_203|>")


def emu3(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vocabulary = tokenizer.get_vocab()
    vq_config = {
        "codebook_size": NUM_CODES,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "hidden_size": 32,
    }
    config = Emu3Config(
        text_config=text_config(tokenizer, "<|extra_204|>", attention_dropout=0.0),
        vq_config=vq_config,
        vocabulary_map={name: vocabulary[name] for name in ("<image>", "<|extra_200|>", *EMU3_CODES)},
    )
    return Emu3ForConditionalGeneration(config)


def emu3_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = Emu3ImageProcessor(min_pixels=32 * 32, max_pixels=40 * 40)
    return Emu3Processor(images, tokenizer, chat_template=LLAVA_TEMPLATE)
