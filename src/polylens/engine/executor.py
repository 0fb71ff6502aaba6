"""What the engine asks of the model, and what the scheduler must keep to for it.

Two kinds answer. `PagedExecutor` runs many requests in one batch with the engine's own KV pages. `HostExecutor` lets
transformers' own generation compute one request at a time, for models whose text model the ragged batch does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from polylens.engine import sequence
    from polylens.engine.step_plan import StepEntry
    from polylens.errors import PolylensError
    from polylens.models.prepared import PreparedPrompt


@dataclass(frozen=True)
class Limits:
    """The steps an executor can compute.

    num_pages: pages of `page_tokens` tokens there are. shares_pages: whether what one sequence stored in its pages
    serves another one. state_bytes: what a sequence keeps beside its pages, of whatever length it is.
    """

    num_pages: int
    page_tokens: int
    max_step_tokens: int
    max_running: int
    shares_pages: bool
    state_bytes: int = 0


class Executor(Protocol):
    """Computes the entries of a step. Every sequence is started before its first step and ended after its last."""

    limits: Limits

    def rehearse(self, num_tokens: int) -> None:
        """Run a text step without effect, for wrapped layers that learn from a call which of its rows are tokens."""

    def start(self, seq: sequence.Sequence, prompt: PreparedPrompt) -> None:
        """Take in a new sequence with what of its prompt is not tokens."""

    def prepare(self, entries: Sequence[StepEntry]) -> Mapping[str, PolylensError]:
        """Compute what can fail for one sequence alone; returns the errors by request id. The others go on."""

    def run(self, entries: Sequence[StepEntry]) -> torch.Tensor:
        """Compute prepared entries; returns (s, vocab) float32 logits of those that reach their sequence's end."""

    def end(self, seq: sequence.Sequence) -> None:
        """Forget a sequence; one that was never started is left alone."""
