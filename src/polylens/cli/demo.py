"""`polylens demo`: the main job on the embedded model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polylens.cli.options import JsonOption
from polylens.errors import RequestError

if TYPE_CHECKING:
    from polylens.demo.run import DemoResult

DEFAULT_SHEET = Path("demo-contact-sheet.png")


def demo(
    json_output: JsonOption = False,
    sheet: Annotated[
        Path, typer.Option("--sheet", metavar="FILE", help="Where the contact sheet goes (PNG).")
    ] = DEFAULT_SHEET,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Use N pictures of each domain instead of all.")
    ] = None,
) -> None:
    """See it work: a tiny model that reads numbers in pictures, six adapters, one mixed batch. No downloads.

    Every held-out picture goes to the base model and to every adapter, all in one batch. Prints who reads what
    how well, checks that the answers equal those of merged models (exit code 1 if not), compares the times, and
    draws a contact sheet with pictures of every domain and their answers.
    """
    from rich.console import Console

    from polylens.demo.report import render
    from polylens.demo.run import run_demo

    if not sheet.absolute().parent.is_dir() or sheet.is_dir():
        raise RequestError(f"--sheet {sheet}: name a file in a folder that exists")
    result = run_demo(limit, sheet, _tell)
    if json_output:
        typer.echo(json.dumps(result.to_json()))
    else:
        Console().print(render(result))
        typer.echo(f"\nPictures and answers: {sheet}")
    if not is_equal(result):
        raise typer.Exit(1)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def is_equal(result: DemoResult) -> bool:
    """Whether the mixed batch equals the merged runs, by the project's definition."""
    from polylens.engine.compare import LOGIT_TOLERANCE, MAX_TIE_FRACTION

    parity = result.parity
    few_ties = parity.ties <= MAX_TIE_FRACTION * len(result.questions)
    return parity.tokens_equal and parity.max_logit_error <= LOGIT_TOLERANCE and few_ties
