"""The executor for models that the ragged batch does not fit: transformers generates, one request at a time.

Requests are answered in turn, so there is one cache at a time, and an answer takes no longer than it must. What is the
engine's stays the engine's: who comes next, adapters, sampling, constraints, stopping, streams and aborts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polylens.engine.executor import Limits
from polylens.engine.pages import pages_for
from polylens.errors import InternalError, PolylensError, RequestError, first_line
from polylens.models.generation import generation_steps

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from polylens.config import EngineConfig
    from polylens.engine import sequence
    from polylens.engine.step_plan import StepEntry
    from polylens.lora.context import RoutingContext
    from polylens.models.loading import LoadedModel
    from polylens.models.prepared import PreparedPrompt


class HostExecutor:
    """Runs the whole model for one sequence, all rows of all its layers with that sequence's adapter."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, context: RoutingContext) -> None:
        self._model = loaded.model
        self._context = context
        pages = pages_for(loaded.max_model_len, config.page_tokens)
        # transformers keeps keys and values; the pages only count the tokens of the context.
        self.limits = Limits(
            pages, config.page_tokens, max_step_tokens=loaded.max_model_len, max_running=1, shares_pages=False
        )
        self._inputs: dict[str, Mapping[str, torch.Tensor]] = {}
        self._steps: dict[str, Generator[torch.Tensor, int, None]] = {}
        self._logits: dict[str, torch.Tensor] = {}

    def rehearse(self, num_tokens: int) -> None:
        """Nothing: all rows of all layers are one adapter's."""

    def start(self, seq: sequence.Sequence, prompt: PreparedPrompt) -> None:
        self._inputs[seq.request_id] = prompt.inputs

    def prepare(self, entries: Sequence[StepEntry]) -> dict[str, PolylensError]:
        failed: dict[str, PolylensError] = {}
        for entry in entries:
            try:
                self._logits[entry.seq.request_id] = self._advance(entry)
            except PolylensError as error:
                failed[entry.seq.request_id] = error
        return failed

    def run(self, entries: Sequence[StepEntry]) -> torch.Tensor:
        return torch.stack([self._logits.pop(entry.seq.request_id) for entry in entries])

    def end(self, seq: sequence.Sequence) -> None:
        for kept in (self._inputs, self._steps, self._logits):
            kept.pop(seq.request_id, None)

    def _advance(self, entry: StepEntry) -> torch.Tensor:
        """(vocab,) logits after the entry's tokens: the whole prompt at first, then one token after the other."""
        seq = entry.seq
        if not entry.samples or entry.start not in (0, seq.num_tokens - 1):
            raise InternalError(f"{seq.request_id}: tokens {entry.start} to {entry.stop} are no step of a generation")
        with self._context.whole(seq.adapter):
            try:
                return self._next_logits(entry)
            except PolylensError:
                raise
            except Exception as error:  # the border to any architecture's code, run on what a request brought
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise RequestError(f"the model cannot compute this request ({reason})") from error

    def _next_logits(self, entry: StepEntry) -> torch.Tensor:
        seq = entry.seq
        if seq.request_id in self._steps:
            return self._steps[seq.request_id].send(seq.token_ids[-1])
        inputs = self._inputs.pop(seq.request_id)
        steps = generation_steps(self._model, seq.prompt_ids, inputs, seq.sampling.max_tokens)
        self._steps[seq.request_id] = steps
        return next(steps)
