"""A chat template for families trained on one task text after its pictures, which have none: PaliGemma and kin."""

from __future__ import annotations


def plain_template(family: str, picture: str) -> str:
    """All pictures, each written as `picture`, then the texts by lines; earlier answers are refused."""
    return _TEMPLATE.replace("FAMILY", family).replace("PICTURE", picture)


_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ('system', 'user') -%}"
    "{{ raise_exception('FAMILY answers one task text; it takes no earlier answers') }}"
    "{%- endif -%}"
    "{%- if message['content'] is not string -%}"
    "{%- for part in message['content'] if part['type'] == 'image' -%}{{ 'PICTURE' }}{%- endfor -%}"
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
