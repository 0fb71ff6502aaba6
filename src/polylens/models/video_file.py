"""Decode a sample of a video file's frames, within limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

import av
import numpy as np

from polylens.config import (
    MAX_SOURCE_FRAMES,
    MAX_SOURCE_PIXELS,
    MAX_VIDEO_FRAMES,
    MAX_VIDEO_PIXELS,
    MIN_VIDEO_FRAMES,
)
from polylens.errors import MediaError
from polylens.models.media_source import check_size, decoding

VIDEO_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,mpegvideo,ogg,flv,asf,apng"
"""Demuxers tried. Playlists (HLS, concat, DASH) are left out: they open other files and addresses."""

MIN_DECODED_PART = 0.95
"""A video file of which less than this part of the announced frames can be read counts as truncated; the few per
cent allow for the miscounts of ordinary muxers."""

_FRAME_FACTOR = 2
"""Frames are taken in pairs: the video encoders here merge two consecutive frames."""


def evenly_spaced(total: int, wanted: int) -> list[int]:
    """`min(total, wanted)` increasing indices below `total`, from the first to the last (one: the first)."""
    return np.linspace(0, total - 1, min(total, wanted)).round().astype(int).tolist()


def sampled_indices(total: int, source_fps: float | None, fps: float) -> list[int]:
    """Which of a file's `total` frames are taken, at `fps` a second (all frames count where the rate is unknown)."""
    wanted = round(total / source_fps * fps) if source_fps else total
    wanted = min(max(wanted, MIN_VIDEO_FRAMES), MAX_VIDEO_FRAMES, total)
    return evenly_spaced(total, max(1, wanted - wanted % _FRAME_FACTOR))


def decode_video(
    file: BinaryIO, fps: float, name: str, num_frames: int | None = None
) -> tuple[np.ndarray, float | None]:
    """`fps` frames of each second of a video file (or `num_frames` of all), and how many of them make a second.

    Returns uint8 (frames, height, width, 3), upright. Raises MediaError.
    """
    with decoding(name):
        total = _count_frames(file)
        file.seek(0)
        with _open_container(file) as container:
            stream = _video_stream(container, name)
            total = total if total > 0 else stream.frames
            _check_source(stream, total, name)
            source_fps = float(stream.average_rate or stream.guessed_rate or 0) or None
            if num_frames is None:
                indices = sampled_indices(total, source_fps, fps)
            else:
                indices = evenly_spaced(total, max(1, num_frames - num_frames % _FRAME_FACTOR))
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
    check_size(stream.width, stream.height, name)
    if total < 1:
        raise MediaError(f"{name} has no frames")
    if total > MAX_SOURCE_FRAMES:
        raise MediaError(f"{name} is too long: the limit is {MAX_SOURCE_FRAMES} frames; cut it")
    if total * stream.width * stream.height > MAX_SOURCE_PIXELS:
        raise MediaError(
            f"{name} is too large to decode: {total} frames of {stream.width} x {stream.height}; cut or shrink it"
        )


def _take_frames(container: Any, stream: Any, indices: Sequence[int], total: int, name: str) -> np.ndarray:
    """Decode up to the last wanted frame and keep the wanted ones.

    Where the file ends a little early (see MIN_DECODED_PART) the last frame stands in for the missing ones.
    """
    wanted, taken = list(indices), []
    num_decoded = 0
    for frame in container.decode(stream):
        check_size(frame.width, frame.height, name)  # may change inside a stream
        while wanted and wanted[0] <= num_decoded:
            taken.append(rgb_frame(frame, len(indices)))
            wanted.pop(0)
        num_decoded += 1
        last = frame
        if not wanted:
            break
    if num_decoded == 0 or (wanted and num_decoded < MIN_DECODED_PART * total):
        raise MediaError(f"{name} is truncated or broken: {num_decoded} of {total} frames could be read")
    taken += [rgb_frame(last, len(indices)) for _ in wanted]
    if len({frame.shape for frame in taken}) > 1:
        raise MediaError(f"{name} changes its frame size half-way; re-encode it with one size")
    return np.stack(taken)


def rgb_frame(frame: Any, num_frames: int) -> np.ndarray:
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
