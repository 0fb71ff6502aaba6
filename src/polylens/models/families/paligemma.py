"""PaliGemma: a prefix-LM trained on one task text after its pictures, without a chat template."""

from __future__ import annotations

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ('system', 'user') -%}"
    "{{ raise_exception('PaliGemma answers one task text; it takes no earlier answers') }}"
    "{%- endif -%}"
    "{%- if message['content'] is not string -%}"
    "{%- for part in message['content'] if part['type'] == 'image' -%}{{ '<image>' }}{%- endfor -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- set texts = namespace(all=[]) -%}"
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{%- set texts.all = texts.all + [message['content']] -%}"
    "{%- else -%}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}"
    "{%- set texts.all = texts.all + [part['text']] -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{{- texts.all | join('\\n') -}}"
)
"""All pictures, then the texts by lines: what the processor takes (it adds `<bos>` between them and a newline)."""
