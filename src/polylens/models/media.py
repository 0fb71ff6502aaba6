"""Decode pictures and videos of a request into `MediaItem`s, within limits.

Everything here treats its input as hostile: sizes are checked before pixels are decoded, only common file
formats are tried, nothing is fetched from a network, and whatever cannot be decoded in full raises MediaError.

Pictures become 8-bit RGB: EXIF orientation applied, transparency put on white, 16-bit grey scaled to 8 bits,
the first frame of an animation. Videos become uint8 (frames, height, width, 3).

Frames of a video. A list of pictures or an array is used frame by frame, `fps` says how fast the frames follow
each other (unknown: the processor's own assumption). Of a file, `fps` frames a second are taken (default
`VIDEO_FPS`), at least `MIN_VIDEO_FRAMES` and at most `MAX_VIDEO_FRAMES`, an even number, evenly spaced from the
first to the last frame: `video_file.sampled_indices` is the whole rule, so a file always gives the same frames.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps

from polylens.config import MAX_IMAGE_PIXELS, MAX_VIDEO_FRAMES, VIDEO_FPS
from polylens.core import MediaItem, MediaKind
from polylens.errors import MediaError
from polylens.models.media_source import check_size, decoding, describe, media_file
from polylens.models.video_file import decode_video, evenly_spaced

IMAGE_FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Formats decoded. Others that Pillow knows are left out: some start other programs (EPS) or hold pictures of another
size than they say (ICO)."""


def load_image(source: Any) -> MediaItem:
    """Read a picture: a PIL image, a path, a `file://` or `data:` URL, bytes, a uint8 array (h, w, 3) or (h, w).

    Raises MediaError when it is missing, empty, broken, too large or not a picture.
    """
    if isinstance(source, MediaItem):
        return _expect(source, MediaKind.IMAGE)
    if isinstance(source, Image.Image):
        return image_item(source)
    if isinstance(source, np.ndarray):
        return image_item(_array_image(source))
    name = describe(source, "image")
    with media_file(source, name) as file:
        return image_item(_open_image(file, name), name=name)


def image_item(image: Image.Image, *, name: str = "image") -> MediaItem:
    """Make an item of a PIL image (any mode); `name` is what error messages call it."""
    check_size(image.width, image.height, name)
    with decoding(name):
        rgb = _to_rgb(image)
        pixels = rgb.tobytes()
    return MediaItem(MediaKind.IMAGE, rgb, _key(MediaKind.IMAGE, rgb.mode, rgb.size, None, pixels))


def load_video(source: Any, fps: float | None = None, num_frames: int | None = None) -> MediaItem:
    """Read a video: a path, a `file://` or `data:` URL, bytes, a sequence of pictures, a uint8 array (t, h, w, 3).

    `fps`: of frames, how many of them make a second; of a file, how many frames to take of each second.
    `num_frames`: of a file, how many frames to take in all.
    Raises MediaError when it is missing, empty, broken, too large or not a video.
    """
    _check_fps(fps)
    if isinstance(source, MediaItem):
        if fps not in (None, source.fps):
            raise MediaError(f"fps is {fps}, but the video was decoded as {source.fps} frames a second")
        return _expect(source, MediaKind.VIDEO)
    if isinstance(source, np.ndarray):
        return video_item(source, fps)
    if isinstance(source, Sequence) and not isinstance(source, str | bytes | bytearray):
        return video_item(_stack_frames(source), fps)
    name = describe(source, "video")
    with media_file(source, name) as file:
        return video_item(*decode_video(file, fps or VIDEO_FPS, name, num_frames))


def video_item(frames: np.ndarray, fps: float | None = None) -> MediaItem:
    """Make an item of decoded frames, uint8 (frames, height, width, 3)."""
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
        raise MediaError(
            f"a video array must be uint8 of shape (frames, height, width, 3), got {frames.dtype} {frames.shape}"
        )
    if not 1 <= len(frames) <= MAX_VIDEO_FRAMES:
        raise MediaError(f"a video must have 1 to {MAX_VIDEO_FRAMES} frames, got {len(frames)}; pass fewer")
    height, width = frames.shape[1:3]
    check_size(width, height, "video")
    frames = np.ascontiguousarray(frames)
    key = _key(MediaKind.VIDEO, "RGB", frames.shape, fps, frames.data)
    return MediaItem(MediaKind.VIDEO, frames, key, fps)


