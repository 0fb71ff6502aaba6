"""How the documentation of families without a chat template calls their processors, where not with a picture and its
text: KOSMOS, IDEFICS, GIT, Donut and the like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Messages = Sequence[Mapping[str, Any]]
Inputs = Mapping[str, torch.Tensor]


def _picture_and_text(messages: Messages) -> tuple[Any, str]:
    parts = [part for message in messages for part in message["content"]]
    pictures = [part["image"] for part in parts if part["type"] == "image"]
    return (pictures[0] if pictures else None), "\n".join(part["text"] for part in parts if part["type"] == "text")


def _idefics(processor: Any, messages: Messages) -> Inputs:
    """`User: … <end_of_utterance>\\nAssistant:`, texts and pictures one after the other."""
    interleaved: list[Any] = []
    for index, message in enumerate(messages):
        shown: list[Any] = ["\n" * (index > 0) + f"{message['role'].capitalize()}:"]
        for part in message["content"]:
            if part["type"] == "image":
                shown.append(part["image"])
            elif isinstance(shown[-1], str):
                shown[-1] += f" {part['text']}"
            else:
                shown.append(part["text"])
        interleaved += _closed(shown)
    texts = _joined([*interleaved, "\nAssistant:"])
    return processor(text=[texts], add_end_of_utterance_token=False, return_tensors="pt")


def _closed(shown: list[Any]) -> list[Any]:
    last = shown[-1]
    return [*shown[:-1], last + "<end_of_utterance>"] if isinstance(last, str) else [*shown, "<end_of_utterance>"]


def _joined(parts: Sequence[Any]) -> list[Any]:
    """Texts that follow each other as one: the processor strips the spaces around each."""
    joined: list[Any] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _git(processor: Any, messages: Messages) -> Inputs:
    picture, text = _picture_and_text(messages)
    ids = [processor.tokenizer.cls_token_id, *processor.tokenizer(text, add_special_tokens=False)["input_ids"]]
    pixels = {} if picture is None else dict(processor(images=picture, return_tensors="pt"))
    return {**pixels, "input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


def _decoder_goes_on(processor: Any, messages: Messages) -> Inputs:
    picture, text = _picture_and_text(messages)
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return {**processor(images=picture, return_tensors="pt"), "decoder_input_ids": ids}


def _pix2struct(processor: Any, messages: Messages) -> Inputs:
    picture, text = _picture_and_text(messages)
    return processor(images=picture, text=text, add_special_tokens=False, return_tensors="pt")


def _four_frames(processor: Any, messages: Messages) -> Inputs:
    parts = [part for message in messages for part in message["content"]]
    videos = [part["video"] for part in parts if part["type"] == "video"]
    return processor(images=videos, text=_picture_and_text(messages)[1], return_tensors="pt")


def _formula(processor: Any, messages: Messages) -> Inputs:
    return processor(images=_picture_and_text(messages)[0], return_tensors="pt")


PLAIN_CALLS: Mapping[str, Callable[[Any, Messages], Inputs]] = {
    "DonutProcessor": _decoder_goes_on,
    "GitProcessor": _git,
    "IdeficsProcessor": _idefics,
    "InstructBlipVideoProcessor": _four_frames,
    "PPFormulaNetProcessor": _formula,
    "Pix2StructProcessor": _pix2struct,
}
