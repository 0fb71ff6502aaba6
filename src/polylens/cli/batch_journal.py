"""The answers of a batch as they come, in a file beside the output, so that no end of the process loses them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType


def journal_of(output: Path) -> Path:
    """Where the journal of an output file is."""
    return output.with_name(f"{output.name}.partial")


class Journal:
    """Lines of JSON: first `made_by`, then one for each answer: the hash of an input line, and its output line.

    A context manager; it stays on disk until `remove`.
    """

    def __init__(self, path: Path, made_by: Mapping[str, Any], *, resume: bool) -> None:
        """made_by: what the answers depend on beside the line (model, adapters). resume: go on from a journal that
        is there. Raises RequestError where there is one and `resume` does not say so, or that others made."""
        self.path = path
        self._answers: dict[str, str] = {}
        if path.exists():
            self._read(made_by, resume)
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        else:
            self._file = path.open("w", encoding="utf-8", errors="backslashreplace")
            self._write(made_by)

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, raw: str) -> str | None:
        """The output line of an input line that was answered already."""
        return self._answers.get(_digest(raw))

    def add(self, raw: str, output_line: str) -> None:
        """Keep an answer: it is in the file when this returns."""
        self._answers[_digest(raw)] = output_line
        self._write({"line": _digest(raw), "output": output_line})

    def remove(self) -> None:
        """All is written elsewhere."""
        self._file.close()
        self.path.unlink()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def _read(self, made_by: Mapping[str, Any], resume: bool) -> None:
        whole, _, torn = self.path.read_bytes().rpartition(b"\n")  # what a crash left of the last line does not count
        try:
            first, *records = map(json.loads, whole.splitlines())
            answers = {record["line"]: record["output"] for record in records}
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{self.path} is not a journal of `polylens batch`: move it away") from error
        if not resume:
            raise RequestError(
                f"{self.path} has {len(answers)} answers of a run that did not end: give --resume to go on from them, "
                "or delete it"
            )
        if first != made_by:
            raise RequestError(f"{self.path} was made with another model, other adapters or options: delete it")
        self._answers = answers
        if torn:
            with self.path.open("rb+") as file:
                file.truncate(len(whole) + 1)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _digest(raw: str) -> str:
    return hashlib.sha256(raw.encode("utf-8", "surrogatepass")).hexdigest()
