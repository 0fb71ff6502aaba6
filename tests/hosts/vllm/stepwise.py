"""Requests of the reference answers in vLLM's engine, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput

    from tests.hosts.vllm.inside import Inside

Key = tuple[str, str, int]
"""Adapter or "base", kind of prompt, index."""

SAMPLING = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)


class Requests:
    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        self.engine = inside.llm.llm_engine
        self._keys: dict[str, Key] = {}
        self.running: dict[Key, str] = {}
        self.done: dict[Key, CompletionOutput] = {}

    def add(self, key: Key, lora: LoRARequest | None = None) -> None:
        name, kind, index = key
        external = f"{name}-{kind}-{index}-{len(self._keys)}"
        self._keys[external] = key
        self.running[key] = self.engine.add_request(
            external,
            self._inside.request(kind, index),
            SAMPLING,
            lora_request=lora or self._inside.adapter(name),
            tokenization_kwargs=self._inside.tokenizing,
        )

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.done[self._keys[output.request_id]] = output.outputs[0]

    def finish(self) -> None:
        """Run to the end: every request that was not aborted has its adapter's answer."""
        while self.engine.has_unfinished_requests():
            self.step()
        for key, output in self.done.items():
            self._inside.compare(key, output)


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` replaced by what `make` makes of it."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
