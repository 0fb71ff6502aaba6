"""Pictures of numbers in the four domains of the demo.

Every domain draws an ink mask first (float32, height x width, 0 = paper, 1 = ink) and then paints it.
So the domains share the layout (up to three digits in a row) and differ in the shape of the digits and
in the colours, which is what the adapters have to learn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

DOMAINS = ("clean", "handwritten", "seven-segment", "thermal")
MAX_DIGITS = 3

# Sides in pixels after the processor's rounding to multiples of 28. All fit one attention window of the
# tower, so pictures of one size can be trained as one dense batch.
SIZES = ((84, 84), (84, 112), (112, 84))
SIZE_WOBBLE = 5  # a picture may be this many pixels off; the processor then rescales it

FONT_FOLDER = Path(__file__).parent / "fonts"
FONT_FILES = ("DejaVuSans.ttf", "DejaVuSansMono.ttf")

Mask = np.ndarray  # (height, width) float32 in [0, 1]
Size = tuple[int, int]  # (height, width)


@dataclass
class Layout:
    """Where the number may stand and how many digits it may have."""

    max_digits: int = MAX_DIGITS
    jitter: int = 8  # largest shift from the centre, in pixels, each way


@dataclass
class Handwriting:
    """Real handwritten digits, 8 x 8, by value. Training and held-out pools share no digit."""

    by_digit: dict[int, list[Mask]] = field(default_factory=dict)
    is_distorted: bool = False  # training: lean and stretch each digit, as 1348 of them are few


def load_handwriting(held_out: bool, seed: int = 0, held_out_share: float = 0.25) -> Handwriting:
    """scikit-learn's `load_digits`, split by sample before any number is composed of them."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    num_held_out = int(len(order) * held_out_share)
    chosen = order[:num_held_out] if held_out else order[num_held_out:]
    pool = Handwriting({value: [] for value in range(10)}, is_distorted=not held_out)
    for index in chosen:
        pool.by_digit[int(digits.target[index])].append((digits.images[index] / 16.0).astype(np.float32))
    return pool


def draw_size(rng: np.random.Generator) -> Size:
    """A picture size that the processor rounds to one of `SIZES`."""
    height, width = SIZES[rng.integers(len(SIZES))]
    wobble = rng.integers(-SIZE_WOBBLE, SIZE_WOBBLE + 1, size=2)
    return height + int(wobble[0]), width + int(wobble[1])


def draw_number(rng: np.random.Generator, max_digits: int = MAX_DIGITS) -> int:
    """A number without leading zeros, its length uniform in 1 to `max_digits`."""
    length = int(rng.integers(1, max_digits + 1))
    lowest = 0 if length == 1 else 10 ** (length - 1)
    return int(rng.integers(lowest, 10**length))


def draw(
    domain: str,
    number: int,
    size: Size,
    rng: np.random.Generator,
    layout: Layout | None = None,
    handwriting: Handwriting | None = None,
) -> Image.Image:
    """One picture of `number`. `handwriting` is needed for the domain of that name."""
    layout = layout or Layout()
    text = str(number)
    if domain == "handwritten":
        assert handwriting is not None
        return _paint_paper(_place(_handwritten_row(text, handwriting, rng), size, layout, rng), rng)
    if domain == "seven-segment":
        lit, unlit = _segment_row(text, rng)
        offset = _offset(lit.shape, size, layout, rng)
        return _paint_display(_paste(lit, size, offset), _paste(unlit, size, offset), rng)
    mask = _place(_typeset_row(text, rng), size, layout, rng)
    return _paint_thermal(mask, rng) if domain == "thermal" else _paint_clean(mask, rng)


# --- rows of digits ---------------------------------------------------------------------------------


@cache
def _font(name: str, pixels: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(FONT_FOLDER / name), pixels)


