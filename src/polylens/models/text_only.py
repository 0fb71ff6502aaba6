"""A language model's tokenizer in the form of a multimodal processor without media."""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin


class TextOnlyProcessor(ProcessorMixin):
    """What `Processing` takes for a checkpoint that has a tokenizer and nothing else."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