def sample_frames(video: MediaItem, num_frames: int) -> list[Image.Image]:
    """Evenly spaced frames of a video as RGB pictures, first and last included; all of them if there are fewer."""
    indices = evenly_spaced(len(video.data), num_frames)
    return [Image.fromarray(video.data[index]) for index in indices]


def _expect(item: MediaItem, kind: MediaKind) -> MediaItem:
    if item.kind is not kind:
        raise MediaError(f"expected a decoded {kind}, got a decoded {item.kind}")
    return item


def _key(kind: MediaKind, mode: str, size: Sequence[int], fps: float | None, pixels: Any) -> str:
    digest = hashlib.sha256(f"{kind}|{mode}|{'x'.join(map(str, size))}|{fps!r}|".encode())
    digest.update(pixels)
    return digest.hexdigest()


# --- pictures


def _open_image(file: BinaryIO, name: str) -> Image.Image:
    """Decode the first frame of a picture file; the size is checked from the header before any pixel."""
    with warnings.catch_warnings(), decoding(name):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own, lower limit decides
        image = _identify(file, name)
        check_size(image.width, image.height, name)
        image.load()
    return image


def _identify(file: BinaryIO, name: str) -> Image.Image:
    try:
        return Image.open(file, formats=_known_formats())
    except Image.UnidentifiedImageError as error:
        raise MediaError(f"{name} is not a picture in a known format") from error
    except Image.DecompressionBombError as error:
        raise MediaError(f"{name} is too large: the limit is {MAX_IMAGE_PIXELS} pixels; scale it down") from error


def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(format_ for format_ in IMAGE_FORMATS if format_ in Image.OPEN)


def _array_image(array: np.ndarray) -> Image.Image:
    grey, colour = array.ndim == 2, array.ndim == 3 and array.shape[-1] == 3
    if array.dtype != np.uint8 or not (grey or colour):
        raise MediaError(f"an image array must be uint8 of shape (h, w, 3) or (h, w), got {array.dtype} {array.shape}")
    check_size(array.shape[1], array.shape[0], "image")
    return Image.fromarray(np.ascontiguousarray(array))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # exif_transpose copies, needed or not
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow's own conversion would clip everything above 255 to white
        return _from_16_bit(image).convert("RGB")
    if image.mode in ("I", "F"):
        raise MediaError(
            f"a picture with 32 bits a pixel (mode {image.mode}) has no defined brightness range; "
            "convert it to 8 or 16 bits"
        )
    if image.has_transparency_data:
        return _on_white(image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    wide = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    """White, as the page a transparent picture was drawn for; dropping alpha would show hidden colours."""
    canvas = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(canvas, image).convert("RGB")


# --- videos


def _check_fps(fps: Any) -> None:
    if fps is None:
        return
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise MediaError(f"fps must be a positive number, got {fps!r}")


def _stack_frames(sources: Sequence[Any]) -> np.ndarray:
    """Frames given as pictures, all of one size, as one array."""
    if not 1 <= len(sources) <= MAX_VIDEO_FRAMES:
        raise MediaError(f"a video must have 1 to {MAX_VIDEO_FRAMES} frames, got {len(sources)}; pass fewer")
    frames: list[Image.Image] = []
    for index, source in enumerate(sources):
        frame = load_image(source).data
        if frames and frame.size != frames[0].size:
            raise MediaError(f"frame {index} of a video is {frame.size}, frame 0 is {frames[0].size}: make them equal")
        frames.append(frame)
    return np.stack([np.asarray(frame) for frame in frames])


def video_metadata(video: MediaItem) -> Mapping[str, Any]:
    """What transformers' video processors are told: every frame given is used, and how fast they follow.

    With it, `processor.apply_chat_template(messages, tokenize=True, return_dict=True, processor_kwargs={
    "do_sample_frames": False, "video_metadata": [video_metadata(item), …]})` makes exactly the tensors and ids
    that polylens makes of the same frames.
    """
    num_frames, height, width, _ = video.data.shape
    return {
        "total_num_frames": num_frames,
        "fps": video.fps,
        "duration": num_frames / video.fps if video.fps else None,
        "frames_indices": list(range(num_frames)),
        "height": height,
        "width": width,
    }
