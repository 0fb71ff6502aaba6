"""Florence-2 has no turns: a request is one picture and a task such as `<CAPTION>`, which its processor writes out."""

from __future__ import annotations

TEMPLATE = """\
{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}
    {{ raise_exception("Florence-2 takes one user message: a picture and a task such as <CAPTION>") }}
{%- endif -%}
{%- if messages[0]['content'] is string -%}
    {{ messages[0]['content'] }}
{%- else -%}
    {{ messages[0]['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\n') }}
{%- endif -%}
"""
"""The user's text alone: the processor puts the picture's tokens before it."""

COMMANDS = r"<[A-Z_]+>|<loc_\d+>"
"""Tasks, and the places in the picture that some of them are about."""