def _typeset_row(text: str, rng: np.random.Generator) -> Mask:
    font = _font(FONT_FILES[rng.integers(len(FONT_FILES))], int(rng.integers(34, 41)))
    left, top, right, bottom = font.getbbox(text)
    picture = Image.new("L", (int(right - left), int(bottom - top)))
    ImageDraw.Draw(picture).text((-left, -top), text, font=font, fill=255)
    return np.asarray(picture, dtype=np.float32) / 255


def _handwritten_row(text: str, pool: Handwriting, rng: np.random.Generator) -> Mask:
    height, width = int(rng.integers(28, 35)), int(rng.integers(21, 26))
    row = np.zeros((height + 8, width * len(text)), dtype=np.float32)
    for position, character in enumerate(text):
        samples = pool.by_digit[int(character)]
        sample = samples[rng.integers(len(samples))]
        picture = Image.fromarray((sample * 255).astype(np.uint8))
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        if pool.is_distorted:
            picture = _distort(picture, rng)
        picture = picture.rotate(float(rng.uniform(-8, 8)), Image.Resampling.BILINEAR)
        top = int(rng.integers(0, 9))
        row[top : top + height, position * width : (position + 1) * width] = np.asarray(picture) / 255
    # Upscaled pencil is soft; a steeper curve gives strokes of the sharpness of a scan.
    return np.clip((row - 0.25) * 1.8, 0, 1)


