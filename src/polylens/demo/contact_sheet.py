"""One picture of the demo's result: some held-out pictures of each domain with every adapter's answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from polylens.demo.data import DOMAINS, score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polylens.demo.run import DemoResult, Question

PICTURES_PER_DOMAIN = 8

# Pixels.
CELL_WIDTH, PICTURE_HEIGHT, LINE_HEIGHT, MARGIN, NAME_WIDTH = 128, 124, 18, 12, 190
FONT_SIZE = 13

PAPER, INK, FAINT = (255, 255, 255), (30, 30, 30), (140, 140, 140)
RIGHT, WRONG = (10, 130, 50), (200, 30, 30)


def draw(result: DemoResult) -> Image.Image:
    """A block a domain: a row of pictures, under each the answers, right ones green, wrong ones red."""
    adapters = list(result.accuracy)
    columns = min(PICTURES_PER_DOMAIN, max(q.position for q in result.questions) + 1)
    block_height = PICTURE_HEIGHT + LINE_HEIGHT * (len(adapters) + 1) + MARGIN
    sheet = Image.new("RGB", (NAME_WIDTH + columns * CELL_WIDTH + MARGIN, block_height * len(DOMAINS) + MARGIN), PAPER)
    by_place = {
        (q.domain, q.position, q.adapter): (q, answer)
        for q, answer in zip(result.questions, result.answers, strict=True)
    }
    for row, domain in enumerate(DOMAINS):
        block = _Block(sheet, top=MARGIN + row * block_height, adapters=adapters)
        block.names(domain)
        for column in range(columns):
            block.column(column, [by_place[domain, column, adapter] for adapter in adapters])
    return sheet


class _Block:
    """Draws one domain's part of the sheet."""

    def __init__(self, sheet: Image.Image, top: int, adapters: Sequence[str]) -> None:
        self.sheet, self.top, self.adapters = sheet, top, adapters
        self.pen = ImageDraw.Draw(sheet)
        self.font = ImageFont.load_default(size=FONT_SIZE)

    def names(self, domain: str) -> None:
        self._write(MARGIN, self.top, domain, INK)
        for line, adapter in enumerate(self.adapters):
            self._write(MARGIN, self._line_top(line), adapter, FAINT)

    def column(self, column: int, answers: Sequence[tuple[Question, str]]) -> None:
        left = NAME_WIDTH + column * CELL_WIDTH
        self.sheet.paste(answers[0][0].picture, (left, self.top))
        for line, (question, answer) in enumerate(answers):
            right = score(answer, question.label, question.adapter)
            self._write(left, self._line_top(line), answer, RIGHT if right else WRONG)

    def _line_top(self, line: int) -> int:
        return self.top + PICTURE_HEIGHT + line * LINE_HEIGHT

    def _write(self, left: int, top: int, text: str, colour: tuple[int, int, int]) -> None:
        self.pen.text((left, top), text, font=self.font, fill=colour)
