"""DeepSeek-OCR 2: a whole view of a picture and tiles of a large one go through the tower in two calls."""

from __future__ import annotations

from transformers import (
    DeepseekOcr2Config,
    DeepseekOcr2ForConditionalGeneration,
    DeepseekOcr2ImageProcessor,
    DeepseekOcr2Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

SIDE = 36
PATCH = 3
"""SAM's grid of 12 x 12 becomes 3 x 3, which the encoder reads with its 144 learned queries."""

DeepseekOcr2Processor.images_kwargs = {**DeepseekOcr2Processor.images_kwargs, "max_patches": 3}
"""A checkpoint cannot set it: with the class's own 6, prompts would be twice as long."""

SPECIAL = ("<bos>", "<eos>", "<pad>", "<image>")


def deepseek_ocr2_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(SPECIAL, eos="<eos>", pad="<pad>", bos="<bos>")


SAM_CONFIG = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "window_size": 5,
    "global_attn_indexes": [1],
    "mlp_dim": 64,
    "downsample_channels": [24, 32],
}
"""Of the tower that sees whole pictures; Unlimited-OCR has the same."""


def deepseek_ocr2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    encoder = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 16,
    }
    text = text_config(
        tokenizer,
        "<eos>",
        max_position_embeddings=4096,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "sparse"],
    )
    config = DeepseekOcr2Config(
        text_config=text,
        vision_config={"sam_config": SAM_CONFIG, "encoder_config": encoder},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    return DeepseekOcr2ForConditionalGeneration(config)


def deepseek_ocr2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = DeepseekOcr2ImageProcessor(size={"height": SIDE, "width": SIDE}, tile_size=SIDE)
    return DeepseekOcr2Processor(image_processor=images, tokenizer=tokenizer, patch_size=PATCH, downsample_ratio=1)
