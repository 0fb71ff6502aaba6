"""Decode pictures and videos of a request into `MediaItem`s, within limits.

Everything here treats its input as hostile: sizes are checked before pixels are decoded, only common file
formats are tried, nothing is fetched from a network, and whatever cannot be decoded in full raises MediaError.

Pictures become 8-bit RGB: EXIF orientation applied, transparency put on white, 16-bit grey scaled to 8 bits,
the first frame of an animation. Videos become uint8 (frames, height, width, 3).

Frames of a video. A list of pictures or an array is used frame by frame, `fps` says how fast the frames follow
each other (unknown: the processor's own assumption). Of a file, `fps` frames a second are taken (default
`VIDEO_FPS`), at least `MIN_VIDEO_FRAMES` and at most `MAX_VIDEO_FRAMES`, an even number, evenly spaced from the
first to the last frame: `sampled_indices` is the whole rule, so the same file gives the same frames.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import av
import numpy as np
from PIL import Image, ImageOps

from polylens.config import (
    MAX_IMAGE_PIXELS,
    MAX_SOURCE_FRAMES,
    MAX_VIDEO_FRAMES,
    MAX_VIDEO_PIXELS,
    MIN_VIDEO_FRAMES,
    VIDEO_FPS,
)
from polylens.core import MediaItem, MediaKind
from polylens.errors import MediaError, PolylensError

IMAGE_FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Formats decoded. Others that Pillow knows are left out: some start other programs (EPS) or read other files."""

VIDEO_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,mpegvideo,ogg,flv,asf,image2pipe,apng"
"""Demuxers tried. Playlists (HLS, concat, DASH) are left out: they open other files and addresses."""

MIN_DECODED_PART = 0.95
"""A video file of which less than this part of the announced frames can be read counts as truncated; the few per
cent allow for the miscounts of ordinary muxers."""

_FRAME_FACTOR = 2
"""Frames are taken in pairs: the video encoders here merge two consecutive frames."""


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
    name = _describe(source, "image")
    with _media_file(source, name) as file:
        return image_item(_open_image(file, name), name=name)


def image_item(image: Image.Image, *, name: str = "image") -> MediaItem:
    """Make an item of a PIL image (any mode); `name` is what error messages call it."""
    _check_size(image.width, image.height, name)
    with _decoding(name):
        rgb = _to_rgb(image)
        pixels = rgb.tobytes()
    return MediaItem(MediaKind.IMAGE, rgb, _key(MediaKind.IMAGE, rgb.mode, rgb.size, None, pixels))


def load_video(source: Any, fps: float | None = None) -> MediaItem:
    """Read a video: a path, a `file://` or `data:` URL, bytes, a sequence of pictures, a uint8 array (t, h, w, 3).

    `fps`: of frames, how many of them make a second; of a file, how many frames to take of each second.
    Raises MediaError when it is missing, empty, broken, too large or not a video.
    """
    _check_fps(fps)
    if isinstance(source, MediaItem):
        return _expect(source, MediaKind.VIDEO)
    if isinstance(source, np.ndarray):
        return video_item(source, fps)
    if isinstance(source, Sequence) and not isinstance(source, str | bytes | bytearray):
        return video_item(_stack_frames(source), fps)
    name = _describe(source, "video")
    with _media_file(source, name) as file:
        return video_item(*_decode_video(file, fps or VIDEO_FPS, name))


def video_item(frames: np.ndarray, fps: float | None = None) -> MediaItem:
    """Make an item of decoded frames, uint8 (frames, height, width, 3)."""
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
        raise MediaError(
            f"a video array must be uint8 of shape (frames, height, width, 3), got {frames.dtype} {frames.shape}"
        )
    if not 1 <= len(frames) <= MAX_VIDEO_FRAMES:
        raise MediaError(f"a video must have 1 to {MAX_VIDEO_FRAMES} frames, got {len(frames)}; pass fewer")
    height, width = frames.shape[1:3]
    _check_size(width, height, "video")
    frames = np.ascontiguousarray(frames)
    key = _key(MediaKind.VIDEO, "RGB", frames.shape, fps, frames.data)
    return MediaItem(MediaKind.VIDEO, frames, key, fps)


def sample_frames(video: MediaItem, num_frames: int) -> list[Image.Image]:
    """Evenly spaced frames of a video as RGB pictures, first and last included; all of them if there are fewer."""
    indices = evenly_spaced(len(video.data), num_frames)
    return [Image.fromarray(video.data[index]) for index in indices]


