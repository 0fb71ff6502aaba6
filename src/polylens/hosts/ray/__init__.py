"""Replicas of the server under Ray Serve: one ingress, many engines, requests where their adapter already is.

`polylens deploy` is the command; `serve run polylens.hosts.ray:build_app` and `serve build` take the same application.
Needs `pip install polylens[ray]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve import Application


def build_app(arguments: Mapping[str, Any]) -> Application:
    """The application of `arguments` (see `settings.settings_of`), for Ray's own commands. Raises RequestError."""
    from polylens.hosts.ray.app import application
    from polylens.hosts.ray.settings import settings_of

    return application(settings_of(arguments))
