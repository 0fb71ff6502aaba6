"""Gemma 3n: a convolutional tower of timm's, layers that predict for each other, a second embedding, shared keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.layers import RmsNorm2d
from timm.models import register_model
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.mobilenetv5 import MobileNetV5Encoder
from torch import nn
from transformers import (
    Gemma3nAudioFeatureExtractor,
    Gemma3nConfig,
    Gemma3nForConditionalGeneration,
    Gemma3nProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SiglipImageProcessor,
)

from tests.families.recipes import text_config, vocab_size
from tests.families.tokenizers_and_templates import GEMMA3_TEMPLATE, gemma_tokenizer

IMAGE = 64
SIDE = 4
"""Of the grid of a picture's tokens."""
HEAD_DIM = 8
NAMED = {
    "boi_token": "<start_of_image>",
    "boa_token": "<start_of_audio>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "eoa_token": "<end_of_audio>",
    "audio_token": "<audio_soft_token>",
}
"""In the order of their ids: from the end of a picture on they are embedded as pictures are, then as sounds."""
TEMPLATE = GEMMA3_TEMPLATE.replace("<start_of_image>", "<image_soft_token>")

BLOCKS = (
    ["er_r1_k3_s2_e2_c8"],
    ["uir_r1_a3_k3_s2_e2_c16", "uir_r1_a3_k0_s1_e2_c16"],
    ["uir_r1_a3_k3_s2_e2_c16", "mqa_r1_k3_h2_v2_s1_d8_c16", "uir_r1_a0_k0_s1_e2_c16"],
)
"""The kinds of block of the published tower, in timm's words: its last two stages are its features."""


def gemma3n_tokenizer() -> PreTrainedTokenizerBase:
    return gemma_tokenizer(named=NAMED)


@register_model
def mobilenetv5_tiny_enc(pretrained: bool = False, **options: Any) -> MobileNetV5Encoder:
    """As timm's `mobilenetv5_300m_enc`, with few narrow blocks."""
    assert not pretrained
    return MobileNetV5Encoder(
        decode_arch_def(BLOCKS),
        stem_size=8,
        pad_type="same",
        msfa_output_resolution=SIDE,
        norm_layer=RmsNorm2d,
        act_layer=partial(nn.GELU, approximate="tanh"),
        layer_scale_init_value=1.0,
    )


def _tower() -> dict[str, Any]:
    return {"architecture": "mobilenetv5_tiny_enc", "hidden_size": 2048}  # the only width that timm's class makes


def gemma3n(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in NAMED.items()}
    assert list(ids.values()) == sorted(ids.values())
    first_picture, first_sound = ids["eoi_token_id"], ids["eoa_token_id"]
    text = text_config(
        tokenizer,
        "<end_of_turn>",
        head_dim=HEAD_DIM,
        num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=2,
        sliding_window=8,
        vocab_size_per_layer_input=first_picture,
        hidden_size_per_layer_input=8,
        altup_num_inputs=3,
        laurel_rank=4,
        activation_sparsity_pattern=[0.5, 0.0, 0.5, 0.0, 0.0],
    )
    audio = {
        "vocab_size": vocab_size(tokenizer) - first_sound,
        "vocab_offset": first_sound,
        "hidden_size": 32,
        "input_feat_size": 16,
        "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1,
        "sscp_conv_channel_size": [8, 4],
    }
    config = Gemma3nConfig(
        text_config=text,
        vision_config={**_tower(), "vocab_size": first_sound - first_picture, "vocab_offset": first_picture},
        audio_config=audio,
        vision_soft_tokens_per_image=SIDE * SIDE,
        **ids,
    )
    return _with_even_scores(Gemma3nForConditionalGeneration(config))


def _with_even_scores(model: PreTrainedModel) -> PreTrainedModel:
    """Its attention does not divide scores by the root of a head's width, which random norms do not make up for.

    With query norms of one and a tenth of the activations kept, noise of 1e-6 in the embeddings moves transformers'
    own logits by up to 1.2e-3: a mixed batch and merged models were apart by up to 9e-4 in float32 in 5 of 8 random
    builds, and by 7e-12 in float64. As it is, it moves them by 8e-5, and 12 of 12 builds are within 5e-5 in float32.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.fill_(HEAD_DIM**-0.5)
    return model


def gemma3n_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = SiglipImageProcessor(size={"height": IMAGE, "width": IMAGE}, do_normalize=False)
    return Gemma3nProcessor(
        feature_extractor=Gemma3nAudioFeatureExtractor(),
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
        image_seq_length=SIDE * SIDE,
    )
