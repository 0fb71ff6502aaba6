"""What is done with a request before it joins the engine: rendering, tokenising, decoding and processing media.

It touches nothing of the engine's state, so a server does it in worker threads while steps run.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from polylens.core import TextRequest
from polylens.engine.constraints import Constraints
from polylens.engine.logit_rules import check_logit_bias
from polylens.engine.stopping import OutputRules
from polylens.errors import PromptTooLongError, RequestError
from polylens.models.positions import prompt_positions

if TYPE_CHECKING:
    import torch

    from polylens.core import Adapter, Request, SamplingParams
    from polylens.engine.constraints import ConstraintState
    from polylens.models.loading import LoadedModel
    from polylens.models.prepared import PreparedPrompt
    from polylens.models.processing import Processing


@dataclass(frozen=True, eq=False)
class RequestTools:
    """What all requests with one tokenizer share."""

    constraints: Constraints
    rules: OutputRules


class RequestToolbox:
    """The tools of a model's own tokenizer, and of those that adapters bring while they are there. Thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._vocab_size = loaded.vocab_size
        self._base = loaded.processing
        self._base_tools = self._make(loaded.processing)
        self._lock = threading.Lock()
        self._others: WeakKeyDictionary[Processing, RequestTools] = WeakKeyDictionary()

    def of(self, processing: Processing) -> RequestTools:
        if processing.tokenizer is self._base.tokenizer:
            return self._base_tools
        with self._lock:
            tools = self._others.get(processing)
            if tools is None:
                tools = self._others[processing] = self._make(processing)
            return tools

    def _make(self, processing: Processing) -> RequestTools:
        tokenizer, stop_ids = processing.tokenizer, processing.stop_token_ids
        return RequestTools(Constraints(tokenizer, self._vocab_size, stop_ids), OutputRules(tokenizer, stop_ids))


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A request ready to be queued. Of its adapter it depends on the processing only.

    processing, rules: how its tokens were made and how its answer's are read. sampling: the request's own,
    `max_tokens` cut to what the context leaves. positions, position_delta: as `prompt_positions` makes them; none
    where transformers generates, which makes its own.
    """

    request: Request
    processing: Processing
    rules: OutputRules
    prompt: PreparedPrompt
    sampling: SamplingParams
    positions: torch.Tensor | None = None
    position_delta: float = 0
    constraint: ConstraintState | None = None
    """The start of the answer's form; each sequence takes a copy."""

    def copy(self, request: Request) -> PreparedRequest:
        """This, for a request that differs from this one's in its id or seed only."""
        sampling = dataclasses.replace(request.sampling, max_tokens=self.sampling.max_tokens)
        return dataclasses.replace(self, request=request, sampling=sampling)


def prepare_request(
    loaded: LoadedModel,
    toolbox: RequestToolbox,
    request: Request,
    adapter: Adapter | None,
    *,
    max_model_len: int,
    allow_paths: bool = True,
) -> PreparedRequest:
    """Prepare `request`, to be answered with `adapter` (None: the base model), for the model. Thread-safe.

    max_model_len: most tokens of prompt plus answer. Raises RequestError (MediaError, PromptTooLongError).
    """
    processing = processing_of(loaded, adapter)
    tools = toolbox.of(processing)
    sampling = request.sampling
    check_logit_bias(sampling, loaded.vocab_size + (0 if adapter is None else adapter.num_more_tokens))
    constraint = tools.constraints.start(sampling.constraint) if sampling.constraint is not None else None
    prompt = _prompt(processing, request, allow_paths)
    sampling = _within_context(request, len(prompt.token_ids), max_model_len)
    if loaded.is_hosted:
        return PreparedRequest(request, processing, tools.rules, prompt, sampling, constraint=constraint)
    positions, delta = prompt_positions(loaded.inner, prompt, loaded.notes.first_position)
    return PreparedRequest(request, processing, tools.rules, prompt, sampling, positions, delta, constraint)


def processing_of(loaded: LoadedModel, adapter: Adapter | None) -> Processing:
    """How requests of `adapter` become tokens and pixels: as its folder says, or as the model's own files do."""
    own: Processing | None = None if adapter is None else adapter.processing
    return loaded.processing if own is None else own


def _prompt(processing: Processing, request: Request, allow_paths: bool) -> PreparedPrompt:
    if isinstance(request, TextRequest):
        prompt = processing.prepare_text(request.prompt)
        if not prompt.token_ids:
            raise RequestError("the prompt is empty: there is nothing to go on from", param="prompt")
        return prompt
    return processing.prepare(
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
