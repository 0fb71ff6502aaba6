"""What an answer must be: one adapter alone, merged into the weights by PEFT, run by transformers' `generate`.

Nothing of polylens takes part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling

from tests.families.glm import GLM
from tests.families.plain_calls import PLAIN_CALLS
from tests.families.tiled_templates import plain_inputs

Messages = Sequence[Mapping[str, Any]]
FramesAsPictures = Callable[[Any], list[Any]]
"""Video (frames, height, width, 3) -> the pictures shown instead, for families without videos."""

MAX_CACHED_MODELS = 64
"""Tiny models (0.4 MB): keep every (checkpoint, adapter, dtype) a test session asks for."""


def merged_reference(
    checkpoint: str | Path,
    adapter: str | Path | None,
    messages: Messages,
    max_new_tokens: int,
    *,
    ignore_eos: bool = False,
    dtype: torch.dtype = torch.float32,
    frames_as_pictures: FramesAsPictures | None = None,
    without: Collection[str] = (),
) -> tuple[list[int], torch.Tensor]:
    """Greedy token ids and the raw logits (tokens, vocab) float32 each was chosen from.

    without: inputs of the processor's that the model is not given.
    """
    model, processor = merged_model(checkpoint, adapter, dtype), processor_of(checkpoint)
    inputs = _cast(reference_inputs(processor, messages, frames_as_pictures), dtype)
    inputs = {name: value for name, value in inputs.items() if name not in without}
    token_ids, logits = generated(model, inputs, max_new_tokens, ignore_eos=ignore_eos)
    assert len(token_ids) == max_new_tokens or not ignore_eos
    return token_ids, logits


def reference_answer(
    checkpoint: str | Path,
    adapter: str | Path,
    messages: Messages,
    max_new_tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    without: Collection[str] = (),
) -> tuple[list[int], torch.Tensor]:
    """As `merged_reference`, by PEFT's model with the adapter beside the weights: where PEFT cannot merge exactly.

    It cannot where the head is tied to the embedding (the merge changes both), nor new biases of layers that
    have none.
    """
    model, processor = unmerged_model(checkpoint, adapter, dtype), processor_of(checkpoint)
    inputs = _cast(reference_inputs(processor, messages), dtype)
    inputs = {name: value for name, value in inputs.items() if name not in without}
    return generated(model, inputs, max_new_tokens, ignore_eos=True)


def generated(
    model: Any, inputs: Mapping[str, torch.Tensor], max_new_tokens: int, *, ignore_eos: bool
) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy `generate`: the new token ids, and the raw logits (tokens, vocab) float32 of each."""
    if model.config.model_type == "llama4":
        model, inputs = _llama4_parts(model, inputs)
    if model.config.model_type in GLM and {"pixel_values", "pixel_values_videos"} <= inputs.keys():
        inputs = _glm_features(model, inputs)
    with torch.inference_mode(), _stop_tokens(model, ignored=ignore_eos), _pictures_alone(model):
        out = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    token_ids = out.sequences[0, -len(out.logits) :].tolist()
    return token_ids, torch.stack([step[0].float() for step in out.logits])


