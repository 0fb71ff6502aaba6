"""The demo's result as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from polylens.demo.data import BASE, DOMAINS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from polylens.demo.run import DemoResult

GOOD = 0.9
"""From this share of right answers on a cell is green."""

PARTS = {
    BASE: "-",
    "handwritten": "all",
    "seven-segment": "all",
    "thermal": "all",
    "json": "language",
    "handwritten-language": "language",
    "handwritten-connector": "connector",
}


def render(result: DemoResult) -> RenderableType:
    return Group(_accuracy_table(result), Text(), _parity_line(result), Text(), _time_table(result))


def _accuracy_table(result: DemoResult) -> Table:
    num_pictures = len({(q.domain, q.position) for q in result.questions})
    table = Table(
        title=f"Right answers on {num_pictures} held-out pictures, one mixed batch",
        box=box.SIMPLE_HEAD,  # without vertical lines the table fits 80 columns
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("adapter", no_wrap=True)
    table.add_column("adapts", no_wrap=True)
    for domain in DOMAINS:
        table.add_column(domain, justify="right", no_wrap=True)
    for adapter, shares in result.accuracy.items():
        cells = [Text(f"{shares[d]:.0%}", style="green" if shares[d] >= GOOD else "dim") for d in DOMAINS]
        table.add_row(adapter, PARTS[adapter], *cells)
    return table


def _parity_line(result: DemoResult) -> Text:
    from polylens.engine.compare import LOGIT_TOLERANCE

    parity = result.parity
    is_close = parity.max_logit_error <= LOGIT_TOLERANCE
    return Text(
        f"Mixed batch against one merged model per adapter: tokens {'equal' if parity.tokens_equal else 'DIFFERENT'}, "
        f"largest logit error {parity.max_logit_error:.1e}{'' if is_close else ' (TOO LARGE)'}, ties {parity.ties}",
        style="green" if parity.tokens_equal and is_close else "bold red",
    )


def _time_table(result: DemoResult) -> Table:
    table = Table(title="Time to answer, without loading")
    table.add_column(f"{len(result.questions)} requests")
    table.add_column("seconds", justify="right")
    table.add_column("requests/s", justify="right")
    for label, seconds in (
        (f"{len(result.accuracy) - 1} adapters and the base, one mixed batch", result.mixed_batch_s),
        (f"{len(result.accuracy)} merged models, one after the other", result.merged_runs_s),
        ("one merged model, as many requests", result.one_merged_s),
    ):
        table.add_row(label, f"{seconds:.1f}", f"{len(result.questions) / seconds:.0f}")
    return table
