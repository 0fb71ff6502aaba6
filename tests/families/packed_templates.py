"""Chat templates and special tokens of families with packed patches, in the style of their published checkpoints."""

from __future__ import annotations

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
