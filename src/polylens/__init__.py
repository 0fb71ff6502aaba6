"""polylens: one vision-language model in memory, many LoRA adapters over it, mixed in one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polylens.core import ChatRequest, Completion, CompletionDelta, Constraint, SamplingParams, TextRequest
from polylens.errors import PolylensError

if TYPE_CHECKING:
    from polylens.engine.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "ChatRequest",
    "Completion",
    "CompletionDelta",
    "Constraint",
    "PolylensError",
    "SamplingParams",
    "TextRequest",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # LLM pulls in torch and transformers: imported when first used, so that `polylens --help` is quick.
    if name == "LLM":
        from polylens.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'polylens' has no attribute {name!r}")
