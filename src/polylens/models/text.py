"""Run transformers' own text model on a ragged batch of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

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


class TextRunner:
    """The text model of a loaded VLM, called on flattened rows (mechanism 7)."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._text = loaded.text_model
        self._head = loaded.head
        self._embed = loaded.model.get_input_embeddings()
        self.device = loaded.device

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
        self, x_td: torch.Tensor, positions: torch.Tensor, batch: RaggedBatch, media: MediaRows | None
    ) -> torch.Tensor:
        """(t, d) embeddings -> (t, d) hidden states. positions: (3, t) or (1, t)."""
        position_ids = positions[:, None] if positions.shape[0] > 1 else positions
        output = self._text(
            inputs_embeds=x_td[None],
            position_ids=position_ids,
            use_cache=False,
            polylens_batch=batch,
            **self._deepstack_arguments(x_td.shape[0], media),
        )
        return output.last_hidden_state[0]

    def logits(self, hidden_sd: torch.Tensor) -> torch.Tensor:
        """(s, d) hidden states of the rows to sample from -> (s, vocab) float32 logits."""
        return self._head(hidden_sd).float()

    def _deepstack_arguments(self, num_rows: int, media: MediaRows | None) -> dict[str, Any]:
        if media is None or not media.deepstack:
            return {}
        mask_1t = torch.zeros(1, num_rows, dtype=torch.bool, device=self.device)
        mask_1t[0, media.rows_t] = True
        return {"visual_pos_masks": mask_1t, "deepstack_visual_embeds": list(media.deepstack)}
