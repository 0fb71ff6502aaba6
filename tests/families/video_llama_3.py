"""VideoLLaMA 3: pictures are not merged, videos are; patches that do not change from frame to frame are left out."""

from __future__ import annotations

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
    VideoLlama3ImageProcessor,
    VideoLlama3Processor,
    VideoLlama3VideoProcessor,
)

from tests.families.packed_templates import VIDEO_LLAMA_TEMPLATE
from tests.families.recipes import PATCH, SMALL_TOWER, qwen_ids, text_config

MAX_PIXELS = 32 * 32


def video_llama_3(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **SMALL_TOWER,
        "patch_size": PATCH,
    }
    ids = qwen_ids(tokenizer)
    config = VideoLlama3Config(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen2"),
        vision_config=vision,
        image_token_id=ids["image_token_id"],
        video_token_id=ids["video_token_id"],
    )
    return VideoLlama3ForConditionalGeneration(config)


def video_llama_3_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    least = (2 * PATCH) ** 2
    return VideoLlama3Processor(
        image_processor=VideoLlama3ImageProcessor(
            patch_size=PATCH, size={"shortest_edge": least, "longest_edge": MAX_PIXELS}
        ),
        tokenizer=tokenizer,
        video_processor=VideoLlama3VideoProcessor(
            patch_size=PATCH, size={"shortest_edge": least, "longest_edge": 8 * MAX_PIXELS}
        ),
        chat_template=VIDEO_LLAMA_TEMPLATE,
    )
