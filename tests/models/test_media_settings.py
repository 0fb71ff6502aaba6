from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from polylens.config import EngineConfig
from polylens.core import MediaKind
from polylens.errors import PolylensError, RequestError
from polylens.models.loading import load_model
from polylens.models.media_settings import MediaSettings
from polylens.models.prepared import PreparedPrompt
from tests.families.media import picture, user

Prepare = Callable[..., PreparedPrompt]
PICTURE = user(picture(160, 120, 1), "?")


@pytest.fixture
def prepare(checkpoint: Callable[[str], Path], request: pytest.FixtureRequest) -> Prepare:
    family = getattr(request, "param", "qwen2_5_vl")
    processing = load_model(checkpoint(family), EngineConfig()).processing
    return lambda messages, **settings: processing.prepare(messages, mm_processor_kwargs=settings)


def num_pixels(prompt: PreparedPrompt) -> int:
    (item,) = prompt.items
    name = "image_grid_thw" if item.kind is MediaKind.IMAGE else "video_grid_thw"
    return int(item.tensors[name].prod()) * 4 * 4


def clip(num_frames: int, rate: int = 10) -> bytes:
    """A video file of small noisy frames."""
    file = io.BytesIO()
    rng = np.random.default_rng(0)
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for _ in range(num_frames):
            frame = av.VideoFrame.from_ndarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def video_message(source: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "video", "video": source, **fields}]}]


def num_frames(prompt: PreparedPrompt) -> int:
    return int(prompt.items[0].tensors["video_grid_thw"][0, 0]) * 2


def test_pixel_bounds_scale_pictures_and_make_other_vision_keys(prepare: Prepare):
    own, fewer = prepare(PICTURE), prepare(PICTURE, max_pixels=1024)
    assert num_pixels(fewer) <= 1024 < num_pixels(own)
    assert len(fewer.token_ids) < len(own.token_ids)
    small = user(picture(16, 16, 1), "?")
    assert num_pixels(prepare(small, min_pixels=1500)) >= 1500 > num_pixels(prepare(small))
    keys = [one.items[0].settings_key for one in (own, fewer, prepare(PICTURE), prepare(PICTURE, max_pixels=1024))]
    assert keys == [keys[0], keys[1], keys[0], keys[1]]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("prepare", ["qwen2_vl", "qwen3_vl"], indirect=True)
def test_pixel_bounds_in_the_other_families_of_variable_size(prepare: Prepare):
    assert num_pixels(prepare(PICTURE, max_pixels=1024)) <= 1024


@pytest.mark.parametrize("prepare", ["gemma3", "llava"], indirect=True)
def test_families_of_fixed_size_refuse_pixel_bounds(prepare: Prepare):
    with pytest.raises(RequestError, match="fixed size") as caught:
        prepare(PICTURE, max_pixels=1024)
    assert caught.value.param == "mm_processor_kwargs"


def test_frames_of_a_file(prepare: Prepare):
    video = clip(40)  # four seconds
    assert num_frames(prepare(video_message(video))) == 8
    assert num_frames(prepare(video_message(video), fps=4)) == 16
    assert num_frames(prepare(video_message(video, fps=1), fps=4)) == 4
    assert num_frames(prepare(video_message(video), num_frames=6)) == 6
    assert num_frames(prepare(video_message(video), num_frames=768)) == 40


@pytest.mark.parametrize("prepare", ["llava"], indirect=True)
def test_frames_that_become_pictures(prepare: Prepare):
    assert len(prepare(video_message(clip(12)), num_frames=4).items) == 4


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"min_pixel": 4}, "has no 'min_pixel' to set; it has: min_pixels, max_pixels, fps, num_frames"),
        ({"max_pixels": 0}, "max_pixels must be an integer of at least 1, got 0"),
        ({"min_pixels": 4.0}, "min_pixels must be an integer"),
        ({"max_pixels": True}, "max_pixels must be an integer"),
        ({"max_pixels": 10**9}, "at most the model's own"),
        ({"min_pixels": 2000, "max_pixels": 1000}, "min_pixels 2000 is above max_pixels 1000"),
        ({"fps": 0}, "fps must be a number above 0"),
        ({"fps": float("nan")}, "fps must be a number above 0"),
        ({"num_frames": 100_000}, "num_frames must be at most 768"),
        ({"fps": 1, "num_frames": 2}, "not both"),
    ],
)
def test_wrong_settings_are_named(prepare: Prepare, settings: dict[str, Any], reason: str):
    with pytest.raises(RequestError, match=reason) as caught:
        prepare(PICTURE, **settings)
    assert caught.value.param == "mm_processor_kwargs"


def test_given_frames_are_not_chosen_from(prepare: Prepare):
    frames = np.zeros((4, 32, 32, 3), dtype=np.uint8)
    with pytest.raises(PolylensError, match="not of given frames"):
        prepare(video_message(frames), num_frames=2)
    with pytest.raises(PolylensError, match="exclude each other"):
        prepare(video_message(clip(8), fps=2), num_frames=2)


def test_no_settings():
    assert MediaSettings.parse(None) == MediaSettings.parse({}) == MediaSettings()
