"""Special tokens and chat templates of newer families, in the style of their published checkpoints."""

from __future__ import annotations

from tests.families.tokenizers_and_templates import QWEN2_TEMPLATE, QWEN3_TEMPLATE
from tests.families.turns import chatml, turns, written

QWEN2_5_OMNI_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2_5_OMNI_NAMED = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
QWEN3_OMNI_NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}


def _with_sounds(template: str, anchor: str, sound: str) -> str:
    """The template with a branch for sounds, as checkpoints of Qwen Omni have it."""
    branch = f"{{% elif content['type'] == 'audio' %}}{sound}"
    assert template.count(anchor) == 1
    return template.replace(anchor, branch + anchor)


def _renamed(template: str) -> str:
    for old, new in (
        ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_bos|><|IMAGE|><|vision_eos|>"),
        ("<|vision_start|><|video_pad|><|vision_end|>", "<|vision_bos|><|VIDEO|><|vision_eos|>"),
    ):
        assert old in template
        template = template.replace(old, new)
    return template


QWEN2_5_OMNI_TEMPLATE = _with_sounds(
    _renamed(QWEN2_TEMPLATE),
    "{% elif content['type'] == 'video' or 'video' in content %}",
    "<|audio_bos|><|AUDIO|><|audio_eos|>",
)
QWEN3_OMNI_TEMPLATE = _with_sounds(
    QWEN3_TEMPLATE,
    "{%- elif content.type == 'video' or 'video' in content %}",
    "<|audio_start|><|audio_pad|><|audio_end|>",
)

EXAONE_SPECIAL = (
    "[PAD]",
    "[BOS]",
    "[EOS]",
    "[UNK]",
    "[|system|]",
    "[|user|]",
    "[|assistant|]",
    "[|endofturn|]",
    "<vision>",
    "</vision>",
    "<|image_pad|>",
    "<|video_pad|>",
)
EXAONE_TEMPLATE = turns(
    "[|",
    "|]\\n",
    "[|endofturn|]\\n",
    image="<vision><|image_pad|></vision>",
    video="<vision><|video_pad|></vision>",
)

HUNYUAN_SPECIAL = (
    "<\uff5chy_begin\u2581of\u2581sentence\uff5c>",
    "<\uff5chy_end\u2581of\u2581sentence\uff5c>",
    "<\uff5chy_pad\uff5c>",
    "<\uff5chy_User\uff5c>",
    "<\uff5chy_Assistant\uff5c>",
)
HUNYUAN_NAMED = {
    "image_token": "<\uff5chy_image\uff5c>",
    "image_start_token": "<\uff5chy_image_start\uff5c>",
    "image_end_token": "<\uff5chy_image_end\uff5c>",
}
HUNYUAN_TEMPLATE = (
    written(image="<\uff5chy_image_start\uff5c><\uff5chy_image\uff5c><\uff5chy_image_end\uff5c>")
    + """\
{{- '<\uff5chy_begin\u2581of\u2581sentence\uff5c>' -}}
{%- for message in messages -%}
{{- written(message['content']) -}}
{%- if message['role'] == 'user' -%}{{ '<\uff5chy_User\uff5c>' }}
{%- elif message['role'] == 'assistant' -%}{{ '<\uff5chy_Assistant\uff5c>' }}
{%- else -%}{{ '\\n' }}
{%- endif -%}
{%- endfor -%}"""
)
"""HunyuanOCR's: the role's token comes after the text, and opens the answer."""


FRAMES_TEMPLATE = QWEN3_TEMPLATE.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
"""For processors that mark each frame of a video themselves."""

STEP_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<im_patch>",
    "<im_start>",
    "<im_end>",
    "<patch_start>",
    "<patch_end>",
    "<patch_newline>",
)
STEP_TEMPLATE = chatml(image="<im_patch>")

MUSE_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eot|>",
    "<|finetune_right_pad|>",
    "<|patch|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|video|>",
    "<|vid_frame_separator|>",
    "<|vid_start|>",
    "<|vid_end|>",
    "<|audio|>",
    "<|soft_audio_start|>",
    "<|soft_audio_end|>",
)
MUSE_TEMPLATE = "{{- '<|begin_of_text|>' -}}" + turns(
    "<|header_start|>", "<|header_end|>\\n\\n", "<|eot|>", image="<|patch|>", video="<|video|>", audio="<|audio|>"
)

DOTS_SPECIAL = (
    "<|endoftext|>",
    "<|userprompt|>",
    "<|endofuserprompt|>",
    "<|response|>",
    "<|endofresponse|>",
    "<|img|>",
    "<|imgpad|>",
    "<|endofimg|>",
    "<|video_start|>",
    "<|video_pad|>",
    "<|video_end|>",
    "<|audio_comp_pad|>",
)
DOTS_TEMPLATE = (
    written(image="<|img|><|imgpad|><|endofimg|>", video="<|video_start|><|video_pad|><|video_end|>")
    + """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '<|userprompt|>' + written(message['content']) + '<|endofuserprompt|>' }}
{%- elif message['role'] == 'assistant' -%}{{ '<|response|>' + written(message['content']) + '<|endofresponse|>' }}
{%- else -%}{{ written(message['content']) + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|response|>' }}{%- endif -%}"""
)
