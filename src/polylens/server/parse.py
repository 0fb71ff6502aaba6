"""From the bytes of a body to its type; what is wrong with them becomes one RequestError that names the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from polylens.errors import RequestError
from polylens.server.schema import UNION_TAGS, Body

if TYPE_CHECKING:
    from collections.abc import Sequence

B = TypeVar("B", bound=Body)

MAX_MESSAGE_CHARS = 300
"""Longest answer about one field: pydantic quotes what it got."""

MAX_PLACE_CHARS = 200


def parse_body(kind: type[B], raw: bytes) -> B:
    """Read a JSON body. Raises RequestError for what is no JSON, of another form, or not supported."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _request_error(error) from error


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = _place(first["loc"])[:MAX_PLACE_CHARS]  # it may end in a key that the client made up
    message = first["msg"][:MAX_MESSAGE_CHARS]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}")
    if first["type"] == "extra_forbidden":
        return RequestError(f"{place!r} is not supported; remove it", place)
    if first["type"] == "missing":
        return RequestError(f"{place!r} is missing", place)
    if not place:
        return RequestError(f"the body: {message}")
    return RequestError(f"{place}: {message}", place)


def _place(loc: Sequence[Any]) -> str:
    """`messages[0].content[1].image_url.url`, from pydantic's path without the branches of unions."""
    place = ""
    for index, step in enumerate(loc):
        if isinstance(step, int):
            place += f"[{step}]"
        elif not _is_branch(step, loc, index):
            place += f".{step}" if place else str(step)
    return place


def _is_branch(step: str, loc: Sequence[Any], index: int) -> bool:
    """Whether a step of the path names a union's branch. `image_url` is a branch, and after it the field in it."""
    is_tag = step in UNION_TAGS or step.startswith(("constrained-", "list[", "dict["))
    return is_tag and index > 0 and loc[index - 1] != step
