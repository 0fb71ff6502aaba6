"""Videos of families with packed patches: odd numbers of frames, and frames that do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.families.media import user, video
from tests.families.packed import PACKED
from tests.parity.harness import Bench, Case, mixed

IN_CI = ("kimi_k25", "video_llama_3")
"""Those where it matters: frames are averaged in fours, and patches that stay are left out."""
FAMILIES = [
    pytest.param(name, marks=() if name in IN_CI else pytest.mark.full)
    for name, family in PACKED.items()
    if family.takes_videos
]


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_that_do_not_change_and_an_odd_number_of_them(
    family: str, bench_of: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(family)
    short = video(1 if family in IN_CI else 2, 24, 16, 4)  # some processors refuse a single frame
    asked = {"still": user(_half_still(), "what moves?"), "odd": user(video(7, 16, 24, 3), short, "?")}
    for name, messages in asked.items():
        monkeypatch.setitem(bench.questions, name, messages)
    with bench.llm() as llm:
        bench.check(llm, mixed(asked, ["base", "tower", "all"]), num_tokens=4)


def test_patches_that_stay_have_no_token(bench_of: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("video_llama_3")
    monkeypatch.setitem(bench.questions, "still", user(_half_still(), "what moves?"))
    monkeypatch.setitem(bench.questions, "moving", user(video(5, 32, 16, 1), "what moves?"))
    still, moving = (bench.num_prompt_tokens(Case(name, "base")) for name in ("still", "moving"))
    assert still <= moving - 4 * 2  # of four frames at least the left half


def _half_still() -> Any:
    """Five frames of which only the right half changes."""
    frames = video(5, 32, 16, 1)
    return np.concatenate([np.repeat(frames[:1, :, :16], 5, axis=0), frames[:, :, 16:]], axis=2)
