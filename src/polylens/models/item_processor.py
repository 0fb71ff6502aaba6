"""Stand-ins for a processor's image or video part: one runs on each item alone, once for equal content and settings;
the other runs on all of a request together."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polylens.core import MediaKind
from polylens.errors import MediaError, first_line
from polylens.models.media import video_metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polylens.core import MediaItem


def media_part(processor: Any, kind: MediaKind) -> Any:
    """The processor's image or video processor; None where it has none."""
    return getattr(processor, f"{kind}_processor", None)


def media_token(processor: Any, kind: MediaKind) -> str | None:
    """What stands for one item in the text that a template renders; None where the processor names nothing."""
    token = getattr(processor, f"{kind}_placeholder_token", None) or getattr(processor, f"{kind}_token", None)
    return None if token is None else str(token)  # BLIP-2's is an AddedToken


def kinds_taken(processor: Any) -> list[MediaKind]:
    """The kinds of media that a processor has a part and a token for; pictures always."""
    has_token = media_token(processor, MediaKind.VIDEO) is not None
    takes_videos = has_token and media_part(processor, MediaKind.VIDEO) is not None
    return [MediaKind.IMAGE, MediaKind.VIDEO] if takes_videos else [MediaKind.IMAGE]


@dataclass(frozen=True)
class ItemResult:
    """What a processor returned for one item alone."""

    settings_key: str
    outputs: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.outputs.values() if isinstance(x, torch.Tensor))


class ItemProcessor:
    """Stands in for an image or video processor: each item alone, remembered, then packed as one batch."""

    def __init__(
        self,
        real: Any,
        settings: str,
        items: list[MediaItem],
        memo: ResultMemo,
        size: dict[str, int] | None = None,
        *,
        together: bool = False,
    ) -> None:
        """size: what to scale to instead of the processor's own `size`. together: see `ProcessorNotes`."""
        self.real = real
        self.items = items
        self.results: list[ItemResult] = []
        self._settings = settings
        self._size = size
        self._memo = memo
        self._is_one_of_several = together and len(items) > 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __call__(self, _: Any = None, **options: Any) -> dict[str, Any]:
        """What processors hand over, in place or as `images` or `videos`, is what `items` are."""
        options = {name: value for name, value in options.items() if name not in ("images", "videos")}
        if self._size is not None:
            options["size"] = self._size
        asked = f"{self._settings}|{sorted(options.items())!r}{'|several' if self._is_one_of_several else ''}"
        settings_key = hashlib.sha256(asked.encode()).hexdigest()
        self.results = [self._one(index, item, settings_key, options) for index, item in enumerate(self.items)]
        return _pack([result.outputs for result in self.results])

    def _one(self, index: int, item: MediaItem, settings_key: str, options: Mapping[str, Any]) -> ItemResult:
        known = self._memo.get((item.key, settings_key))
        if known is not None:
            return known
        options = {**options, **_fixed_options(self.real, [item])}
        try:
            outputs = self._processed(item.data, options)
        except Exception as error:  # the border to processors: they raise what they like on odd sizes
            raise MediaError(f"{item.kind} {index} cannot be processed for this model: {first_line(error)}") from error
        result = ItemResult(settings_key, outputs)
        self._memo.put((item.key, settings_key), result)
        return result

    def _processed(self, data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        if not self._is_one_of_several:
            output = self.real([[data]], **options)
            return {"pixel_values": output} if isinstance(output, torch.Tensor) else dict(output)  # IDEFICS' are pixels
        twice = self.real([[data, data]], **options)
        return {name: value[:1] for name, value in twice.items()}


class PixelRows(list[torch.Tensor]):
    """The rows of several items' pixel tensors, listed, not copied. `shape`: as if padded to one tensor."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), *(max(sizes) for sizes in zip(*(row.shape for row in self), strict=True))])


class WholeProcessor:
    """Stands in for an image or video processor: all items of a request at once, as transformers hands them over."""

    def __init__(self, real: Any, items: list[MediaItem], size: dict[str, int] | None = None) -> None:
        self.real = real
        self.items = items
        self._size = size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __call__(self, images: Any = None, **options: Any) -> Any:
        media = options.pop("videos", None) if images is None else images
        if self._size is not None:
            options["size"] = self._size
        try:
            output = self.real(media, **{**options, **_fixed_options(self.real, self.items)})
            return output if isinstance(output, torch.Tensor) else dict(output)  # IDEFICS' returns the pixels
        except Exception as error:  # the border to processors: they raise what they like on odd sizes
            kind = self.items[0].kind
            raise MediaError(f"the {kind}s cannot be processed for this model: {first_line(error)}") from error


def _fixed_options(real: Any, items: Sequence[MediaItem]) -> dict[str, Any]:
    """What a processor is told in any case: tensors please, and the frames of videos as they were taken."""
    options: dict[str, Any] = {"return_tensors": "pt"}
    if items[0].kind is MediaKind.VIDEO:
        options |= {
            "do_sample_frames": False,
            "return_metadata": True,
            "video_metadata": [dict(video_metadata(item)) for item in items],
            "input_data_format": "channels_last",
        }
        if getattr(real, "cap_pixels_per_frame", True) is None:
            options["cap_pixels_per_frame"] = False  # what None means in this transformers, without its warning
    return options


def _pack(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several items' outputs as one call would return them."""
    packed: dict[str, Any] = {}
    for name in dict.fromkeys(name for output in outputs for name in output):
        values = [output[name] for output in outputs if name in output]
        if name.startswith("pixel_"):  # pixels and their masks
            packed[name] = PixelRows(row for value in values for row in (value if value.dim() > 2 else [value]))
        elif isinstance(values[0], torch.Tensor) and not values[0].dim():  # of the whole call: the most crops (Aria)
            packed[name] = torch.stack(values).max()
        elif isinstance(values[0], torch.Tensor):
            packed[name] = torch.cat(values)
        else:  # metadata: processors write into it, so the remembered one is never handed out
            listed = [output.get(name, [[]]) for output in outputs]  # Step 3.7's small pictures have no row ends
            packed[name] = [copy.deepcopy(one) for value in listed for one in value]
    return packed


class ResultMemo:
    """Least recently used results within a budget of bytes; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._results: OrderedDict[tuple[str, str], ItemResult] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, str]) -> ItemResult | None:
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def put(self, key: tuple[str, str], result: ItemResult) -> None:
        with self._lock:
            if key in self._results or result.num_bytes > self._max_bytes:
                return
            self._results[key] = result
            self.num_bytes += result.num_bytes
            while self.num_bytes > self._max_bytes:
                _, oldest = self._results.popitem(last=False)
                self.num_bytes -= oldest.num_bytes
