"""The tiny checkpoints are worth testing against: they load as published ones do, and pictures matter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tests.families.adapters import TARGETS, make_adapter
from tests.families.build import FAMILIES, VIDEO_FAMILIES, build_checkpoint
from tests.families.media import picture, user, video
from tests.families.reference import merged_reference

CheckpointOf = Callable[[str], Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_through_the_auto_classes(family: str, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(family)
    assert AutoConfig.from_pretrained(folder).model_type == family
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "what is\n\nthe  picture? café 東京"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() == text


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_bytes(family: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    assert _digest(build_checkpoint(family, tmp_path)) == _digest(checkpoint(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_vary_and_pictures_matter(family: str, checkpoint: CheckpointOf) -> None:
    folder = checkpoint(family)
    base = _answer(folder, user(picture(32, 24, 1), picture(16, 40, 2), "what is it?"))
    swapped = _answer(folder, user(picture(32, 24, 3), picture(16, 40, 2), "what is it?"))
    text_only = _answer(folder, user("what is it?"))
    assert len(set(base[0])) > 3
    assert _first_step_difference(base, swapped) > 1e-2
    assert _first_step_difference(base, text_only) > 1e-2
    top2 = base[1].topk(2).values
    assert ((top2[:, 0] - top2[:, 1]) > 1e-3).float().mean() > 0.8


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_videos_matter(family: str, checkpoint: CheckpointOf) -> None:
    first = _answer(checkpoint(family), user(video(6, 24, 32, 1), "what happens?"))
    second = _answer(checkpoint(family), user(video(6, 24, 32, 2), "what happens?"))
    assert _first_step_difference(first, second) > 1e-2


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_adapter_moves_the_logits(family: str, targets: str, checkpoint: CheckpointOf, tmp_path: Path) -> None:
    folder = checkpoint(family)
    messages = user(picture(32, 24, 1), "what is it?")
    adapters = [make_adapter(folder, tmp_path / str(seed), targets=targets, seed=seed) for seed in (1, 2)]
    answers = [_answer(folder, messages, adapter) for adapter in (None, *adapters)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert _first_step_difference(answers[one], answers[other]) > 1e-2


def _answer(folder: Path, messages: list, adapter: Path | None = None) -> tuple[list[int], torch.Tensor]:
    return merged_reference(folder, adapter, messages, 12, ignore_eos=True)


def _first_step_difference(one: tuple[list[int], torch.Tensor], other: tuple[list[int], torch.Tensor]) -> float:
    return (one[1][0] - other[1][0]).abs().max().item()


def _digest(folder: Path) -> str:
    contents = b"".join(path.name.encode() + path.read_bytes() for path in sorted(folder.iterdir()))
    return hashlib.sha256(contents).hexdigest()
