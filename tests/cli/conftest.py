"""A tiny checkpoint, two adapters and a picture for the commands to work on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.families.adapters import make_adapter
from tests.families.build import build_checkpoint
from tests.families.media import picture

FAMILY = "qwen2_5_vl"


@dataclass(frozen=True)
class Shop:
    """Paths of what a user has."""

    folder: Path
    model: Path
    eyes: Path
    words: Path
    image: Path

    @property
    def adapters(self) -> list[str]:
        return ["--adapter", f"eyes={self.eyes}", "--adapter", str(self.words)]


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("shop")
    model = build_checkpoint(FAMILY, folder / "model")
    image = folder / "picture.png"
    picture(64, 48, seed=1).save(image)
    return Shop(
        folder=folder,
        model=model,
        eyes=make_adapter(model, folder / "eyes", targets="all", seed=1),
        words=make_adapter(model, folder / "words", targets="language", seed=2),
        image=image,
    )
