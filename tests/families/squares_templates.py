"""Chat templates and special tokens of the families in `squares`, in the style of their published checkpoints."""

from __future__ import annotations

from tests.families.turns import chatml

_DEEPSEEK = (
    "%(system)s{%% for message in messages %%}"
    "{%% if message['role'] == 'user' %%}{{ '%(user)s: ' }}"
    "{%% elif message['role'] == 'assistant' %%}{{ '%(assistant)s: ' }}"
    "{%% else %%}{{ message['role'].capitalize() + ': ' }}{%% endif %%}"
    "{%% for content in message['content'] %%}"
    "{%% if content['type'] == 'image' %%}{{ '<image_placeholder>' }}"
    "{%% elif content['type'] == 'text' %%}{{ content['text'] }}{%% endif %%}"
    "{%% endfor %%}"
    "{%% if message['role'] == 'assistant' %%}{{ eos_token }}{%% else %%}{{ '\\n\\n' }}{%% endif %%}"
    "{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '%(assistant)s:' }}{%% endif %%}"
)
DEEPSEEK_SPECIAL = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|pad|>")
DEEPSEEK_NAMED = {"image_token": "<image_placeholder>"}
DEEPSEEK_TEMPLATE = _DEEPSEEK % {
    "system": "You are a helpful language and vision assistant.\n\n",
    "user": "User",
    "assistant": "Assistant",
}

JANUS_SPECIAL = (*DEEPSEEK_SPECIAL, "<|User|>", "<|Assistant|>")
JANUS_NAMED = {**DEEPSEEK_NAMED, "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
JANUS_TEMPLATE = _DEEPSEEK % {"system": "", "user": "<|User|>", "assistant": "<|Assistant|>"}
"""The processor puts the system prompt before it."""


CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

ARIA_SPECIAL = (*CHATML_SPECIAL, "<fim_prefix>", "<fim_suffix>")
ARIA_NAMED = {"image_token": "<|img|>"}
ARIA_TEMPLATE = chatml(image="<fim_prefix><|img|><fim_suffix>")

LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA3_NAMED = {"image_token": "<|image|>", "video_token": "<|video|>"}
LLAMA3_TEMPLATE = (
    "{{- bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<|image|>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<|video|>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}"
    "{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
"""Perception LM's: all pictures of a message come before its videos, and these before its text."""

DOCLING_SPECIAL = (
    "<|end_of_text|>",
    "<|pad|>",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