@torch.inference_mode()
def _llama4_parts(model: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The language model and its embeddings: the whole model's forward fails once it has them (transformers 5.24)."""
    ids = inputs["input_ids"]
    embeddings = model.get_input_embeddings()(ids)
    if "pixel_values" in inputs:
        states = model.vision_model(inputs["pixel_values"]).last_hidden_state
        features = model.multi_modal_projector(states.flatten(0, 1))
        embeddings = embeddings.masked_scatter((ids == model.config.image_token_id)[..., None], features)
    return model.language_model, {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}


@torch.inference_mode()
def _glm_features(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Pictures and videos in one prompt have one token, and the model's forward gives all its places to either: the
    features by the kinds that the processor tells, in the order of their places."""
    kinds_t = inputs["mm_token_type_ids"][0]
    pictures = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    videos = model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"]).pooler_output
    rows_td = torch.empty(len(kinds_t), pictures[0].shape[-1], dtype=pictures[0].dtype)
    rows_td[kinds_t == 1], rows_td[kinds_t == 2] = torch.cat(list(pictures)), torch.cat(list(videos))
    features = BaseModelOutputWithPooling(pooler_output=[rows_td[kinds_t > 0]])
    others = {name: value for name, value in inputs.items() if not name.startswith("pixel_values")}
    return {**others, "mm_encoder_outputs": {"image": features}}


@contextmanager
def _pictures_alone(model: Any) -> Iterator[None]:
    """Let Emu 3 see each picture as if it came alone: in a batch its tokens depend on the padding to the largest."""
    tokenizer = model.model.vqmodel if model.config.model_type == "emu3" else None
    if tokenizer is None:
        yield
        return
    encode = tokenizer.encode

    def encode_each(pixel_values: torch.Tensor, image_sizes: torch.Tensor, **more: Any) -> Any:
        cut = [pixels[None, :, :h, :w] for pixels, (h, w) in zip(pixel_values, image_sizes.tolist(), strict=True)]
        alone = [encode(one, size[None], **more) for one, size in zip(cut, image_sizes, strict=True)]
        alone[0].image_tokens = [tokens for output in alone for tokens in output.image_tokens]
        return alone[0]

    tokenizer.encode = encode_each
    try:
        yield
    finally:
        tokenizer.encode = encode


@contextmanager
def _stop_tokens(model: PreTrainedModel, *, ignored: bool) -> Iterator[None]:
    """Let `generate` go on after the model's stop tokens. It fills a None given as an argument from this config."""
    parts = (getattr(part, "generation_config", None) for part in model.modules())  # BLIP-2's text model has one too
    configs = [config for config in parts if config is not None]
    own = [config.eos_token_id for config in configs]
    for config in configs if ignored else ():
        config.eos_token_id = None
    try:
        yield
    finally:
        for config, eos_token_id in zip(configs, own, strict=True):
            config.eos_token_id = eos_token_id


def reference_inputs(
    processor: ProcessorMixin, messages: Messages, frames_as_pictures: FramesAsPictures | None = None
) -> dict[str, torch.Tensor]:
    """The processor's own tokens and pixels for the messages, with the turn of the answer opened.

    Videos are arrays and used frame by frame: the processor is told not to sample, and the frame rate if known.
    """
    if frames_as_pictures is not None:
        messages = _with_frames(messages, frames_as_pictures)
    if not processor.chat_template and type(processor).__name__ in PLAIN_CALLS:
        return _tensors(PLAIN_CALLS[type(processor).__name__](processor, _as_parts(messages)))
    if not processor.chat_template:
        return _tensors(processor(**plain_inputs(processor, _as_parts(messages)), return_tensors="pt"))
    videos = [part for message in messages for part in _parts(message["content"]) if part["type"] == "video"]
    inputs = processor.apply_chat_template(
        _as_parts(messages),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={**_video_options(videos), **_demanded(processor)},
    )
    return {**_tensors(inputs), **_lost_pixels(processor, messages, inputs)}


def _lost_pixels(processor: ProcessorMixin, messages: Messages, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The pixels of all media, where the processor names pictures and videos alike and so returns one kind's only."""
    media = [part for message in messages for part in _parts(message["content"]) if part["type"] != "text"]
    if len({part["type"] for part in media}) < 2 or "pixel_values_videos" in inputs:
        return {}
    alone = [reference_inputs(processor, [{"role": "user", "content": [part]}]) for part in media]
    names = [name for name in alone[0] if name.startswith("pixel_")]
    if all(inputs[name].numel() == sum(one[name].numel() for one in alone) for name in names):
        return {}
    return {name: torch.cat([one[name] for one in alone], dim=1) for name in names}


LISTS = ("num_local_patches", "patches_grid")
"""What some models take as lists (Unlimited-OCR)."""


def _tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) or name in LISTS}


def _cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def floats(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point()

    return {name: value.to(dtype) if floats(value) else value for name, value in inputs.items()}


def _video_options(videos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not videos:
        return {}
    return {"do_sample_frames": False, "video_metadata": [_metadata(len(v["video"]), v.get("fps")) for v in videos]}


def _demanded(processor: ProcessorMixin) -> dict[str, bool]:
    """What a call must ask for, as the processor or its model fails without it."""
    name = type(processor).__name__
    if name == "Cosmos3EdgeProcessor":
        return {"return_mm_token_type_ids": True, "return_metadata": True}
    return {"return_metadata": True} if name.startswith("Muse") else {}


def _metadata(num_frames: int, fps: float | None) -> dict[str, Any]:
    duration = num_frames / fps if fps else None
    return {
        "total_num_frames": num_frames,
        "fps": fps,
        "duration": duration,
        "frames_indices": list(range(num_frames)),
    }


def evenly_sampled(num_frames: int) -> FramesAsPictures:
    """Frames shown to a family without videos: evenly spaced, the first and the last included."""

    def frames(video: np.ndarray) -> list[Image.Image]:
        indices = np.linspace(0, len(video) - 1, min(len(video), num_frames)).round().astype(int)
        return [Image.fromarray(video[index]) for index in indices]

    return frames


@lru_cache(maxsize=MAX_CACHED_MODELS)
def merged_model(checkpoint: str | Path, adapter: str | Path | None, dtype: torch.dtype) -> PreTrainedModel:
    """A model of its own, loaded in `dtype` and merged for this adapter alone."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype)
    if adapter is not None:
        load = _load_by_name if model.config.model_type in RENAMED_WRONGLY else PeftModel.from_pretrained
        model = load(model, str(adapter)).merge_and_unload()
    return model.eval()


RENAMED_WRONGLY = ("deepseek_ocr2", "inkling2", "inkling2_loop", "mistral_large4", "unlimited_ocr")
"""Families whose adapters PEFT 0.21.2 loads in part, with a warning only: it renames keys that are right."""


def _load_by_name(model: PreTrainedModel, adapter: str) -> Any:
    """PEFT's model with the file's tensors under their own names; all of them are used, and none is missing."""
    adapted = get_peft_model(model, PeftConfig.from_pretrained(adapter))
    tensors = load_file(Path(adapter, "adapter_model.safetensors"))
    named = {re.sub(r"(lora_[AB])\.weight$", r"\1.default.weight", name): value for name, value in tensors.items()}
    report = adapted.load_state_dict(named, strict=False)
    assert not report.unexpected_keys
    assert not [name for name in report.missing_keys if "lora_" in name]
    return adapted


@lru_cache(maxsize=MAX_CACHED_MODELS)
def unmerged_model(checkpoint: str | Path, adapter: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype)
    return PeftModel.from_pretrained(model, str(adapter)).eval()


@cache
def processor_of(checkpoint: str | Path) -> ProcessorMixin:
    return AutoProcessor.from_pretrained(checkpoint)


def _as_parts(messages: Messages) -> list[dict[str, Any]]:
    """Contents as lists of parts: LLaVA's template renders a plain string as nothing."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(content: Any) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _with_frames(messages: Messages, frames_as_pictures: FramesAsPictures) -> list[dict[str, Any]]:
    def shown(content: Any) -> list[Any]:
        return [part for given in _parts(content) for part in _frames(given, frames_as_pictures)]

    return [{**message, "content": shown(message["content"])} for message in messages]


def _frames(part: Mapping[str, Any], frames_as_pictures: FramesAsPictures) -> list[Any]:
    if part["type"] != "video":
        return [part]
    return [{"type": "image", "image": picture} for picture in frames_as_pictures(part["video"])]
