"""Chat templates and special tokens of the families with tiles, in the style of their published checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.families.turns import chatml, turns

INTERNVL_TEMPLATE = chatml(image="<IMG_CONTEXT>\\n", video="<video>\\n")
INTERNVL_NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

ONEVISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\\n' + content['text'] }}"
    "{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""All pictures of a message come before its videos, and these before its text."""

LLAVA_VIDEO_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

GRANITE_TEMPLATE = turns("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\\n", image="<image>")
GRANITE_SPECIAL = ("<|end_of_text|>", "<|pad|>", "<|start_of_role|>", "<|end_of_role|>", "<image>")

COHERE_SPECIAL = (
    "<BOS_TOKEN>",
    "<PAD>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
)
COHERE_IMAGE_TOKENS = {
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "image_token": "<|IMG_PATCH|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}


def cohere_template(placeholder: str) -> str:
    return (
        "{{ bos_token }}{% for message in messages %}"
        "{% set role = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[message['role']] %}"
        "{{ '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for content in message['content'] %}"
        "{% if content['type'] == 'image' %}{{ '" + placeholder + "' }}{% else %}{{ content['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
    )


LLAMA4_SPECIAL = (
    "<|begin_of_text|>",
    "<|finetune_right_pad|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eot|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
)
OVIS2_SPECIAL = ("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
OVIS2_TEMPLATE = chatml(image="<image>\\n")


def plain_inputs(processor: Any, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the documentation of a family without a chat template passes to its processor, for one user's turn."""
    parts = [part for message in messages for part in message["content"]]
    pictures = [part["image"] for part in parts if part["type"] == "image"]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    return {"images": pictures or None, "text": _PLAIN[type(processor).__name__](len(pictures), text)}


def _got_text(num_pictures: int, text: str) -> str:
    return (
        "<|im_start|>system\nYou should follow the instructions carefully and explain your answers in detail.<|im_end|>"
        f"<|im_start|>user\n<img>{'<imgpad>' * num_pictures}</img>\n{text}<|im_end|><|im_start|>assistant\n"
    )


_PLAIN = {
    "Blip2Processor": lambda num_pictures, text: text,
    "BlipProcessor": lambda num_pictures, text: text,
    "ChameleonProcessor": lambda num_pictures, text: "<image>" * num_pictures + text,
    "FuyuProcessor": lambda num_pictures, text: text,
    "InstructBlipProcessor": lambda num_pictures, text: text,
    "Kosmos2Processor": lambda num_pictures, text: text,
    "Kosmos2_5Processor": lambda num_pictures, text: text,
    "DeepseekOcr2Processor": lambda num_pictures, text: "<image>\n" * num_pictures + text,
    "GotOcr2Processor": _got_text,
    "Gemma3Processor": lambda num_pictures, text: "<start_of_image>" * num_pictures + text,
    "Florence2Processor": lambda num_pictures, text: text,
    "PaliGemmaProcessor": lambda num_pictures, text: "<image>" * num_pictures + text,
}
