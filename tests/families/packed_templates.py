"""Chat templates and special tokens of families with packed patches, in the style of their published checkpoints."""

from __future__ import annotations

from tests.families.turns import chatml, written

GLM_SPECIAL = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)
GLM_TEMPLATE = """\
{%- macro written(content) -%}
{%- if content is string %}{{ content }}
{%- else %}
{%- for item in content %}
{%- if item.type == 'video' or 'video' in item %}<|begin_of_video|><|video|><|end_of_video|>
{%- elif item.type == 'image' or 'image' in item %}<|begin_of_image|><|image|><|end_of_image|>
{%- elif item.type == 'text' %}{{ item.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro -%}
[gMASK]<sop>
{%- for message in messages %}
{%- if message.role == 'system' %}<|system|>{{ '\\n' }}
{%- elif message.role == 'user' %}<|user|>{{ '\\n' }}
{%- elif message.role == 'assistant' %}<|assistant|>{{ '\\n' }}
{%- endif %}
{{- written(message.content) }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '\\n' }}{% endif %}"""
"""GLM-4.1V's: pictures and the frames of videos are written with the same token."""

VIDEO_LLAMA_TEMPLATE = chatml(image="<|image_pad|>\\n", video="<|video_pad|>\\n")

PADDLE_SPECIAL = ("<unk>", "<s>", "</s>", "<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_END|>")
PADDLE_NAMED = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
PADDLE_TEMPLATE = """\
{{- '<|begin_of_sentence|>' -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ 'User: ' }}
{%- elif message['role'] == 'assistant' -%}{{ 'Assistant:\\n' }}
{%- endif -%}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for content in message['content'] -%}
{%- if content['type'] == 'image' -%}{{ '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}
{%- elif content['type'] == 'text' -%}{{ content['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '</s>' if message['role'] == 'assistant' else '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:\\n' }}{%- endif -%}"""

KIMI_SPECIAL = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<|kimi_k25_video_placeholder|>",
)
KIMI_TEMPLATE = (
    written(
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>", video="<|kimi_k25_video_placeholder|>"
    )
    + """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}<|im_user|>user<|im_middle|>
{%- elif message['role'] == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>
{%- else -%}<|im_system|>system<|im_middle|>
{%- endif -%}
{{- written(message['content']) -}}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""
)

ERNIE_SPECIAL = ("<unk>", "<s>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>")
ERNIE_NAMED = {
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
ERNIE_TEMPLATE = """\
{%- set number = namespace(image=1, video=1) -%}
{%- macro written(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'image' -%}
Picture {{ number.image }}:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>{%- set number.image = number.image + 1 -%}
{%- elif part['type'] == 'video' -%}
Video {{ number.video }}:<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>{%- set number.video = number.video + 1 -%}
{%- elif part['type'] == 'text' -%}{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- '<|begin_of_sentence|>' -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ 'User: ' + written(message['content']) + '\\n' }}
{%- elif message['role'] == 'assistant' -%}{{ 'Assistant: ' + written(message['content']) + '<|end_of_sentence|>' }}
{%- else -%}{{ written(message['content']) + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '\\nAssistant: ' }}{%- endif -%}"""
