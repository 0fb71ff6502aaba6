"""ERNIE 4.5 VL: experts for text and others for pictures, and a resampler that merges frames in pairs."""

from __future__ import annotations

from transformers import (
    Ernie4_5_VLMoeConfig,
    Ernie4_5_VLMoeForConditionalGeneration,
    Ernie4_5_VLMoeImageProcessor,
    Ernie4_5_VLMoeProcessor,
    Ernie4_5_VLMoeVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.packed_templates import ERNIE_NAMED, ERNIE_SPECIAL, ERNIE_TEMPLATE
from tests.families.recipes import MAX_PIXELS, MERGE, PATCH, mrope, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

EXPERTS = {
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": [24, 16],
}


def ernie4_5_vl_moe_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(ERNIE_SPECIAL, ERNIE_NAMED, eos="</s>", pad="<unk>", bos="<s>")


def ernie4_5_vl_moe(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
    }
    rope = mrope(1, 1, 2)
    config = Ernie4_5_VLMoeConfig(
        text_config=text_config(tokenizer, "</s>", rope_parameters=rope, tie_word_embeddings=False, **EXPERTS),
        vision_config=vision,
        tie_word_embeddings=False,
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in ERNIE_NAMED.items()},
    )
    return Ernie4_5_VLMoeForConditionalGeneration(config)


def ernie4_5_vl_moe_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    common = {"patch_size": PATCH, "merge_size": MERGE}
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": MAX_PIXELS}
    return Ernie4_5_VLMoeProcessor(
        image_processor=Ernie4_5_VLMoeImageProcessor(size=dict(size), **common),
        tokenizer=tokenizer,
        # Published checkpoints write the time into every frame, with a font file of their own.
        video_processor=Ernie4_5_VLMoeVideoProcessor(size=dict(size), draw_on_frames=False, **common),
        chat_template=ERNIE_TEMPLATE,
    )
