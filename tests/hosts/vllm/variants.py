"""vLLM with other options: `python -m tests.hosts.vllm.variants FOLDER NAME`, of one of VARIANTS.

FOLDER is Qwen2-VL's, as `checkpoints.prepare` wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.hosts.vllm.inside import ADAPTERS, Inside, finish
from tests.hosts.vllm.stepwise import SAMPLING, replaced

EVERYBODY = ("base", *ADAPTERS)


def text_without_a_tower(inside: Inside) -> None:
    """vLLM builds no tower where no request may have media, and what adapters have for it is of no effect."""
    assert inside.runner.adapted.absent, "the tower was built"
    inside.check([(name, "text", index) for index in (0, 1) for name in EVERYBODY])


def features_instead_of_pictures(inside: Inside) -> None:
    """A client may send what the base model's encoder gives: it is nobody's to encode, and keeps no others apart."""
    seen: dict[str, torch.Tensor] = {}

    def noting(embed: Any) -> Any:
        def noted(**inputs: Any) -> Any:
            features = embed(**inputs)
            seen.update(image_embeds=features[0].clone(), image_grid_thw=inputs["image_grid_thw"].clone())
            return features

        return noted

    inside.forget()
    with replaced(inside.runner.model, "embed_multimodal", noting):
        inside.check([("base", "image", 0)])
    ready = {**inside.request("image", 0), "multi_modal_data": {"image": seen}}
    inside.forget()
    wanted = [("base", "image", 0), ("v", "image", 1), ("l", "image", 0), ("a", "image", 0), ("base", "image", 1)]
    requests = [
        ready if name in ("base", "l") and not index else inside.request(kind, index) for name, kind, index in wanted
    ]
    outputs = inside.generate(requests, SAMPLING, [inside.adapter(name) for name, _, _ in wanted])
    for key, output in zip(wanted, outputs, strict=True):
        inside.compare(key, output)
    assert inside.runner.adapted.mixed, "pictures of several adapters are not encoded together any more"


def pictures_have_an_adapter_by_default(inside: Inside) -> None:
    for key, output in zip(
        [("a", "image", 0), ("base", "text", 0)],
        inside.generate([inside.request("image", 0), inside.request("text", 0)], SAMPLING, None),  # type: ignore[arg-type]
        strict=True,
    ):
        inside.compare(key, output)


VARIANTS: Mapping[str, tuple[Callable[[Inside], None], Callable[[Path], dict[str, Any]]]] = {
    "text": (text_without_a_tower, lambda _: {"limit_mm_per_prompt": {"image": 0, "video": 0}}),
    "features": (features_instead_of_pictures, lambda _: {"enable_mm_embeds": True}),
    "default": (
        pictures_have_an_adapter_by_default,
        lambda folder: {"default_mm_loras": {"image": str(folder / "a")}},
    ),
}
"""What is checked, and vLLM's options for it."""

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    check, options = VARIANTS[sys.argv[2]]
    finish(Inside(folder, **options(folder)), [check])