def evenly_spaced(total: int, wanted: int) -> list[int]:
    """`min(total, wanted)` increasing indices below `total`, from the first to the last (one: the first)."""
    return np.linspace(0, total - 1, min(total, wanted)).round().astype(int).tolist()


def sampled_indices(total: int, source_fps: float | None, fps: float) -> list[int]:
    """Which of a file's `total` frames are taken, at `fps` a second (all frames count where the rate is unknown)."""
    wanted = round(total / source_fps * fps) if source_fps else total
    wanted = min(max(wanted, MIN_VIDEO_FRAMES), MAX_VIDEO_FRAMES, total)
    return evenly_spaced(total, max(1, wanted - wanted % _FRAME_FACTOR))


# --- where the bytes come from


@contextmanager
def _media_file(source: Any, name: str) -> Iterator[BinaryIO]:
    """The source as an open binary file. Fetches nothing: http(s) addresses are refused."""
    if isinstance(source, bytes | bytearray):
        yield _in_memory(bytes(source), name)
    elif isinstance(source, str) and source[:5].lower() == "data:":
        yield _in_memory(_data_url_bytes(source, name), name)
    elif isinstance(source, str | Path):
        with _open_path(_path_of(source, name), name) as file:
            yield file
    else:
        raise MediaError(f"{name}: cannot read media from a {type(source).__name__}; give a path or decoded pixels")


def _in_memory(content: bytes, name: str) -> BinaryIO:
    if not content:
        raise MediaError(f"{name} is empty (0 bytes)")
    return io.BytesIO(content)


