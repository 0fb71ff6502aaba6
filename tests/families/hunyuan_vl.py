"""HunyuanVL: a merger called once a picture that adds row ends, and four kinds of rotary positions."""

from __future__ import annotations

from transformers import (
    HunYuanVLConfig,
    HunYuanVLForConditionalGeneration,
    HunYuanVLImageProcessor,
    HunYuanVLProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.newer_templates import HUNYUAN_NAMED, HUNYUAN_SPECIAL, HUNYUAN_TEMPLATE
from tests.families.recipes import HIDDEN, MAX_PIXELS, MERGE, PATCH, Family, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

_BOS, _EOS, _PAD = HUNYUAN_SPECIAL[:3]


def _tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(HUNYUAN_SPECIAL, HUNYUAN_NAMED, eos=_EOS, pad=_PAD, bos=_BOS)


def _model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "out_hidden_size": HIDDEN,
        "max_image_size": 8 * PATCH,  # positions of 8 x 8 patches, interpolated for other sizes
    }
    rope = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 10000.0}
    rope["mrope_section"] = [1, 1, 1, 1]
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in HUNYUAN_NAMED.items()}
    config = HunYuanVLConfig(
        text_config=text_config(tokenizer, _EOS, head_dim=8, rope_parameters=rope),
        vision_config=vision,
        image_token_id=ids["image_token"],
        im_start_id=ids["image_start_token"],
        im_end_id=ids["image_end_token"],
    )
    return HunYuanVLForConditionalGeneration(config)


def _processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": MAX_PIXELS}
    images = HunYuanVLImageProcessor(patch_size=PATCH, merge_size=MERGE, size=size)
    return HunYuanVLProcessor(image_processor=images, tokenizer=tokenizer, chat_template=HUNYUAN_TEMPLATE)


HUNYUAN_VL = Family(_tokenizer, _processor, _model, (_EOS,))
