"""Step 3.7: a whole picture and its tiles, clamped experts, other numbers of heads in sliding layers."""

from __future__ import annotations

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
    Step3p7ImageProcessor,
    Step3p7Processor,
)

from tests.families.newer_templates import STEP_SPECIAL, STEP_TEMPLATE
from tests.families.recipes import PATCH, Family, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

IMAGE = 8 * PATCH
TILE = 4 * PATCH
"""The tower halves both sides twice: a tile becomes one token, a whole picture four."""
WINDOW = 12


def _tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(STEP_SPECIAL)


def _model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE,
        "patch_size": PATCH,
        "mlp_ratio": 2.0,
        "max_position_embeddings": (IMAGE // PATCH) ** 2,
    }
    layers = {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_sliding_attention_heads": 2,
        "sliding_window": WINDOW,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "share_expert_dim": 16,
        "swiglu_limits": [0.0, 0.0, 0.5],
        "swiglu_limits_shared": [0.0, 0.5, 0.0],
    }
    config = Step3p7Config(
        text_config=text_config(tokenizer, "<|im_end|>", **layers),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<im_patch>"),
    )
    return Step3p7ForConditionalGeneration(config)


def _processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = Step3p7ImageProcessor(size={"height": IMAGE, "width": IMAGE}, patch_size=TILE, max_image_size=4 * IMAGE)
    images.vision_patch_size = PATCH
    return Step3p7Processor(image_processor=images, tokenizer=tokenizer, chat_template=STEP_TEMPLATE)


STEP3P7 = Family(_tokenizer, _processor, _model, ("<|im_end|>", "<|endoftext|>"))
