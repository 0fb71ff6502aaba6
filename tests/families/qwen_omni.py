"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: text models that also see, and hear with a tower of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from tests.families.newer_templates import (
    QWEN2_5_OMNI_NAMED,
    QWEN2_5_OMNI_SPECIAL,
    QWEN2_5_OMNI_TEMPLATE,
    QWEN3_OMNI_NAMED,
    QWEN3_OMNI_TEMPLATE,
)
from tests.families.recipes import HIDDEN, MERGE, Family, mrope, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

PATCHES = {"2.5": 28, "3": 32}
"""Twice as large as published ones: what frames of videos are enlarged to is fixed in the processors' code."""
NUM_MEL_BINS = 16
AUDIO = {
    "num_mel_bins": NUM_MEL_BINS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 16,
    "max_source_positions": 64,
    "output_dim": HIDDEN,
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
WINDOWS = {"patch_size": PATCHES["2.5"], "window_size": 4 * PATCHES["2.5"], "fullatt_block_indexes": [1]}
LEVELS = {"patch_size": PATCHES["3"], "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
EXPERTS = {
    "head_dim": 8,
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}


def _thinker_2_5(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = Qwen2_5OmniThinkerConfig(
        text_config=text_config(
            tokenizer, "<|im_end|>", rope_parameters=mrope(1, 1, 2), max_window_layers=0, tie_word_embeddings=False
        ),
        vision_config={**VISION, **WINDOWS},
        audio_config={**AUDIO, "n_window": 4},
        **_ids(tokenizer, QWEN2_5_OMNI_NAMED, suffix="_token_index"),
    )
    return Qwen2_5OmniThinkerForConditionalGeneration(config)


def _thinker_3(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A dense layer between two of experts."""
    rope = mrope(2, 1, 1, mrope_interleaved=True)
    config = Qwen3OmniMoeThinkerConfig(
        text_config=text_config(tokenizer, "<|im_end|>", rope_parameters=rope, **EXPERTS),
        vision_config={**VISION, **LEVELS},
        audio_config={**AUDIO, "n_window": 4, "n_window_infer": 16, "downsample_hidden_size": 4},
        position_id_per_seconds=13,
        **_ids(tokenizer, QWEN3_OMNI_NAMED, suffix="_token_id"),
    )
    return Qwen3OmniMoeThinkerForConditionalGeneration(config)


def _ids(tokenizer: PreTrainedTokenizerBase, named: Mapping[str, str], suffix: str) -> dict[str, int]:
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    return {
        **{f"{kind}{suffix}": ids[f"{kind}_token"] for kind in ("image", "video", "audio")},
        "vision_start_token_id": ids["vision_bos_token"],
        "vision_end_token_id": ids["vision_eos_token"],
        "audio_start_token_id": ids["audio_bos_token"],
        "audio_end_token_id": ids["audio_eos_token"],
    }


def _tokenizer(named: Mapping[str, str]) -> Callable[[], PreTrainedTokenizerBase]:
    return lambda: qwen_tokenizer(QWEN2_5_OMNI_SPECIAL, named)


def _processor(cls: type, template: str, patch: int) -> Callable[[PreTrainedTokenizerBase], ProcessorMixin]:
    common: dict[str, Any] = {"patch_size": patch, "merge_size": MERGE, "temporal_patch_size": 2}
    token = (patch * MERGE) ** 2

    def make(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
        return cls(
            image_processor=Qwen2VLImageProcessor(
                size={"shortest_edge": 4 * token, "longest_edge": 16 * token}, **common
            ),
            video_processor=Qwen2VLVideoProcessor(
                size={"shortest_edge": 4 * token, "longest_edge": 64 * token}, **common
            ),
            feature_extractor=WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, chunk_length=1),
            tokenizer=tokenizer,
            chat_template=template,
        )

    return make


_STOP = ("<|im_end|>", "<|endoftext|>")

QWEN_OMNI: Mapping[str, Family] = {
    "qwen2_5_omni_thinker": Family(
        _tokenizer(QWEN2_5_OMNI_NAMED),
        _processor(Qwen2_5OmniProcessor, QWEN2_5_OMNI_TEMPLATE, PATCHES["2.5"]),
        _thinker_2_5,
        _STOP,
        takes_videos=True,
    ),
    "qwen3_omni_moe_thinker": Family(
        _tokenizer(QWEN3_OMNI_NAMED),
        _processor(Qwen3OmniMoeProcessor, QWEN3_OMNI_TEMPLATE, PATCHES["3"]),
        _thinker_3,
        _STOP,
        takes_videos=True,
    ),
}
