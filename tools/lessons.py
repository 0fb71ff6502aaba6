"""A curriculum: the pictures get harder when the model masters the present ones.

Three digits anywhere from the start did not learn at all in 600 steps; one centred digit takes 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pictures

MIN_STEPS = 25  # the running mean of exact answers needs these to forget the lesson before


@dataclass(frozen=True)
class Lesson:
    """One stage; the next one starts when the share `exact` of recent answers is right."""

    max_digits: int
    jitter: int
    exact: float = 2.0  # never: the last lesson
    one_size: bool = False

    def layout(self) -> pictures.Layout:
        return pictures.Layout(self.max_digits, self.jitter)


BASE = (
    Lesson(1, 0, 0.90, one_size=True),
    Lesson(1, 3, 0.90),
    Lesson(2, 3, 0.85),
    Lesson(3, 3, 0.85),
    Lesson(3, 6, 0.85),
    Lesson(3, 8),
)
EASED = (Lesson(1, 2, 0.85), Lesson(2, 5, 0.75), Lesson(3, 8))
FULL = (Lesson(3, 8),)


class Climb:
    """Keeps the place in a list of lessons."""

    def __init__(self, lessons: Sequence[Lesson], first: int = 0) -> None:
        self.lessons, self.index, self.first_step = lessons, first, 0

    def __call__(self, step: int, exact: float) -> Lesson:
        """The lesson of this step. `exact`: running share of right answers, in [0, 1]."""
        if exact >= self.lessons[self.index].exact and step - self.first_step >= MIN_STEPS:
            self.index, self.first_step = self.index + 1, step
            print(f"{self.lessons[self.index]} from step {step}", flush=True)
        return self.lessons[self.index]
