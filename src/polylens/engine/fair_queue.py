"""Waiting sequences, in an order by which no adapter can starve the others.

Each adapter (and the base model) has a line of its own; admissions go round the lines. So whoever sends a
thousand requests for one adapter makes these wait for each other, not the others for them. Where there are very many
lines, a round is long: then every second admission goes to the sequence that has waited longest, once that is longer
than the age limit.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polylens.engine.sequence import Sequence

AGE_LIMIT_S = 10.0
"""Waiting longer than this counts as old: several times what a busy server's requests usually wait."""


class FairQueue:
    """Lines of waiting sequences, one an adapter name, each in order of arrival.

    Use: go through `candidates` to the first sequence that can be admitted, then `take` it.
    """

    def __init__(self, age_limit_s: float = AGE_LIMIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._age_limit_s = age_limit_s
        self._clock = clock
        self._lines: OrderedDict[str | None, deque[tuple[float, Sequence]]] = OrderedDict()
        """By adapter name (None: base), the line whose turn it is first. No line is empty."""
        self._last_was_old = False

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences, line by line."""
        return (seq for line in self._lines.values() for _, seq in line)

    def add(self, seq: Sequence) -> None:
        """Put a sequence at the end of its adapter's line."""
        self._lines.setdefault(_key(seq), deque()).append((self._clock(), seq))

    def candidates(self) -> list[Sequence]:
        """The first of each line, in the order in which they should be admitted."""
        heads = [line[0] for line in self._lines.values()]
        if heads and not self._last_was_old:
            oldest = min(heads, key=lambda head: head[0])
            if self._is_old(oldest[0]):
                heads.remove(oldest)
                heads.insert(0, oldest)
        return [seq for _, seq in heads]

    def take(self, seq: Sequence) -> None:
        """Remove the first of a line, which is admitted: its line goes to the end of the round."""
        key = _key(seq)
        line = self._lines[key]
        since, first = line.popleft()
        assert first is seq, "only the first of a line is a candidate"
        # An old one that was served out of turn leaves its line where it was in the round.
        self._last_was_old = not self._last_was_old and self._is_old(since) and next(iter(self._lines)) != key
        if not line:
            del self._lines[key]
        elif not self._last_was_old:
            self._lines.move_to_end(key)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from wherever it waits; ValueError if it does not."""
        line = self._lines.get(_key(seq), deque())
        for index, (_, waiting) in enumerate(line):
            if waiting is seq:
                del line[index]
                break
        else:
            raise ValueError(f"{seq.request_id} does not wait")
        if not line:
            del self._lines[_key(seq)]

    def _is_old(self, since: float) -> bool:
        return self._clock() - since > self._age_limit_s


def _key(seq: Sequence) -> str | None:
    return None if seq.adapter is None else seq.adapter.name
