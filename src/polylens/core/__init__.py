"""The shared nouns. Imports nothing of the project at run time but the error tree.

Shape legend used in names and comments across the project:
t tokens (or rows), d a layer's width, i a layer's input width, o its output width, r rank, h heads.
"""

from __future__ import annotations

from polylens.core.adapter import (
    BASE_NAME,
    Adapter,
    Change,
    Delta,
    Digests,
    ProcessingFiles,
    Replacement,
    ScaledDelta,
    TokenRows,
    with_tensors,
)
from polylens.core.answers import Completion, CompletionDelta, FinishReason, TokenLogprob, Usage
from polylens.core.checks import is_finite
from polylens.core.layers import BARE_KINDS, EXPERT_KINDS, FACTOR_KINDS, Component, LayerKind, LayerSpec, ModelLayers
from polylens.core.requests import ChatRequest, MediaItem, MediaKind, Request, TextRequest
from polylens.core.sampling import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, Constraint, SamplingParams
