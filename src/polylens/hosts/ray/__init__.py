"""Replicas of the server under Ray Serve: one ingress, many engines, requests where their adapter already is.

`polylens deploy` is the command. `serve run polylens.hosts.ray:build_app` takes the same application and its settings;
`serve build polylens.hosts.ray:application` takes no settings, so `application` reads them from the environment.
Needs `pip install polylens[ray]`.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from polylens.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve import Application

ARGUMENTS_VARIABLE = "POLYLENS_RAY_ARGS"
"""A JSON object: what `build_app` would be given."""


def build_app(arguments: Mapping[str, Any]) -> Application:
    """The application of `arguments` (see `settings.settings_of`), for Ray's own commands. Raises RequestError."""
    from polylens.hosts.ray.app import application
    from polylens.hosts.ray.settings import settings_of

    return application(settings_of(arguments))


def __getattr__(name: str) -> Application:
    """`application`, made when it is asked for."""
    if name != "application":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build_app(_arguments_of_environment())


def _arguments_of_environment() -> Mapping[str, Any]:
    try:
        arguments = json.loads(os.environ.get(ARGUMENTS_VARIABLE, ""))
    except json.JSONDecodeError as error:
        raise RequestError(
            f'${ARGUMENTS_VARIABLE} must hold a JSON object, such as {{"model": "…"}}: {error}'
        ) from error
    if not isinstance(arguments, dict):
        raise RequestError(f"${ARGUMENTS_VARIABLE} must hold a JSON object, not {type(arguments).__name__}")
    return arguments
