"""What only a trial shows of a processor that comes with an adapter: what its template reaches for, what it makes of
pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import nodes
from PIL import Image
from transformers.utils.chat_template_utils import _compile_jinja_template

from polylens.core import MediaKind
from polylens.errors import AdapterFormatError, AdapterMismatchError, MediaError
from polylens.models.item_processor import ItemProcessor, ResultMemo, media_part
from polylens.models.media import image_item, load_video
from polylens.models.prepared import pixel_tensors
from polylens.models.processing import settings_text

if TYPE_CHECKING:
    from polylens.core import MediaItem
    from polylens.models.processing import Processing


def check_template(template: str) -> None:
    """Refuse what the sandbox leaves empty, or stops only when it is reached. Raises jinja2.TemplateSyntaxError."""
    tree = _compile_jinja_template(template).environment.parse(template)
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Filter)):
        for name in _names_reached(node):
            if name.startswith("__"):
                raise AdapterFormatError(
                    f"the chat template in the adapter's folder reaches for {name[:80]!r}, which no chat template may"
                )


def _names_reached(node: Any) -> list[str]:
    if isinstance(node, nodes.Getattr):
        return [node.attr]
    arguments = [node.arg] if isinstance(node, nodes.Getitem) else node.args if node.name in ("attr", "map") else []
    values = [argument.value for argument in arguments if isinstance(argument, nodes.Const)]
    return [value for value in values if isinstance(value, str)]


def check_pictures(base: Processing, processing: Processing) -> None:
    """Settings of wrong types, and sizes that the model cannot take, show with the first picture: so one is tried."""
    for kind in MediaKind:
        theirs = media_part(processing.processor, kind)
        ours = media_part(base.processor, kind)
        if theirs is ours:
            continue
        wanted, found = _fixed_shapes(ours, kind), _fixed_shapes(theirs, kind)
        for name, shape in wanted.items():
            if found.get(name) != shape:
                raise AdapterMismatchError(
                    f"the {kind} settings in the adapter's folder give {name} of shape {found.get(name)} (its last "
                    f"dimensions), the model takes {shape}"
                )


def _fixed_shapes(part: Any, kind: MediaKind) -> dict[str, tuple[int, ...] | None]:
    """The last dimensions of an image or video processor's pixels, by name; without those that vary by item."""
    processor = ItemProcessor(part, settings_text(part), [_trial(kind, side) for side in (64, 96)], ResultMemo(0))
    try:
        processor([])
    except MediaError as error:
        raise AdapterFormatError(f"the {kind} settings in the adapter's folder cannot be used: {error}") from error
    shapes: list[dict[str, tuple[int, ...]]] = [
        {name: tuple(x.shape[-2 if x.dim() > 3 else -1 :]) for name, x in pixel_tensors(result.outputs).items()}
        for result in processor.results
    ]
    return {name: shape for name, shape in shapes[0].items() if shapes[1].get(name) == shape}


def _trial(kind: MediaKind, side: int) -> MediaItem:
    pixels_thwc = np.random.default_rng(side).integers(0, 256, (4, side, 160 - side, 3), dtype=np.uint8)
    return load_video(pixels_thwc) if kind is MediaKind.VIDEO else image_item(Image.fromarray(pixels_thwc[0]))
