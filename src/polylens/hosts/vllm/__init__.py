"""Adapters over every part of a vision-language model, inside vLLM.

`vllm serve MODEL --worker-cls polylens.hosts.vllm.Worker --enable-lora --max-loras N --lora-modules a=PATH …`, or
`LLM(MODEL, worker_cls="polylens.hosts.vllm.Worker", enable_lora=True, …)`. See docs/vllm.md.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Worker"]


def __getattr__(name: str) -> Any:
    # vLLM reads this name as a string and only in its workers; the front process must not import a worker.
    if name == "Worker":
        from polylens.hosts.vllm.worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
