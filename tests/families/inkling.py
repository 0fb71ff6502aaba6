"""Inkling 1 and 2: a bias by distance, short convolutions in every layer, experts; layers that run in a loop."""

from __future__ import annotations

from typing import Any

from transformers import (
    Inkling2Config,
    Inkling2ForConditionalGeneration,
    Inkling2ImageProcessor,
    Inkling2LoopConfig,
    Inkling2LoopForConditionalGeneration,
    Inkling2Processor,
    InklingConfig,
    InklingFeatureExtractor,
    InklingForConditionalGeneration,
    InklingImageProcessor,
    InklingProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import HIDDEN, SMALL_TOWER, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

PATCH = 8
"""Pixels of the square that one token shows."""
SPECIAL = (
    "<|message_user|>",
    "<|message_model|>",
    "<|message_system|>",
    "<|content_text|>",
    "<|end_message|>",
    "<|content_image|>",
    "<|content_audio_input|>",
    "<|unused_200053|>",
    "<|unused_200054|>",
)
IMAGE_TOKEN = "<|unused_200054|>"
EOS = "<|end_message|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{% if message['content'] is string %}"
    "{{ '<|message_' + role + '|><|content_text|>' + message['content'] + '<|end_message|>' }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}"
    "{{ '<|message_' + role + '|><|content_image|><|unused_200054|><|end_message|>' }}"
    "{% else %}{{ '<|message_' + role + '|><|content_text|>' + content['text'] + '<|end_message|>' }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|message_model|>' }}{% endif %}"
)


def inkling_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(SPECIAL, eos=EOS, pad=EOS)


def _text(tokenizer: PreTrainedTokenizerBase, num_layers: int, **more: Any) -> dict[str, Any]:
    """The head has rows for a part of the vocabulary only."""
    return text_config(
        tokenizer,
        EOS,
        unpadded_vocab_size=len(tokenizer),
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=8,
        d_rel=4,
        rel_extent=16,
        log_scaling_n_floor=16,
        num_hidden_layers=num_layers,
        layer_types=["hybrid_sliding", "hybrid"] * (num_layers // 2),
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        **more,
    )


def _tower() -> dict[str, Any]:
    return {
        **SMALL_TOWER,
        "patch_size": PATCH // 2,
        "posemb_grid_size": 4,
        "projection_hidden_dim": 48,
        "text_hidden_size": HIDDEN,
    }


def inkling2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = Inkling2Config(
        text_config=_text(tokenizer, 4, n_layers_per_attn_res_block=2),
        vision_config=_tower(),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
    )
    return Inkling2ForConditionalGeneration(config)


def inkling2_loop(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Its middle layers run twice."""
    loop = {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2, "loop_gate_rank": 4}
    config = Inkling2LoopConfig(
        text_config=_text(tokenizer, 6, n_layers_per_attn_res_block=2, **loop),
        vision_config={"model_type": "inkling2_vision", **_tower()},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
    )
    return Inkling2LoopForConditionalGeneration(config)


def inkling(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = InklingConfig(
        text_config=_text(
            tokenizer,
            2,
            mlp_layer_types=["dense", "sparse"],
            n_shared_experts=1,
            logits_mup_width_multiplier=1.0,
        ),
        vision_config={"patch_size": PATCH, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2},
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 4},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        audio_token_id=tokenizer.convert_tokens_to_ids("<|unused_200053|>"),
        image_bos_token_id=tokenizer.convert_tokens_to_ids("<|content_image|>"),
        audio_bos_token_id=tokenizer.convert_tokens_to_ids("<|content_audio_input|>"),
    )
    return InklingForConditionalGeneration(config)


def inkling2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = Inkling2ImageProcessor(size={"height": PATCH, "width": PATCH})
    return Inkling2Processor(
        image_processor=images, tokenizer=tokenizer, chat_template=TEMPLATE, image_token=IMAGE_TOKEN
    )


def inkling_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return InklingProcessor(
        feature_extractor=InklingFeatureExtractor(),
        image_processor=InklingImageProcessor(size={"height": PATCH, "width": PATCH}),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    )
