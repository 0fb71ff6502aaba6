"""Several answers to one request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polylens.core import Request


def request_copies(request: Request, count: int) -> list[Request]:
    """The requests for `count` answers to one: copy k draws from seed + k, and is called "ID-k"."""
    if count == 1:
        return [request]
    seed, name = request.sampling.seed, request.request_id
    return [
        replace(
            request,
            sampling=request.sampling if seed is None else replace(request.sampling, seed=(seed + index) % 2**63),
            request_id=None if name is None else f"{name}-{index}",
        )
        for index in range(count)
    ]
