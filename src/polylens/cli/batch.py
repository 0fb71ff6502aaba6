"""`polylens batch`: answer a file of requests in one mixed batch."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polylens.cli.options import (
    AdapterOption,
    ModelArgument,
    adapted_config,
    open_llm,
    parse_adapters,
    takes,
)
from polylens.config import EngineConfig
from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polylens.cli.batch_journal import Journal
    from polylens.engine.llm import LLM


@takes(adapted_config)
def batch(
    config: EngineConfig,
    model: ModelArgument,
    input_file: Annotated[
        Path, typer.Option("--input", metavar="FILE", help="Requests, one JSON object a line (OpenAI batch format).")
    ],
    output_file: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="Where the answers go, one line a request, same order.")
    ],
    adapter: AdapterOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the answers that an earlier run left in FILE.partial.")
    ] = False,
) -> None:
    """Answer a file of requests in the OpenAI batch format, all adapters mixed in one batch.

    A line: {"custom_id": "a", "body": {"model": "gauges", "messages": […], "max_tokens": 32}}. `model` names an
    adapter, or the base model as "base" or as given for MODEL. Pictures: data URLs, or files relative to the
    input file. A line that cannot be served gets an error object in its output line; the others go on.

    Answers are kept in FILE.partial as they come; at the end all are in FILE, in the order of the input.
    """
    from polylens.cli.batch_file import read_lines, write_whole
    from polylens.cli.batch_journal import Journal, journal_of
    from polylens.cli.batch_run import answer_lines
    from polylens.engine.progress import progress_bar

    adapters = parse_adapters(adapter)
    _check_output(input_file, output_file)
    lines = read_lines(input_file)
    with open_llm(model, adapters, config) as llm:
        made_by = _made_by(model, llm)
        with Journal(journal_of(output_file), made_by, resume=resume) as journal, _said(journal):
            with progress_bar(len(lines), sys.stderr.isatty()) as advance:
                written = answer_lines(llm, model, lines, input_file.absolute().parent, journal, advance)
            write_whole(output_file, "".join(written))
            journal.remove()
    num_answered = sum(json.loads(line)["error"] is None for line in written)
    print(f"{num_answered} of {len(lines)} requests answered: {output_file}", file=sys.stderr)


def _made_by(model: str, llm: LLM) -> dict[str, Any]:
    """What the answers depend on beside the lines: a journal of other answers is not gone on from."""
    contents = {name: llm.registry.get(name).content for name in llm.adapters}
    digests = {name: f"{digests.whole} {processing}" for name, (digests, processing) in contents.items()}
    return {"model": model, "dtype": str(llm.loaded.dtype), "adapters": digests}


@contextmanager
def _said(journal: Journal) -> Iterator[None]:
    """Whatever ends the block early: say where the answers are that came before."""
    try:
        yield
    except BaseException:
        if len(journal):
            print(f"polylens: {len(journal)} answers are kept in {journal.path}; --resume goes on", file=sys.stderr)
        raise


def _check_output(input_file: Path, output_file: Path) -> None:
    """Refuse before the work what would fail after it."""
    if not output_file.absolute().parent.is_dir():
        raise RequestError(f"--output {output_file}: the folder {output_file.absolute().parent} does not exist")
    if output_file.is_dir():
        raise RequestError(f"--output {output_file} is a folder; name a file")
    if output_file.exists() and input_file.exists() and output_file.samefile(input_file):
        raise RequestError(f"--output {output_file} is the input file; name another")
