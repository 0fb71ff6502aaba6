"""Run transformers' own text model on a ragged batch of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polylens.models.recurrent import CarriedState

if TYPE_CHECKING:
    from polylens.models.attention import RaggedBatch
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
    x_td: (t, d) embeddings with features in place.
    """

    text: Any
    config: Any
    token_ids_t: torch.Tensor
    x_td: torch.Tensor
    media: MediaRows | None

    @property
    def is_media_t(self) -> torch.Tensor:
        """(t,) bool: which rows hold features."""
        mask_t = torch.zeros(self.x_td.shape[0], dtype=torch.bool, device=self.x_td.device)
        if self.media is not None:
            mask_t[self.media.rows_t] = True
        return mask_t


class TextRunner:
    """The text model of a loaded VLM, called on flattened rows (mechanism 7)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._text = loaded.text_model
        self._config = loaded.config
        self._head = loaded.head
        self._embed = loaded.model.get_input_embeddings()
        self._arguments = loaded.notes.text_arguments or deepstack_arguments
        self.device = loaded.device
        self.two_way_in_windows_only = loaded.notes.two_way_in_windows_only
        self.carries_state = loaded.num_mixers > 0

    def new_state(self) -> CarriedState:
        """The state of a sequence of which nothing is computed (only for models that carry one)."""
        return CarriedState(self._text.config)

    def embed(self, token_ids_t: torch.Tensor, media: MediaRows | None) -> torch.Tensor:
        """(t,) ids -> (t, d) embeddings, with the media rows replaced by their features.

        A media token's own id may lie outside the vocabulary (Gemma 3), so it is embedded as id 0 first.
        """
        if media is None:
            return self._embed(token_ids_t)
        ids_t = token_ids_t.clone()
        ids_t[media.rows_t] = 0
        x_td = self._embed(ids_t).clone()
        x_td[media.rows_t] = media.features_td.to(x_td.dtype)
        return x_td

    def forward(
        self, token_ids_t: torch.Tensor, positions: torch.Tensor, batch: RaggedBatch, media: MediaRows | None
    ) -> torch.Tensor:
        """(t,) ids -> (t, d) hidden states. positions: (3, t) or (1, t)."""
        x_td = self.embed(token_ids_t, media)
        output = self._text(
            inputs_embeds=x_td[None],
            position_ids=positions[:, None] if positions.shape[0] > 1 else positions,
            use_cache=False,
            polylens_batch=batch,
            **self._arguments(TextStep(self._text, self._config, token_ids_t, x_td, media)),
        )
        return output.last_hidden_state[0]

    def logits(self, hidden_sd: torch.Tensor) -> torch.Tensor:
        """(s, d) hidden states of the rows to sample from -> (s, vocab) float32 logits."""
        return self._head(hidden_sd).float()


def deepstack_arguments(step: TextStep) -> dict[str, Any]:
    """Qwen3-VL and its kin: features that the first layers add at the media rows."""
    if step.media is None or not step.media.deepstack:
        return {}
    return {"visual_pos_masks": step.is_media_t[None], "deepstack_visual_embeds": list(step.media.deepstack)}
