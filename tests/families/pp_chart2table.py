"""PP-Chart2Table: GOT-OCR 2's model; the chat template writes all tokens of a picture."""

from __future__ import annotations

from transformers import (
    AutoModelForImageTextToText,
    PPChart2TableConfig,
    PPChart2TableImageProcessor,
    PPChart2TableProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.crops import GOT_SIDE, got_vision
from tests.families.recipes import text_config
from tests.families.turns import chatml

NUM_TOKENS = (GOT_SIDE // 4 // 4) ** 2


def pp_chart2table(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = PPChart2TableConfig(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen2"),
        vision_config=got_vision(),
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"),
    )
    return AutoModelForImageTextToText.from_config(config)


def pp_chart2table_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return PPChart2TableProcessor(
        image_processor=PPChart2TableImageProcessor(size={"height": GOT_SIDE, "width": GOT_SIDE}),
        tokenizer=tokenizer,
        chat_template=chatml(image=f"<img>{'<imgpad>' * NUM_TOKENS}</img>\\n"),
    )
