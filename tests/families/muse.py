"""Muse: gated attention with windows, scaled and capped logits; Spark adds experts and a tower for sounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import (
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    MuseGlimmerImageProcessor,
    MuseGlimmerProcessor,
    MuseGlimmerVideoProcessor,
    MuseSparkConfig,
    MuseSparkFeatureExtractor,
    MuseSparkForConditionalGeneration,
    MuseSparkProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.newer_templates import MUSE_SPECIAL, MUSE_TEMPLATE
from tests.families.recipes import HIDDEN, MERGE, PATCH, Family, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

WINDOW = 12
VISION = {
    "patch_size": PATCH,
    "pos_emb_height": 4,  # windows are as many patches wide
    "pos_emb_width": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "patch_temporal": 2,
    "merge_size": MERGE,
    "layer_types": ["window_attention", "full_attention", "window_attention"],
}
TEXT = {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "output_multiplier": 0.5,
    "qk_scale_factor": 1.5,
}
"""Scores are 1.5 wide. Scaled by 5.5, the default, attention of random weights is nearly a choice, and amplifies noise:
1e-6 in the embeddings moved Spark's own logits by up to 1.8e-3, once by 1.9 as another expert was chosen. Factored
deltas and merged models were 1.1e-4 to 2.2e-4 apart in float32 in 6 of 6 random builds, and 8e-14 in float64. As it
is, 6 of 6 are within 4e-5.
"""
EXPERTS = {
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_hidden_size": 24,
}
AUDIO = {
    "patch_sizes": [4, 2],
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "num_hidden_layers": 2,
    "conv_kernel_size": 3,
    "out_hidden_size": HIDDEN,
}


def _tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(MUSE_SPECIAL, eos="<|eot|>", pad="<|finetune_right_pad|>", bos="<|begin_of_text|>")


def _ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|patch|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video|>"),
    }


def _glimmer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = MuseGlimmerConfig(
        text_config=text_config(tokenizer, "<|eot|>", **TEXT),
        vision_config=VISION,
        out_hidden_size=32 * MERGE**2,
        projector_hidden_size=48,
        **_ids(tokenizer),
    )
    return MuseGlimmerForConditionalGeneration(config)


def _spark(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = MuseSparkConfig(
        text_config=text_config(tokenizer, "<|eot|>", **TEXT, **EXPERTS),
        vision_config=VISION,
        audio_config=AUDIO,
        out_hidden_size=32 * MERGE**2,
        projector_hidden_size=48,
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
        **_ids(tokenizer),
    )
    return MuseSparkForConditionalGeneration(config)


def _processor(cls: type, *, hears: bool = False) -> Callable[[PreTrainedTokenizerBase], ProcessorMixin]:
    common = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}

    def make(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
        sounds = {"feature_extractor": MuseSparkFeatureExtractor(samples_per_token=8)} if hears else {}
        return cls(
            image_processor=MuseGlimmerImageProcessor(max_image_tokens=64, **common),
            video_processor=MuseGlimmerVideoProcessor(max_video_frame_tokens=16, **common),
            tokenizer=tokenizer,
            chat_template=MUSE_TEMPLATE,
            **sounds,
        )

    return make


_STOP = ("<|eot|>", "<|end_of_text|>")

MUSE: Mapping[str, Family] = {
    "muse_glimmer": Family(_tokenizer, _processor(MuseGlimmerProcessor), _glimmer, _STOP, takes_videos=True),
    "muse_spark": Family(_tokenizer, _processor(MuseSparkProcessor, hears=True), _spark, _STOP, takes_videos=True),
}
