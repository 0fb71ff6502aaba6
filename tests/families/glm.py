"""GLM-4V and its kin: a convolution before the merger, and one token for pictures and the frames of videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
    GlmgaConfig,
    GlmgaImageProcessor,
    GlmgaVideoProcessor,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.packed_templates import GLM_SPECIAL, GLM_TEMPLATE
from tests.families.recipes import HIDDEN, MAX_PIXELS, MERGE, PATCH, Family, mrope, text_config, token_ids
from tests.families.tokenizers_and_templates import qwen_tokenizer

VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "image_size": 16,  # positions of 4 x 4 patches, interpolated for other sizes
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}


def glm_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(GLM_SPECIAL, eos="<|endoftext|>")


def _model(config: type, model: type, **text: Any) -> Callable[[PreTrainedTokenizerBase], PreTrainedModel]:
    def make(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        rope = mrope(1, 1, 1, partial_rotary_factor=0.75)
        return model(
            config(
                text_config=text_config(tokenizer, "<|endoftext|>", rope_parameters=rope, **text),
                vision_config=dict(VISION),
                **glm_ids(tokenizer),
            )
        )

    return make


def glm_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return token_ids(
        tokenizer,
        image_token_id="<|image|>",
        video_token_id="<|video|>",
        image_start_token_id="<|begin_of_image|>",
        image_end_token_id="<|end_of_image|>",
        video_start_token_id="<|begin_of_video|>",
        video_end_token_id="<|end_of_video|>",
    )


def _processor(cls: type, images: type, videos: type) -> Callable[[PreTrainedTokenizerBase], ProcessorMixin]:
    least = 2 * (PATCH * MERGE) ** 2  # a picture counts as two frames
    common = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}

    def make(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
        return cls(
            image_processor=images(size={"shortest_edge": least, "longest_edge": 2 * MAX_PIXELS}, **common),
            tokenizer=tokenizer,
            video_processor=videos(size={"shortest_edge": least, "longest_edge": 16 * MAX_PIXELS}, **common),
            chat_template=GLM_TEMPLATE,
        )

    return make


_GLM_4V = (Glm4vProcessor, Glm4vImageProcessor, Glm4vVideoProcessor)
_GLM_46V = (Glm46VProcessor, Glm46VImageProcessor, Glm46VVideoProcessor)
_GLMGA = (Glm46VProcessor, GlmgaImageProcessor, GlmgaVideoProcessor)


def _family(processor: tuple[type, type, type], config: type, model: type, **text: Any) -> Family:
    return Family(
        glm_tokenizer,
        _processor(*processor),
        _model(config, model, **text),
        ("<|user|>", "<|endoftext|>"),
        takes_videos=True,
    )


GLM: Mapping[str, Family] = {
    "glm4v": _family(_GLM_4V, Glm4vConfig, Glm4vForConditionalGeneration),
    "glm4v_moe": _family(_GLM_4V, Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, **EXPERTS),
    "glm46v": _family(_GLM_46V, Glm46VConfig, Glm46VForConditionalGeneration),
    "glmga": _family(_GLMGA, GlmgaConfig, Glm46VForConditionalGeneration),
    "glm_ocr": _family(_GLM_46V, GlmOcrConfig, GlmOcrForConditionalGeneration, head_dim=8),
}
