"""Checkpoints and adapters for the runs inside vLLM, and the answers that they must give: made in the main venv.

Nothing of vLLM takes part here, and nothing of polylens: the references are transformers' `generate` over models
into which PEFT merged one adapter.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.families.adapters import make_adapter
from tests.families.build import ALL_FAMILIES, generation_config, randomise
from tests.families.reference import merged_reference, reference_answer
from tests.families.special import make_special
from tests.hosts.vllm.media import picture, video

PUBLISHED_TOWER = ("llava", "gemma3", "llava_onevision")

ONE_PICTURE = ("llava_onevision",)
"""Families of which transformers cuts no picture into tiles if a prompt has several, and vLLM each of them."""

NUM_TOKENS = 8
"""Greedy tokens of every reference."""

HEAD_DIM = 32
"""The least that vLLM's attention on CPUs takes."""

ADAPTERS: Mapping[str, dict[str, Any]] = {
    "a": {"targets": "all", "rank": 4, "seed": 1},
    "v": {"targets": "tower+connector", "rank": 3, "seed": 2},
    "l": {"targets": "language", "rank": 8, "seed": 3, "use_rslora": True},
}
"""All of the model, only tower and connector, only the language model: of different ranks."""


def build(family: str, folder: Path) -> Path:
    """A checkpoint of `family`, wide enough for vLLM."""
    parts = ALL_FAMILIES[family]
    tokenizer = parts.make_tokenizer()
    if family == "gemma3":
        tokenizer.add_tokens(["\n\n", "\n\n\n", "\n\n\n\n"])  # vLLM looks for them around pictures
    narrow = parts.make_model(tokenizer)
    config = narrow.config
    WIDEN.get(family, _widen_text)(config)
    model = type(narrow)(config).eval()
    randomise(model, 0)
    model.generation_config = generation_config(tokenizer, parts.stop_tokens)
    model.to(torch.float32).save_pretrained(folder)
    processor = parts.make_processor(tokenizer)
    if family.startswith("qwen3_vl"):
        _normalise_alike(processor)
    processor.save_pretrained(folder)
    if family in PUBLISHED_TOWER:
        _rename_tower(folder / "model.safetensors")
    return folder


def _normalise_alike(processor: Any) -> None:
    """Pictures as videos, as published: vLLM normalises both with the values for pictures."""
    for name in ("image_mean", "image_std"):
        setattr(processor.image_processor, name, getattr(processor.video_processor, name))