def _data_url_bytes(url: str, name: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise MediaError(f"{name} must have the form data:TYPE;base64,DATA")
    try:
        return base64.b64decode(unquote(payload), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{name} does not hold valid base64: {error}") from error


def _path_of(source: str | Path, name: str) -> Path:
    if isinstance(source, Path):
        return source
    if "://" not in source:
        return Path(source).expanduser()
    url = urlsplit(source)
    if url.scheme.lower() != "file":
        raise MediaError(f"{name}: addresses are not fetched; download the file and give its path or a data: URL")
    return Path(unquote(url.path))


def _open_path(path: Path, name: str) -> BinaryIO:
    try:
        if not path.exists():
            raise MediaError(f"{name} does not exist")
        if not path.is_file():  # a folder, a pipe or a device such as /dev/zero, which never ends
            raise MediaError(f"{name} is not a regular file")
        if path.stat().st_size == 0:
            raise MediaError(f"{name} is empty (0 bytes)")
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise MediaError(f"{name} cannot be opened: {getattr(error, 'strerror', None) or error}") from error


def _describe(source: Any, kind: str) -> str:
    """What error messages call the source: short, and without the content of a data URL."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        return f"{kind} given as a data: URL"
    if isinstance(source, str | Path):
        text = str(source)
        return f"{kind} {text if len(text) <= 200 else text[:200] + '…'!r}"
    return f"{kind} given as {type(source).__name__}"


def _expect(item: MediaItem, kind: MediaKind) -> MediaItem:
    if item.kind is not kind:
        raise MediaError(f"expected a decoded {kind}, got a decoded {item.kind}")
    return item


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """The border to the decoders: whatever they raise on broken files becomes one MediaError."""
    try:
        yield
    except PolylensError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MediaError(f"{name} cannot be decoded: {reason}") from error


def _check_size(width: int, height: int, name: str) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"{name} has no pixels ({width} x {height})")
    if width * height > MAX_IMAGE_PIXELS:
        raise MediaError(
            f"{name} is too large: {width} x {height} pixels, the limit is {MAX_IMAGE_PIXELS} in all; scale it down"
        )


def _key(kind: MediaKind, mode: str, size: Sequence[int], fps: float | None, pixels: Any) -> str:
    digest = hashlib.sha256(f"{kind}|{mode}|{'x'.join(map(str, size))}|{fps!r}|".encode())
    digest.update(pixels)
    return digest.hexdigest()


# --- pictures


def _open_image(file: BinaryIO, name: str) -> Image.Image:
    """Decode the first frame of a picture file; the size is checked from the header before any pixel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own, lower limit decides
        try:
            image = Image.open(file, formats=_known_formats())
        except Image.UnidentifiedImageError as error:
            raise MediaError(f"{name} is not a picture in a known format") from error
        except Image.DecompressionBombError as error:
            raise MediaError(f"{name} is too large: the limit is {MAX_IMAGE_PIXELS} pixels; scale it down") from error
        except Exception as error:
            raise MediaError(f"{name} cannot be decoded: {error}") from error
        _check_size(image.width, image.height, name)
        with _decoding(name):
            image.load()
    return image


def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(format_ for format_ in IMAGE_FORMATS if format_ in Image.OPEN)


def _array_image(array: np.ndarray) -> Image.Image:
    grey, colour = array.ndim == 2, array.ndim == 3 and array.shape[-1] == 3
    if array.dtype != np.uint8 or not (grey or colour):
        raise MediaError(f"an image array must be uint8 of shape (h, w, 3) or (h, w), got {array.dtype} {array.shape}")
    _check_size(array.shape[1], array.shape[0], "image")
    return Image.fromarray(np.ascontiguousarray(array))


def _to_rgb(image: Image.Image) -> Image.Image:
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


def _decode_video(file: BinaryIO, fps: float, name: str) -> tuple[np.ndarray, float | None]:
    """The sampled frames of a video file, and how many of them make a second."""
    with _decoding(name):
        total = _count_frames(file)
        file.seek(0)
        with _open_container(file) as container:
            stream = _video_stream(container, name)
            total = total if total > 0 else stream.frames
            _check_source(stream, total, name)
            source_fps = float(stream.average_rate or stream.guessed_rate or 0) or None
            indices = sampled_indices(total, source_fps, fps)
            frames = _take_frames(container, stream, indices, total, name)
    return frames, _sampled_fps(indices, source_fps)


def _open_container(file: BinaryIO) -> Any:
    return av.open(file, options={"format_whitelist": VIDEO_FORMATS})


def _video_stream(container: Any, name: str) -> Any:
    if not container.streams.video:
        raise MediaError(f"{name} has no video stream")
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    return stream


def _count_frames(file: BinaryIO) -> int:
    """Frames of the first video stream, from the packets: headers may lack the count or lie."""
    with _open_container(file) as container:
        streams = container.streams.video
        if not streams:
            return 0
        count = 0
        for packet in container.demux(streams[0]):
            count += packet.size > 0
            if count > MAX_SOURCE_FRAMES:
                break
        return max(count, min(streams[0].frames, MAX_SOURCE_FRAMES + 1))


def _check_source(stream: Any, total: int, name: str) -> None:
    _check_size(stream.width, stream.height, name)
    if total < 1:
        raise MediaError(f"{name} has no frames")
    if total > MAX_SOURCE_FRAMES:
        raise MediaError(f"{name} is too long: the limit is {MAX_SOURCE_FRAMES} frames; cut it")


def _take_frames(container: Any, stream: Any, indices: Sequence[int], total: int, name: str) -> np.ndarray:
    """Decode up to the last wanted frame and keep the wanted ones.

    Where the file ends a little early (see MIN_DECODED_PART) the last frame stands in for the missing ones.
    """
    wanted, taken = list(indices), []
    num_decoded = 0
    for frame in container.decode(stream):
        _check_size(frame.width, frame.height, name)  # may change inside a stream
        while wanted and wanted[0] <= num_decoded:
            taken.append(_rgb_frame(frame, len(indices)))
            wanted.pop(0)
        num_decoded += 1
        last = frame
        if not wanted:
            break
    if num_decoded == 0 or (wanted and num_decoded < MIN_DECODED_PART * total):
        raise MediaError(f"{name} is truncated or broken: {num_decoded} of {total} frames could be read")
    taken += [_rgb_frame(last, len(indices)) for _ in wanted]
    if len({frame.shape for frame in taken}) > 1:
        raise MediaError(f"{name} changes its frame size half-way; re-encode it with one size")
    return np.stack(taken)


def _rgb_frame(frame: Any, num_frames: int) -> np.ndarray:
    """(h, w, 3) uint8, upright, scaled down so that `num_frames` of them stay within MAX_VIDEO_PIXELS."""
    scale = min(1.0, (MAX_VIDEO_PIXELS / num_frames / (frame.width * frame.height)) ** 0.5)
    width, height = max(1, int(frame.width * scale)), max(1, int(frame.height * scale))
    pixels = frame.reformat(width=width, height=height, format="rgb24", interpolation="BICUBIC").to_ndarray()
    quarter_turns = round((frame.rotation or 0) / 90) % 4
    return np.rot90(pixels, quarter_turns) if quarter_turns else pixels


def _sampled_fps(indices: Sequence[int], source_fps: float | None) -> float | None:
    """Frames a second among the sampled ones, such that the last one keeps its time."""
    if source_fps is None or len(indices) < 2:
        return source_fps
    return (len(indices) - 1) * source_fps / (indices[-1] - indices[0])


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
