"""What is done with a request before it joins the engine: rendering, tokenising, decoding and processing media.

It touches nothing of the engine's state, so a server does it in worker threads while steps run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polylens.core import TextRequest
from polylens.engine.logit_rules import check_logit_bias
from polylens.errors import PromptTooLongError, RequestError
from polylens.models.positions import prompt_positions

if TYPE_CHECKING:
    import torch

    from polylens.core import Request, SamplingParams
    from polylens.engine.constraints import Constraints, ConstraintState
    from polylens.models.loading import LoadedModel
    from polylens.models.processing import PreparedPrompt


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A request ready to be queued; it depends on no adapter.

    sampling: the request's own, `max_tokens` cut to what the context leaves. positions, position_delta: as
    `prompt_positions` makes them; none where transformers generates, which makes its own.
    """

    request: Request
    prompt: PreparedPrompt
    sampling: SamplingParams
    positions: torch.Tensor | None = None
    position_delta: int = 0
    constraint: ConstraintState | None = None
    """The start of the answer's form; each sequence takes a copy."""

    def copy(self, request: Request) -> PreparedRequest:
        """This, for a request that differs from this one's in its id or seed only."""
        sampling = dataclasses.replace(request.sampling, max_tokens=self.sampling.max_tokens)
        return dataclasses.replace(self, request=request, sampling=sampling)


def prepare_request(
    loaded: LoadedModel,
    constraints: Constraints,
    request: Request,
    *,
    max_model_len: int,
    allow_paths: bool = True,
) -> PreparedRequest:
    """Prepare `request` for the model. Raises RequestError (MediaError, PromptTooLongError). Thread-safe.

    max_model_len: most tokens of prompt plus answer.
    """
    sampling = request.sampling
    check_logit_bias(sampling, loaded.vocab_size)
    constraint = constraints.start(sampling.constraint) if sampling.constraint is not None else None
    prompt = _prompt(loaded, request, allow_paths)
    sampling = _within_context(request, len(prompt.token_ids), max_model_len)
    if loaded.is_hosted:
        return PreparedRequest(request, prompt, sampling, constraint=constraint)
    positions, delta = prompt_positions(loaded.inner, prompt, loaded.notes.first_position)
    return PreparedRequest(request, prompt, sampling, positions, delta, constraint)


def _prompt(loaded: LoadedModel, request: Request, allow_paths: bool) -> PreparedPrompt:
    if isinstance(request, TextRequest):
        prompt = loaded.processing.prepare_text(request.prompt)
        if not prompt.token_ids:
            raise RequestError("the prompt is empty: there is nothing to go on from", param="prompt")
        return prompt
    return loaded.processing.prepare(
        request.messages,
        chat_template_kwargs=request.chat_template_kwargs,
        mm_processor_kwargs=request.mm_processor_kwargs,
        allow_paths=allow_paths,
    )


def _within_context(request: Request, num_prompt: int, limit: int) -> SamplingParams:
    """An answer ends, at the latest, where the context does."""
    if num_prompt >= limit:
        raise PromptTooLongError(
            f"the prompt has {num_prompt} tokens; the context of {limit} (the model's, or max_model_len, or what "
            "kv_bytes holds) leaves no room for an answer",
            param="prompt" if isinstance(request, TextRequest) else "messages",
        )
    return dataclasses.replace(request.sampling, max_tokens=min(request.sampling.max_tokens, limit - num_prompt))
