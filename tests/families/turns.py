"""Chat templates of the common form: turns that name their role, media where they stand in the message."""

from __future__ import annotations


def written(**media: str) -> str:
    """A macro `written(content)`: the text of a message, and in the place of its media ("image", "video", "audio")
    the tokens given for them."""
    shown = {**{kind: f"'{tokens}'" for kind, tokens in media.items()}, "text": "part['text']"}
    branches = [f"{{%- elif part['type'] == '{kind}' -%}}{{{{ {what} }}}}" for kind, what in shown.items()]
    return (
        "{%- macro written(content) -%}"
        "{%- if content is string -%}{{ content }}"
        "{%- else -%}{%- for part in content -%}"
        + "".join(branches).replace("elif", "if", 1)
        + "{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    )


def turns(start: str, after_role: str, end: str, *, answer: str | None = None, **media: str) -> str:
    """Each turn: start, role, after_role, content, end. answer: what opens the answer, if not `start` and so on."""
    answer = f"{start}assistant{after_role}" if answer is None else answer
    return (
        written(**media)
        + "{%- for message in messages -%}"
        + f"{{{{- '{start}' + message['role'] + '{after_role}' + written(message['content']) + '{end}' -}}}}"
        + "{%- endfor -%}"
        + f"{{%- if add_generation_prompt -%}}{{{{ '{answer}' }}}}{{%- endif -%}}"
    )


def chatml(*, answer: str = "<|im_start|>assistant\\n", **media: str) -> str:
    return turns("<|im_start|>", "\\n", "<|im_end|>\\n", answer=answer, **media)
