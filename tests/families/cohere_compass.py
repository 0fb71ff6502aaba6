"""Cohere Compass: Qwen 3-VL's tower with deepstack over Cohere's text model, windows with rotary positions and full
layers without."""

from __future__ import annotations

from transformers import (
    CohereCompassConfig,
    CohereCompassForConditionalGeneration,
    CohereCompassImageProcessor,
    CohereCompassProcessor,
    CohereCompassVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import QWEN_TOWER, mrope, packed_media, text_config, token_ids
from tests.families.tiled_templates import COHERE_SPECIAL
from tests.families.tokenizers_and_templates import qwen_tokenizer

MEDIA_TOKENS = ("<|VISION_START|>", "<|VISION_END|>", "<|IMAGE_PAD|>", "<|VIDEO_PAD|>")
END = "<|END_OF_TURN_TOKEN|>"

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[message['role']] %}"
    "{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<|VISION_START|><|IMAGE_PAD|><|VISION_END|>' }}"
    "{% elif content['type'] == 'video' %}{{ '<|VIDEO_PAD|>' }}"
    "{% else %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)


def cohere_compass_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer((*COHERE_SPECIAL, *MEDIA_TOKENS), eos=END, pad="<PAD>", bos="<BOS_TOKEN>")


def cohere_compass(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **QWEN_TOWER,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    text = text_config(
        tokenizer,
        END,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=6,
        rope_parameters={"sliding_attention": mrope(2, 1, 1), "full_attention": None},
        logit_scale=0.25,
        tie_word_embeddings=False,
    )
    ids = token_ids(
        tokenizer,
        image_token_id="<|IMAGE_PAD|>",
        video_token_id="<|VIDEO_PAD|>",
        vision_start_token_id="<|VISION_START|>",
        vision_end_token_id="<|VISION_END|>",
    )
    config = CohereCompassConfig(text_config=text, vision_config=vision, **ids)
    return CohereCompassForConditionalGeneration(config)


def cohere_compass_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    media = packed_media(CohereCompassImageProcessor, CohereCompassVideoProcessor)
    return CohereCompassProcessor(**media, tokenizer=tokenizer, chat_template=TEMPLATE)