def _distort(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Another hand's version of a digit: leaning, narrower or wider, its bars shorter or longer."""
    centre = np.array(picture.size) / 2
    matrix = np.array(
        [[rng.uniform(0.88, 1.12), rng.uniform(-0.2, 0.2)], [rng.uniform(-0.1, 0.1), rng.uniform(0.88, 1.12)]]
    )
    shift = centre - matrix @ centre + rng.uniform(-1, 1, size=2)
    coefficients = (*matrix[0], shift[0], *matrix[1], shift[1])
    return picture.transform(picture.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)


# Segments a to g, clockwise from the top, the middle one last; each value lists those that are lit.
_LIT = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")


def _segment_bars(width: int, height: int, thick: int) -> dict[str, tuple[int, int, int, int]]:
    """Boxes (left, top, right, bottom) of the seven bars in a cell; they meet in its corners."""
    middle, right, bottom = height // 2, width - 1, height - 1
    return {
        "a": (1, 0, right - 1, thick - 1),
        "b": (right - thick + 1, 1, right, middle - 1),
        "c": (right - thick + 1, middle + 1, right, bottom - 1),
        "d": (1, bottom - thick + 1, right - 1, bottom),
        "e": (0, middle + 1, thick - 1, bottom - 1),
        "f": (0, 1, thick - 1, middle - 1),
        "g": (2, middle - thick // 2, right - 2, middle - thick // 2 + thick - 1),
    }


def _segment_row(text: str, rng: np.random.Generator) -> tuple[Mask, Mask]:
    """Masks of the lit and of the unlit bars, slanted alike."""
    width, height, gap = int(rng.integers(17, 21)), int(rng.integers(28, 35)), 5
    bars = _segment_bars(width, height, thick=int(rng.integers(3, 6)))
    slant = float(rng.uniform(0, 0.15))
    lean = int(slant * height) + 1
    shape = ((width + gap) * len(text) - gap + lean, height)
    masks = []
    for want_lit in (True, False):
        picture = Image.new("L", shape)
        pen = ImageDraw.Draw(picture)
        for position, character in enumerate(text):
            x = position * (width + gap)
            for name, (left, top, right, bottom) in bars.items():
                if (name in _LIT[int(character)]) == want_lit:
                    pen.rectangle((x + left, top, x + right, bottom), fill=255)
        sheared = picture.transform(
            shape, Image.Transform.AFFINE, (1, slant, -slant * height, 0, 1, 0), Image.Resampling.BILINEAR
        )
        masks.append(np.asarray(sheared, dtype=np.float32) / 255)
    return masks[0], masks[1]


# --- placing a row in a picture ---------------------------------------------------------------------


def _offset(row: Size, size: Size, layout: Layout, rng: np.random.Generator) -> Size:
    shifts = rng.integers(-layout.jitter, layout.jitter + 1, size=2)
    room = [outer - inner for outer, inner in zip(size, row, strict=True)]
    top, left = (int(np.clip(r // 2 + s, 0, max(r, 0))) for r, s in zip(room, shifts, strict=True))
    return top, left


def _paste(row: Mask, size: Size, offset: Size) -> Mask:
    page = np.zeros(size, dtype=np.float32)
    part = page[offset[0] : offset[0] + row.shape[0], offset[1] : offset[1] + row.shape[1]]
    part[...] = row[: part.shape[0], : part.shape[1]]
    return page


def _place(row: Mask, size: Size, layout: Layout, rng: np.random.Generator) -> Mask:
    return _paste(row, size, _offset(row.shape, size, layout, rng))


# --- painting ---------------------------------------------------------------------------------------


def _blend(back: np.ndarray, front: np.ndarray, mask: Mask) -> np.ndarray:
    return back + (front - back) * mask[..., None]


def _to_picture(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _paint_clean(mask: Mask, rng: np.random.Generator) -> Image.Image:
    paper = np.full(3, rng.integers(225, 256), dtype=np.float32)
    ink = np.full(3, rng.integers(0, 61), dtype=np.float32)
    return _to_picture(_blend(paper, ink, mask))


def _paint_paper(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """Blue or black ink on yellowish, ruled paper."""
    paper = np.array([rng.integers(225, 250), rng.integers(215, 240), rng.integers(180, 215)], np.float32)
    ink = np.array([rng.integers(10, 60), rng.integers(10, 70), rng.integers(60, 150)], np.float32)
    page = np.broadcast_to(paper, (*mask.shape, 3)).copy()
    page[int(rng.integers(0, 14)) :: 14] -= 25
    return _to_picture(_blend(page, ink, mask))


_LAMPS = np.array([[255, 50, 40], [70, 255, 90], [255, 180, 40], [90, 200, 255]], dtype=np.float32)


def _paint_display(lit: Mask, unlit: Mask, rng: np.random.Generator) -> Image.Image:
    """A bright lamp on a dark display; bars that are off still shine faintly."""
    back = rng.integers(5, 35, size=3).astype(np.float32)
    lamp = _LAMPS[rng.integers(len(_LAMPS))]
    return _to_picture(_blend(_blend(back, lamp * 0.15, unlit), lamp, lit))


def _iron_palette() -> np.ndarray:
    """(256, 3) uint8: the usual colours of thermal cameras, black over blue and red to white."""
    stops = np.array([0, 50, 110, 160, 210, 255])
    colours = np.array([[0, 0, 10], [40, 0, 130], [170, 10, 140], [235, 90, 30], [255, 190, 20], [255, 255, 230]])
    return np.stack([np.interp(np.arange(256), stops, colours[:, c]) for c in range(3)], 1).astype(np.uint8)


def _paint_thermal(mask: Mask, rng: np.random.Generator) -> Image.Image:
    """A blurred number a little warmer or colder than an uneven, noisy background, as a palette picture."""
    soft = Image.fromarray((mask * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1.0))
    height, width = mask.shape
    rows, columns = np.mgrid[0:height, 0:width]
    slope = rng.uniform(-0.15, 0.15, size=2)
    field = 0.5 + slope[0] * (rows / height - 0.5) + slope[1] * (columns / width - 0.5)
    contrast = rng.choice((-1, 1)) * rng.uniform(0.22, 0.35)
    field = field + contrast * (np.asarray(soft) / 255) + rng.normal(0, 0.06, mask.shape)
    picture = Image.fromarray(np.clip(field * 255, 0, 255).astype(np.uint8))
    picture.putpalette(_iron_palette().tobytes())
    return picture
