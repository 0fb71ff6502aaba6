"""What the `model` of a request may say: a name of the base model, or an adapter's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polylens.errors import UnknownAdapterError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from polylens.server.options import ServerOptions


def adapter_of(model: str, options: ServerOptions, adapters: Collection[str], media: Collection[str]) -> str | None:
    """The adapter a request for `model` gets, None for the base model. Raises UnknownAdapterError.

    media: the kinds of media the request has ("image", "video"), for `--default-adapter`.
    """
    if model in adapters:
        return model
    if model not in options.model_names:
        raise UnknownModelError(model, options.model_names, adapters)
    return next((name for kind, name in options.default_adapters.items() if kind in media), None)


class UnknownModelError(UnknownAdapterError):
    """`model` names neither the base model nor an adapter."""

    def __init__(self, name: str, model_names: Sequence[str], adapters: Collection[str]) -> None:
        super().__init__(name, tuple(adapters))
        served = ", ".join([*model_names, *sorted(adapters)][:MAX_NAMES_LISTED])
        more = len(model_names) + len(adapters) - MAX_NAMES_LISTED
        listed = f"{served} and {more} more" if more > 0 else served
        self.args = (f"the model {name[:200]!r} does not exist; served here: {listed}",)


MAX_NAMES_LISTED = 20
"""Names an error lists: there may be thousands of adapters."""


def model_cards(
    options: ServerOptions, source: str, max_model_len: int, adapters: Mapping[str, str], created: int
) -> list[dict[str, Any]]:
    """The entries of /v1/models: the base under each of its names, then the adapters (name -> path)."""
    base = options.model_names[0]
    return [
        *(_card(name, created, root=source, parent=None, max_model_len=max_model_len) for name in options.model_names),
        *(_card(name, created, root=path, parent=base, max_model_len=max_model_len) for name, path in adapters.items()),
    ]


def _card(name: str, created: int, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "polylens", **more}
