"""The demo's adapters: what each one learns, on which parts of the model, trained and saved with PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText, AutoProcessor

import lessons
import pictures
import training
from training import PROMPTS, Encoder, Example

BATCH = 32
RATE = 2e-3
BASE_NAME = "polylens-demo"  # instead of the folder of this machine in adapter_config.json

# The linear layers of each part, as PEFT's full-match patterns.
TOWER = r"model\.visual\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(gate|up|down)_proj)"
CONNECTOR = r"model\.visual\.merger\.mlp\.[02]"
LANGUAGE = r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


@dataclass(frozen=True)
class Recipe:
    domain: str
    parts: tuple[str, ...]
    steps: int
    rank: int
    rounds: int = 1  # a cosine schedule each, from the adapter of the one before; later ones at half the rate
    rate: float = RATE
    as_json: bool = False
    eased: bool = False  # one centred digit first: pictures the base reads nothing in need it

    def lora_config(self) -> LoraConfig:
        return LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank,
            lora_dropout=0.0,
            bias="none",
            target_modules="|".join(f"({part})" for part in self.parts),
        )


EVERYTHING = (TOWER, CONNECTOR, LANGUAGE)

# The three handwritten ones differ in the parts they adapt; the two that adapt one part had stopped improving
# after three rounds, with about half of the training answers right.
RECIPES = {
    "handwritten": Recipe("handwritten", EVERYTHING, steps=900, rounds=6, rank=16),
    "seven-segment": Recipe("seven-segment", EVERYTHING, steps=1000, rounds=2, rank=16, eased=True),
    "thermal": Recipe("thermal", EVERYTHING, steps=600, rounds=2, rank=8, eased=True),
    "json": Recipe("clean", (LANGUAGE,), steps=200, rank=8, as_json=True),
    "handwritten-language": Recipe("handwritten", (LANGUAGE,), steps=900, rounds=3, rank=16),
    "handwritten-connector": Recipe("handwritten", (CONNECTOR,), steps=900, rounds=3, rank=16),
}


def picture_example(
    domain: str,
    rng: np.random.Generator,
    size: pictures.Size,
    layout: pictures.Layout | None = None,
    handwriting: pictures.Handwriting | None = None,
    as_json: bool = False,
) -> Example:
    """A picture of a random number, one of the prompts, and the right answer."""
    layout = layout or pictures.Layout()
    number = pictures.draw_number(rng, layout.max_digits)
    image = pictures.draw(domain, number, size, rng, layout, handwriting)
    answer = training.json_answer(number) if as_json else str(number)
    return Example(PROMPTS[rng.integers(len(PROMPTS))], answer, image)


def train_adapter(name: str, model_folder: Path, folder: Path, first_round: int = 0) -> None:
    """Trains one recipe over the saved base and saves it with PEFT, float16, after every round."""
    for round_index in range(first_round, RECIPES[name].rounds):
        print(f"{name}: round {round_index + 1} of {RECIPES[name].rounds}", flush=True)
        _train_round(name, model_folder, folder, round_index)


def _train_round(name: str, model_folder: Path, folder: Path, round_index: int) -> None:
    recipe = RECIPES[name]
    rng = training.seed_everything(1 + list(RECIPES).index(name) + 100 * round_index)
    base = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32)
    if round_index == 0:
        model = get_peft_model(base, recipe.lora_config())
    else:
        model = PeftModel.from_pretrained(base, folder, is_trainable=True)
    encoder = Encoder(AutoProcessor.from_pretrained(model_folder))
    handwriting = pictures.load_handwriting(held_out=False)
    climb = lessons.Climb(lessons.EASED if recipe.eased and round_index == 0 else lessons.FULL)

    def batch(step: int, exact: float) -> dict[str, torch.Tensor]:
        size, layout = pictures.draw_size(rng), climb(step, exact).layout()
        return encoder(
            [picture_example(recipe.domain, rng, size, layout, handwriting, recipe.as_json) for _ in range(BATCH)]
        )

    training.attend_in_dense_batches()
    rate = recipe.rate if round_index == 0 else recipe.rate / 2
    training.train(model, batch, recipe.steps, rate, weight_decay=0.0, warmup=20)
    save(model, folder)


def save(model: PeftModel, folder: Path) -> None:
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.half().save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
