"""HyperCLOVA X Vision: Qwen 2.5-VL's tower, a projection behind its merger, a text model with multipliers."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Tokenizer,
    HyperCLOVAXVisionV2Config,
    HyperCLOVAXVisionV2ForConditionalGeneration,
    HyperCLOVAXVisionV2Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from tests.families.recipes import QWEN_TOWER, packed_media, text_config
from tests.families.tokenizers_and_templates import QWEN_SPECIAL_TOKENS, train_bpe
from tests.families.turns import chatml

TEMPLATE = chatml(
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video='{"video_duration": <|video_duration|>}<|vision_start|><|video_pad|><|vision_end|>',
)
"""The processor writes a video's seconds in the place of `<|video_duration|>`."""


def hyperclovax_tokenizer() -> PreTrainedTokenizerBase:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocab, merges = train_bpe(trained, sorted(pre_tokenizers.ByteLevel.alphabet()))
    return GPT2Tokenizer(
        vocab=vocab,
        merges=merges,
        add_prefix_space=False,
        unk_token=None,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(QWEN_SPECIAL_TOKENS),
        model_max_length=2048,
    )


def hyperclovax_vision_v2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "model_type": "qwen2_5_vl_vision",
        **QWEN_TOWER,
        "out_hidden_size": 24,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    text = text_config(
        tokenizer,
        "<|im_end|>",
        model_type="hyperclovax",
        embedding_multiplier=2.0,
        logits_scaling=0.5,
        residual_multiplier=0.7,
        attention_multiplier=0.3,
    )
    config = HyperCLOVAXVisionV2Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        tie_word_embeddings=False,
    )
    return HyperCLOVAXVisionV2ForConditionalGeneration(config)


def hyperclovax_vision_v2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return HyperCLOVAXVisionV2Processor(
        tokenizer=tokenizer,
        **packed_media(Qwen2VLImageProcessor, Qwen2VLVideoProcessor),
        chat_template=TEMPLATE,
    )