def _rename_tower(file: Path) -> None:
    """Names of published checkpoints, which vLLM knows; transformers 5.24 writes shorter ones, and reads both."""
    published = "vision_tower.vision_model."
    tensors = {re.sub(r"^vision_tower\.", published, name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _transpose_experts(file: Path) -> None:
    """Experts as published, (experts, in, out), which is how vLLM reads them; transformers 5.24 writes (…, out, in).

    Done when transformers is through with the file.
    """
    experts = ("experts.gate_up_proj", "experts.down_proj")
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(experts) else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def _widen_text(config: Any) -> None:
    """Two heads of HEAD_DIM over one: the width stays apart from the heads' where the family has a head size."""
    text = config.get_text_config()
    text.num_attention_heads, text.num_key_value_heads = 2, 1
    if hasattr(text, "head_dim") and text.model_type not in ("qwen2_vl_text", "qwen2_5_vl_text"):
        text.head_dim = HEAD_DIM
    text.hidden_size = 2 * HEAD_DIM


def _widen_qwen2_vl(config: Any) -> None:
    _widen_text(config)
    config.get_text_config().rope_parameters["mrope_section"] = [4, 6, 6]
    config.vision_config.hidden_size = config.get_text_config().hidden_size


def _widen_qwen(config: Any) -> None:
    _widen_text(config)
    config.get_text_config().rope_parameters["mrope_section"] = [4, 6, 6]
    config.vision_config.out_hidden_size = config.get_text_config().hidden_size


def _widen_qwen_moe(config: Any) -> None:
    _widen_qwen(config)
    config.get_text_config().norm_topk_prob = True  # as published: vLLM reads it, transformers 5.24 does so always


WIDEN: Mapping[str, Callable[[Any], None]] = {
    "qwen2_vl": _widen_qwen2_vl,
    "qwen2_5_vl": _widen_qwen,
    "qwen3_vl": _widen_qwen,
    "qwen3_vl_moe": _widen_qwen_moe,
}


SPECIAL = (
    "dora",
    "dora with biases",
    "lora_bias",
    "bias all",
    "connector",
    "head",
    "head saved",
    "tokens",
    "embedding",
    "embedding saved",
    "norms",
    "convolution",
    "convolution dora",
    "tower saved",
)
"""Adapters of more than plain factors (`tests.families.special`)."""

OF_FAMILY: Mapping[str, tuple[str, ...]] = {
    "qwen3_vl": ("head norms",),
    "gemma3": ("head norms",),
    "qwen3_vl_moe": ("head norms", "router", "experts", "experts saved"),
}
"""Kinds that only some families have layers for."""

WITHOUT: Mapping[str, tuple[str, ...]] = {"idefics3": ("tower saved",)}
"""Kinds that, as they are made, find no layers in a family."""

TIED_HEAD = ("gemma3",)
"""Families whose head is the embedding, so that PEFT cannot merge a change of one of them alone."""

NOT_GIVEN: Mapping[str, tuple[str, ...]] = {"gemma3": ("token_type_ids",)}
"""What vLLM's CPU build leaves out, and the reference therefore is not given either.

Gemma 3's pictures see themselves whole; vLLM's attention on CPUs has no such mask and lets them see backwards only, as
transformers does without this input.
"""
LEAST_EFFECT = 0.05
"""Of what is not given, on the base model's log-probabilities: else it would not matter which way vLLM takes."""

TEXTS = ("what is in the picture?", "name the colour", "count them")


def messages(kind: str, index: int) -> list[dict[str, Any]]:
    media: list[dict[str, Any]] = []
    if kind in ("image", "images"):
        media = [{"type": "image", "image": picture(index + more)} for more in range(1 + (kind == "images"))]
    elif kind == "video":
        media = [{"type": "video", "video": video(index), "fps": 2.0}]
    return [{"role": "user", "content": [*media, {"type": "text", "text": TEXTS[index % 3]}]}]


def prepare(family: str, folder: Path, *, short: bool = False) -> None:
    """Write checkpoint, adapters and references of one family into `folder`. short: without SPECIAL adapters."""
    torch.set_num_threads(1)
    model = build(family, folder / "model")
    for name, described in ADAPTERS.items():
        make_adapter(model, folder / name, **described)
    kinds = ["image", "text"]
    kinds += [] if family in ONE_PICTURE else ["images"]
    kinds += ["video"] if ALL_FAMILIES[family].takes_videos else []
    without = NOT_GIVEN.get(family, ())
    answers = {}
    for adapter, kind, index in itertools.product((None, *ADAPTERS), kinds, range(2)):
        path = None if adapter is None else folder / adapter
        given = merged_reference(model, path, messages(kind, index), NUM_TOKENS, ignore_eos=True, without=without)
        answers[adapter or "base", kind, index] = _answer(*given)
    for kind in () if short else _kinds(family):
        path = make_special(model, folder / kind.replace(" ", "_"), kind)
        reference = reference_answer if family in TIED_HEAD else partial(merged_reference, ignore_eos=True)
        given = reference(model, path, messages("image", 0), NUM_TOKENS, without=without)
        answers[path.name, "image", 0] = _answer(*given)
    if without:
        _check_that_it_matters(model, answers["base", "image", 0])
    if family == "qwen3_vl_moe":
        _transpose_experts(model / "model.safetensors")
    torch.save({"kinds": kinds, "answers": answers, "prompts": _prompts(model, kinds)}, folder / "answers.pt")


def _kinds(family: str) -> list[str]:
    return [kind for kind in (*SPECIAL, *OF_FAMILY.get(family, ())) if kind not in WITHOUT.get(family, ())]


def _answer(token_ids: list[int], logits: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    return token_ids, torch.log_softmax(logits, -1)


def _check_that_it_matters(model: Path, answer: tuple[list[int], torch.Tensor]) -> None:
    """The first token's log-probabilities are others with all of the processor's inputs."""
    _, logits = merged_reference(model, None, messages("image", 0), 1, ignore_eos=True)
    effect = (torch.log_softmax(logits, -1)[0] - answer[1][0]).abs().max().item()
    assert effect >= LEAST_EFFECT, f"the input that vLLM leaves out changes the answer by {effect:.1e} only"


def _prompts(model: Path, kinds: list[str]) -> dict[tuple[str, int], str]:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    return {
        (kind, index): processor.apply_chat_template(messages(kind, index), add_generation_prompt=True, tokenize=False)
        for kind in kinds
        for index in range(2)
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="+")
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.families:
        target = arguments.folder / name
        target.mkdir(parents=True, exist_ok=True)
        prepare(name, target, short=arguments.short)
        print(name, "prepared")
