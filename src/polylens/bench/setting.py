"""What a run of the benchmarks shares: model, adapters, requests, sizes, number of rounds."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from polylens.bench.recipe import TINY, Recipe, Targets, adapter_folder, model_folder
from polylens.bench.result import Result, hardware, two_sided
from polylens.config import MIB, EngineConfig
from polylens.core import ChatRequest, SamplingParams
from polylens.engine.llm import LLM
from polylens.engine.merged import merged_llm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from polylens.config import DTypeName


KV_BYTES = 512 * MIB
"""Twice what 16 sequences of the long decode question take."""


@dataclass(frozen=True)
class Sizes:
    """How large the requests are. The defaults are the published ones; `QUICK` only checks that everything runs."""

    rank: int = 32
    picture_side: int = 896
    text_tokens: int = 2048
    sweep_texts: tuple[int, ...] = (16, 64, 256, 1024)
    sweep_ranks: tuple[int, ...] = (8, 32, 128)
    num_frames: int = 8
    frame_side: int = 448
    decode_sequences: int = 8
    decode_texts: tuple[int, ...] = (64, 2048)
    decode_steps: int = 12
    throughput_requests: int = 16
    throughput_side: int = 448
    throughput_text: int = 64
    throughput_tokens: int = 64
    num_registered: int = 1000


QUICK = Sizes(
    rank=4,
    picture_side=56,
    text_tokens=40,
    sweep_texts=(8, 16),
    sweep_ranks=(2, 4),
    num_frames=4,
    frame_side=56,
    decode_sequences=3,
    decode_texts=(8, 16),
    decode_steps=2,
    throughput_requests=4,
    throughput_side=56,
    throughput_text=8,
    throughput_tokens=3,
    num_registered=20,
)


class Setting:
    """Builds what the questions need, on first use. quick: a tiny model and tiny requests, to try the form."""

    def __init__(
        self,
        *,
        quick: bool = False,
        rounds: int = 5,
        device: str = "cpu",
        dtype: DTypeName = "float32",
        cache: Path | None = None,
    ) -> None:
        self.recipe = TINY if quick else Recipe()
        self.sizes = QUICK if quick else Sizes()
        self.rounds = rounds
        self.device = device
        self.dtype: DTypeName = dtype
        self._cache = cache

    # ---- models

    @cached_property
    def model(self) -> Path:
        return model_folder(self.recipe, self._cache)

    def adapter(self, seed: int, rank: int | None = None, targets: Targets = "all") -> Path:
        rank = rank or self.sizes.rank
        return adapter_folder(self.recipe, rank=rank, seed=seed, targets=targets, cache=self._cache)

    def adapters(self, count: int, targets: Targets = "all") -> dict[str, Path]:
        return {f"adapter-{seed}": self.adapter(seed, targets=targets) for seed in range(1, count + 1)}

    def config(self, **changes: Any) -> EngineConfig:
        """Caches off, so that every round computes everything; pages for the largest question, not for all memory."""
        off: dict[str, Any] = {"prefix_cache": False, "vision_cache_bytes": 0, "kv_bytes": KV_BYTES}
        return EngineConfig(dtype=self.dtype, device=self.device, **(off | changes))

    @contextlib.contextmanager
    def dynamic(self, adapters: Mapping[str, Path], **config: Any) -> Iterator[LLM]:
        with LLM(self.model, adapters, config=self.config(**config)) as llm:
            yield llm

    @contextlib.contextmanager
    def merged(self, **config: Any) -> Iterator[LLM]:
        """Adapter 1 merged into the weights: a model of its own, without adapters."""
        with merged_llm(self.model, self.adapter(1), reference="own", config=self.config(**config)) as llm:
            yield llm

    # ---- requests

    def text(self, num_tokens: int, seed: int = 0) -> str:
        """As many tokens as asked for: the model's tokens are bytes."""
        letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, num_tokens)
        return bytes(letters.tolist()).decode()

    def picture(self, side: int, seed: int = 0) -> Image.Image:
        return Image.fromarray(_noise((side, side, 3), seed))

    def request(
        self, text_tokens: int, adapter: str | None, *, media: Sequence[dict[str, Any]] = (), max_tokens: int = 1
    ) -> ChatRequest:
        content = [*media, {"type": "text", "text": self.text(text_tokens)}]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return ChatRequest([{"role": "user", "content": content}], adapter, sampling)

    def picture_request(self, adapter: str | None, seed: int = 0) -> ChatRequest:
        """The prompt of the published figures: one picture of 1024 visual tokens, 2048 text tokens."""
        media = [{"type": "image", "image": self.picture(self.sizes.picture_side, seed)}]
        return self.request(self.sizes.text_tokens, adapter, media=media)

    def video_request(self, adapter: str | None, seed: int = 0) -> ChatRequest:
        side = self.sizes.frame_side
        media = [{"type": "video", "video": _noise((self.sizes.num_frames, side, side, 3), seed)}]
        return self.request(self.sizes.throughput_text, adapter, media=media)

    # ---- answers

    @cached_property
    def hardware(self) -> str:
        return hardware(self.device, self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    def compare(
        self, question: str, a: float, b: float, goal: float | None, unit: str = "s", *, smallest: bool = False
    ) -> Result:
        return two_sided(question, a, b, unit, self.hardware, goal, smallest=smallest)

    def single(self, question: str, value: float, unit: str, goal: float | None) -> Result:
        return Result(question, value, unit, self.hardware, goal=goal)


def _noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
