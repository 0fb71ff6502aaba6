"""Media items as vLLM's encoder is given them, and synthetic ones for the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalBatchedField
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from polylens.models.features import ItemFeatures
from polylens.models.prepared import PIXEL_PREFIX, pixel_tensors
from polylens.models.row_rules import ItemSize

if TYPE_CHECKING:
    from vllm.config import ModelConfig

MODALITIES = ("image", "video")
"""What the probe has synthetic items of; items of others are encoded one adapter at a time."""

_NUM_ITEMS = 3
_SIDES = (16, 32, 64, 128, 256, 512)
"""Shorter sides (pixels) to try, smallest first."""
_SHAPES = ((1, 1), (1, 2), (3, 1))
_FRAMES = (2, 4, 2)


@dataclass(frozen=True, eq=False)
class EncoderItem:
    """One item of an encoder call. data: vLLM's `MultiModalKwargsItem`. num_tokens: rows the text model gets of it."""

    modality: str
    data: Any
    num_tokens: int

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """As `ItemSize.of` reads them; of a batched field vLLM has taken the first dimension off."""
        return dict(_tensors(self.data))

    @property
    def has_pixels(self) -> bool:
        """Whether there is anything to encode: a client may send features instead."""
        return bool(pixel_tensors(self.tensors))


def _tensors(data: Any) -> Iterator[tuple[str, torch.Tensor]]:
    names = [name for name in data if name.startswith(PIXEL_PREFIX)]
    for name, element in data.items():
        if isinstance(element.data, torch.Tensor):
            batched = isinstance(element.field, MultiModalBatchedField)
            tensor = element.data[None] if batched else element.data
            # Families call a video's pixels, or pictures' flattened tiles, otherwise; the prefix is what is read.
            is_pixels = not names and "pixel" in name and "mask" not in name
            yield (f"{PIXEL_PREFIX}.{name}" if is_pixels else name), tensor


def encode(model: Any, items: Sequence[EncoderItem], device: torch.device) -> list[ItemFeatures]:
    """Run vLLM's own encoder call on items of one modality."""
    features: list[torch.Tensor] = []
    pairs = [(item.modality, item.data) for item in items]
    for _, _, batch in group_and_batch_mm_kwargs(pairs, device=device):
        features.extend(by_item(model.embed_multimodal(**batch)))
    return [ItemFeatures(rows) for rows in features]


def by_item(features: Iterable[torch.Tensor] | None) -> list[torch.Tensor]:
    """What an encoder call gave, as one (rows, d) an item. LLaVA-OneVision of vLLM 0.32 gives (1, rows, d) for videos
    of unequal lengths, on which vLLM ends its engine."""
    return [item[0] if item.dim() == 3 and len(item) == 1 else item for item in (() if features is None else features)]


def create_processor(model_config: ModelConfig) -> Any:
    """vLLM's own processor of a model's media."""
    return MULTIMODAL_REGISTRY.create_processor(model_config)


def modalities_of(processor: Any) -> tuple[str, ...]:
    """Those of MODALITIES that it takes."""
    allowed = processor.info.allowed_mm_limits
    return tuple(modality for modality in MODALITIES if allowed.get(modality, 0))


def synthetic_batches(processor: Any) -> dict[str, list[EncoderItem]]:
    """One batch of noise items of unequal sizes, where the processor makes them so, for each of MODALITIES it takes."""
    makers = {"image": _picture, "video": _video}
    return {
        modality: _smallest_unequal(partial(_items, processor, modality, makers[modality]))
        for modality in modalities_of(processor)
    }


def are_equal_in_size(items: Sequence[EncoderItem]) -> bool:
    """Whether items of any size have the same number of rows: a processor that makes one tile of every picture."""
    return len({ItemSize.of(item) for item in items}) == 1


def _smallest_unequal(make: Callable[[int], list[EncoderItem]]) -> list[EncoderItem]:
    first = make(_SIDES[0])
    batches = (first, *map(make, _SIDES[1:]))
    return next((batch for batch in batches if len({ItemSize.of(item) for item in batch}) == len(batch)), first)


def _items(processor: Any, modality: str, make: Callable[[int, int], Any], side: int) -> list[EncoderItem]:
    return [_item(processor, modality, make(side, index)) for index in range(_NUM_ITEMS)]


def _item(processor: Any, modality: str, content: Any) -> EncoderItem:
    data = processor.info.parse_mm_data({modality: [content]}, validate=False)
    made = processor(processor.dummy_inputs.get_dummy_text({modality: 1}), data)
    place = made["mm_placeholders"][modality][0]
    return EncoderItem(modality, made["mm_kwargs"][modality][0], place.get_num_embeds())


def _picture(side: int, index: int) -> Image.Image:
    height, width = (side * times for times in _SHAPES[index])
    return Image.fromarray(np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _video(side: int, index: int) -> tuple[Any, dict[str, Any]]:
    height, width = (side * times for times in _SHAPES[index])
    num = _FRAMES[index]
    frames = np.random.default_rng(index).integers(0, 256, (num, height, width, 3), dtype=np.uint8)
    described = {
        "fps": 2.0,
        "duration": num / 2.0,
        "total_num_frames": num,
        "frames_indices": list(range(num)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    return frames, described
