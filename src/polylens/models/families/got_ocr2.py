"""GOT-OCR 2: its processor builds the conversation itself; a checkpoint has no chat template."""

from __future__ import annotations

TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{ '<|im_start|>system\\nYou should follow the instructions carefully and explain your answers in detail.' }}"
    "{{ '<|im_end|>' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string "
    "else message['content'] -%}"
    "{%- set pictures = parts | selectattr('type', 'equalto', 'image') | list -%}"
    "{%- set texts = parts | selectattr('type', 'equalto', 'text') | map(attribute='text') | list -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if pictures -%}{{ '<img>' + '<imgpad>' * (pictures | length) + '</img>\\n' }}{%- endif -%}"
    "{{ (texts | join('\\n') if texts else ' OCR: ') + '<|im_end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""The processor's own words. A message's pictures come first, as pages of one document; without text it is ` OCR: `."""
