"""Run transformers' own text model on a ragged batch of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polylens.errors import InternalError
from polylens.models.after_head import after_head
from polylens.models.attention import ATTENTION_NAME, PROMPT_KEPT, register_attention
from polylens.models.last_layer import LastLayer
from polylens.models.recurrent import CarriedState, wrap_mixers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.models.attention import RaggedBatch, SequenceRows
    from polylens.models.loading import LoadedModel


@dataclass(frozen=True, eq=False)
class MediaRows:
    """Encoder features placed in a step: `rows_t` (indices into the step's rows) receive `features_td`.

    deepstack: per level (len(rows_t), d), added by the first text layers at the same rows.
    """

    rows_t: torch.Tensor
    features_td: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class TextStep:
    """One step's input to the text model, for a family's `text_arguments`.

    text: the text model. config: the whole model's. token_ids_t: (t,), media tokens as they are in the prompt.
    embedded_ids_t: (t,), without those that features replace. x_td: (t, d) embeddings with features in place.
    sequences: whose rows they are.
    """

    text: Any
    config: Any
    token_ids_t: torch.Tensor
    embedded_ids_t: torch.Tensor
    x_td: torch.Tensor
    media: MediaRows | None
    sequences: Sequence[SequenceRows] = ()

    @property
    def is_media_t(self) -> torch.Tensor:
        """(t,) bool: which rows hold features."""
        mask_t = torch.zeros(self.x_td.shape[0], dtype=torch.bool, device=self.x_td.device)
        if self.media is not None:
            mask_t[self.media.rows_t] = True
        return mask_t


def make_ragged(loaded: LoadedModel) -> int:
    """Let the text model, and nothing else of the model, work on ragged batches; returns how many of its layers carry
    a state (see `recurrent`). It runs only with a batch from then on."""
    register_attention()
    model, prepare = loaded.model, loaded.notes.prepare_text
    if prepare is not None:
        prepare(loaded.text_model)
    is_text_only = model.config.get_text_config() is model.config
    LastLayer.put_into(loaded.text_model)
    model.set_attn_implementation(ATTENTION_NAME if is_text_only else {"text_config": ATTENTION_NAME})
    return wrap_mixers(loaded.text_model)


class TextRunner:
    """The text model of a loaded VLM, called on flattened rows (mechanism 7)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._text = loaded.text_model
        self._config = loaded.config
        self._head = loaded.head
        self._after_head = after_head(loaded.model)
        self._vocab_size = loaded.vocab_size
        self._embed = loaded.model.get_input_embeddings()
        self._padding_id, self._placeholders_p = 0, None
        if loaded.notes.media_embed_as_padding or loaded.notes.media_embed_as_first:
            text_config = loaded.config.get_text_config()
            self._padding_id = 0 if loaded.notes.media_embed_as_first else text_config.pad_token_id
            self._placeholders_p = _placeholders(loaded.config).to(loaded.device)
        self._features_are_added = loaded.notes.features_are_added
        self._inner, self._further = loaded.inner, loaded.notes.embed
        self._arguments = loaded.notes.text_arguments or deepstack_arguments
        never = loaded.notes.never_answered
        self._never_answered = None if never is None else torch.tensor(never(loaded.config), device=loaded.device)
        self.device = loaded.device
        self.two_way_in_windows_only = loaded.notes.two_way_in_windows_only
        self.two_way_beyond_windows = loaded.notes.two_way_beyond_windows
        self.carries_state = make_ragged(loaded) > 0
        self.keeps_prompt = PROMPT_KEPT in (getattr(loaded.config.get_text_config(), "layer_types", None) or ())

    def new_state(self) -> CarriedState:
        """The state of a sequence of which nothing is computed (only for models that carry one)."""
        return CarriedState(self._text.config)

    def _ids_to_embed(self, token_ids_t: torch.Tensor, media: MediaRows | None) -> torch.Tensor:
        """Without those that features replace: a media token's own id may lie outside the vocabulary (Gemma 3)."""
        ids_t = token_ids_t
        if media is not None and not self._features_are_added:
            ids_t = ids_t.index_fill(0, media.rows_t.to(ids_t.device), self._padding_id)
        if self._placeholders_p is not None:
            ids_t = torch.where(torch.isin(ids_t, self._placeholders_p), self._padding_id, ids_t)
        return ids_t

    def _with_features(self, x_td: torch.Tensor, media: MediaRows | None) -> torch.Tensor:
        """(t, d) embeddings with the media rows replaced by their features, or these added."""
        if media is None:
            return x_td
        x_td, features = x_td.clone(), media.features_td.to(x_td.dtype)
        x_td[media.rows_t] = x_td[media.rows_t] + features if self._features_are_added else features
        return x_td

    def forward(
        self, token_ids_t: torch.Tensor, positions: torch.Tensor, batch: RaggedBatch, media: MediaRows | None
    ) -> torch.Tensor:
        """(t,) ids -> (s, d) hidden states of the rows that the batch wants. positions: (rows, t)."""
        ids_t = self._ids_to_embed(token_ids_t, media)
        x_td = self._embed(ids_t)
        if self._further is not None:
            x_td = self._further(self._inner, ids_t, x_td)
        x_td = self._with_features(x_td, media)
        step = TextStep(self._text, self._config, token_ids_t, ids_t, x_td, media, batch.sequences)
        with batch.until_end:
            output = self._text(
                inputs_embeds=x_td[None],
                position_ids=positions[:, None] if positions.shape[0] > 1 else positions,
                use_cache=False,
                polylens_batch=batch,
                **self._arguments(step),
            )
        return _wanted(output.last_hidden_state[0], batch)

    def logits(self, hidden_sd: torch.Tensor) -> torch.Tensor:
        """(s, d) hidden states of the rows to sample from -> (s, vocab) float32 logits.

        With adapters that bring tokens, more columns: -inf in the rows of the others.
        """
        raw_sv = self._head(hidden_sd)
        logits_sv = self._after_head(raw_sv)
        if self._never_answered is not None:  # Chameleon, by this value
            logits_sv[:, self._never_answered] = torch.finfo(logits_sv.dtype).min
        if raw_sv.shape[-1] > self._vocab_size:  # a cap makes numbers of the -inf
            logits_sv = logits_sv.masked_fill(raw_sv == -torch.inf, -torch.inf)
        return logits_sv.float()


def _wanted(hidden: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
    """Of the hidden states that a text model gave, those that the batch wants."""
    if batch.only_wanted:
        if batch.wanted is None or hidden.shape[0] != len(batch.wanted):
            raise InternalError(f"the text model made {hidden.shape[0]} rows of the wanted ones")
        return hidden
    return hidden if batch.wanted is None else hidden[list(batch.wanted)]


def _placeholders(config: Any) -> torch.Tensor:
    """(p,) ids of all media tokens of a model's config, of kinds that are not served as well."""
    ids = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
    return torch.tensor([token_id for token_id in ids if token_id is not None])


def deepstack_arguments(step: TextStep) -> dict[str, Any]:
    """Qwen3-VL and its kin: features that the first layers add at the media rows."""
    if step.media is None or not step.media.deepstack:
        return {}
    return {"visual_pos_masks": step.is_media_t[None], "deepstack_visual_embeds": list(step.media.deepstack)}
