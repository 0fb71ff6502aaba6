"""What a request may ask of the processing of its media (`mm_processor_kwargs`)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from polylens.config import MAX_VIDEO_FRAMES
from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

PARAM = "mm_processor_kwargs"


@dataclass(frozen=True)
class MediaSettings:
    """Checked settings; None: the model's own.

    min_pixels, max_pixels: size that pictures (and frames, where the model's video processor takes it) are scaled
    to, for families of variable size. fps: frames taken of each second of a video file whose part names none;
    num_frames: frames taken of a video file, evenly spaced (rounded down to pairs). Not both.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> MediaSettings:
        """Raises RequestError for an unknown name or a value out of range."""
        known = [one.name for one in fields(cls)]
        for name in given or {}:
            if name not in known:
                raise _error(f"has no {name!r} to set; it has: {', '.join(known)}")
        settings = cls(**dict(given or {}))
        settings._check()
        return settings

    def _check(self) -> None:
        for name in ("min_pixels", "max_pixels", "num_frames"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise _error(f"{name} must be an integer of at least 1, got {value!r}")
        fps = self.fps
        if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1000):
            raise _error(f"fps must be a number above 0 and below 1000, got {fps!r}")
        if fps is not None and self.num_frames is not None:
            raise _error("takes fps or num_frames, not both")
        if self.num_frames is not None and self.num_frames > MAX_VIDEO_FRAMES:
            raise _error(f"num_frames must be at most {MAX_VIDEO_FRAMES}, got {self.num_frames}")

    @property
    def changes_size(self) -> bool:
        return self.min_pixels is not None or self.max_pixels is not None

    @property
    def changes_frames(self) -> bool:
        return self.fps is not None or self.num_frames is not None

    def size_for(self, real: Any) -> dict[str, int] | None:
        """The `size` to call an image or video processor with; None: its own, or it takes no such setting.

        RequestError where the bounds cross, or exceed the model's own largest size: that one bounds the memory.
        """
        if not self.changes_size or not takes_pixels(real):
            return None
        least, most = real.size["shortest_edge"], real.size["longest_edge"]
        if self.max_pixels is not None and self.max_pixels > most:
            raise _error(f"max_pixels must be at most the model's own {most}, got {self.max_pixels}")
        most = self.max_pixels if self.max_pixels is not None else most
        if self.min_pixels is not None and self.min_pixels > most:
            raise _error(f"min_pixels {self.min_pixels} is above max_pixels {most}")
        least = self.min_pixels if self.min_pixels is not None else min(least, most)
        return {"shortest_edge": least, "longest_edge": most}


def takes_pixels(real: Any) -> bool:
    """Whether an image or video processor scales to a number of pixels (in `size`'s edges, despite their names)."""
    return "min_pixels" in getattr(getattr(real, "valid_kwargs", None), "__annotations__", {})


def _error(problem: str) -> RequestError:
    return RequestError(f"{PARAM} {problem}", param=PARAM)
