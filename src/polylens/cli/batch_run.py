"""The requests of a batch, run as the server runs those of its clients: prepared by workers while steps go on."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from polylens.cli.batch_file import FileMedia, error_line, result_line
from polylens.core import BASE_NAME
from polylens.engine.thread import EngineThread
from polylens.errors import EngineFailedError, PolylensError
from polylens.server.events import aborting
from polylens.server.intake import Intake
from polylens.server.options import ServerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from polylens.cli.batch_file import BatchLine
    from polylens.cli.batch_journal import Journal
    from polylens.engine.llm import LLM
    from polylens.server.intake import GenerationBody

MAX_TOKENS = 256
"""Where a body names no limit. Short enough that a batch of questions about pictures ends soon."""

DEFAULTS = {"temperature": 0.0}
"""Sampling where a body says nothing: the same answers in every run."""


def answer_lines(
    llm: LLM, model: str, lines: Sequence[BatchLine], folder: Path, journal: Journal, advance: Callable[[], None]
) -> list[str]:
    """The output lines, in the order of the input's; answers go into the journal as they come.

    model: what requests may call the base, beside BASE_NAME. folder: what paths of media are relative to. advance:
    called for each line that is done. Raises EngineFailedError; whatever else is wrong is a line's own error.
    """
    # No queue limit: the lines wait for their turn before they are submitted.
    thread = EngineThread(llm.engine, max_queue=sys.maxsize, adapters=bool(llm.adapters)).start()
    options = ServerOptions((BASE_NAME, model), sampling=DEFAULTS)
    intake = Intake(thread, options, FileMedia(folder), max_tokens=MAX_TOKENS)
    run = _Run(thread, intake, journal, advance, window=2 * llm.engine.max_running)
    try:
        return asyncio.run(run.all(lines))
    finally:
        thread.stop()


class _Run:
    """window: lines in the engine at a time; as many again as run together are being prepared, and no more pictures
    than theirs are in memory."""

    def __init__(
        self, thread: EngineThread, intake: Intake, journal: Journal, advance: Callable[[], None], window: int
    ) -> None:
        self._thread = thread
        self._intake = intake
        self._journal = journal
        self._advance = advance
        self._window = asyncio.Semaphore(window)

    async def all(self, lines: Sequence[BatchLine]) -> list[str]:
        return await asyncio.gather(*map(self._line, lines))

    async def _line(self, line: BatchLine) -> str:
        async with self._window:
            written = await self._outcome(line)
        self._advance()
        return written

    async def _outcome(self, line: BatchLine) -> str:
        try:
            if line.body is None:
                raise line.error or AssertionError("a line has a body or an error")
            kept = self._journal.find(line.raw)
            if kept is not None:
                return kept
            written = result_line(line, await self._answer(line.body))
        except EngineFailedError:  # no other line will be answered either
            raise
        except PolylensError as error:
            return error_line(line, error)
        self._journal.add(line.raw, written)
        return written

    async def _answer(self, body: GenerationBody) -> dict[str, Any]:
        asked = await self._intake.read(body)
        async with aborting(asked.submit(self._thread, allow_paths=True)) as handles:
            completions = await asyncio.gather(*(handle.completion() for handle in handles))
        return asked.answer_of(handles).whole(completions, len(asked.requests))
