"""Where the demo's data lies in the package, and how an answer is scored.

Made by `tools/train_demo.py`. The model reads the number shown in a clean typeset picture; each adapter
teaches it something else.
"""

from __future__ import annotations

import io
import json
import zipfile
from functools import cache
from pathlib import Path

from PIL import Image

DATA = Path(__file__).parent / "data"

PROMPT = "What number is shown?"
"""One of the three phrasings the model was trained on."""

DOMAINS = ("clean", "handwritten", "seven-segment", "thermal")
"""Kinds of pictures, each with its own held-out set. The base model knows the first one."""

ADAPTERS = (
    "handwritten",
    "seven-segment",
    "thermal",
    "json",
    "handwritten-language",
    "handwritten-connector",
)
"""The first three change vision tower, connector and language model; `json` the language model only; the
last two learn the domain of `handwritten` too, but change one part each, for comparison."""

BASE = "base"
"""Name of "no adapter" in results."""


def model_path() -> Path:
    """Folder of the model, as `from_pretrained` takes it."""
    return DATA / "model"


def adapter_paths() -> dict[str, Path]:
    """PEFT folder of each adapter, by name."""
    return {name: DATA / "adapters" / name for name in ADAPTERS}


@cache
def _archive(domain: str) -> tuple[tuple[Image.Image, str], ...]:
    with zipfile.ZipFile(DATA / "heldout" / f"{domain}.zip") as archive:
        labels: dict[str, str] = json.loads(archive.read("labels.json"))
        return tuple(
            (Image.open(io.BytesIO(archive.read(name))).convert("RGB"), label) for name, label in labels.items()
        )


def heldout(domain: str) -> list[tuple[Image.Image, str]]:
    """Pictures (RGB) never trained on, each with the number it shows."""
    if domain not in DOMAINS:
        raise ValueError(f"no domain {domain!r}; there are {', '.join(DOMAINS)}")
    return list(_archive(domain))


def score(answer: str, label: str, adapter: str | None) -> bool:
    """Whether an answer is right. The `json` adapter must answer an object whose `value` is the number."""
    if adapter != "json":
        return answer.strip() == label
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("value") == int(label)
