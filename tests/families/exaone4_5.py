"""EXAONE 4.5: Qwen2.5-VL's tower with grouped-query attention, under EXAONE 4 with windows and without M-RoPE."""

from __future__ import annotations

from transformers import (
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Exaone4_5_Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from tests.families.newer_templates import EXAONE_SPECIAL, EXAONE_TEMPLATE
from tests.families.recipes import QWEN_TOWER, Family, packed_media, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

WINDOW = 12


def _tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(EXAONE_SPECIAL, eos="[|endofturn|]", pad="[PAD]", bos="[BOS]")


def _model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **QWEN_TOWER,
        "num_key_value_heads": 1,
        "window_size": 16,  # pixels: windows of 2 x 2 merged patches
        "fullatt_block_indexes": [1],
    }
    windows = {
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    config = Exaone4_5_Config(
        text_config=text_config(tokenizer, "[|endofturn|]", model_type="exaone4", **windows),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )
    return Exaone4_5_ForConditionalGeneration(config)


def _processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return Exaone4_5_Processor(
        tokenizer=tokenizer,
        **packed_media(Qwen2VLImageProcessor, Qwen2VLVideoProcessor),
        chat_template=EXAONE_TEMPLATE,
    )


EXAONE4_5 = Family(_tokenizer, _processor, _model, ("[|endofturn|]", "[EOS]"), takes_videos=True)
