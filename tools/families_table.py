"""Write docs/families.md: one row for every model type that transformers' AutoModelForImageTextToText loads.

Rows of families with a tiny build (tests/families) are measured from it: what the engine finds when it makes itself
ready for adapters. The others are told from transformers alone.

    python -m tools.families_table             # writes docs/families.md
    python -m tools.families_table blip-2 git  # only these rows, and those of families without a build
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tests.families.build import ALL_FAMILIES, build_checkpoint
from transformers import GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from polylens.config import EngineConfig
from polylens.core import Component
from polylens.engine.describe_model import ComponentDescription, description
from polylens.engine.engine import Engine
from polylens.models.families import notes_for
from polylens.models.loading import load_model

TABLE = Path(__file__).parent.parent / "docs" / "families.md"

UNTESTED = "decided at load, not tested here"

HEAD = f"""\
# Families

Made by `make families` with transformers {transformers.__version__}; do not edit. One row for every model type of its
`AutoModelForImageTextToText`, and one for every further build in `tests/families` (a family with another tower or text
model). Language models without an encoder (`AutoModelForCausalLM`) load too; they have no rows.

**Level**: *mixed*: requests of different adapters share every batch, in the encoder too. *One adapter at a time in the
encoder*: text is mixed, but an encoder batch holds one adapter's pictures. *Host path*: transformers' own `generate`
computes one request at a time, with adapters on all parts. *Decided at load*: the model is compared with transformers
on a small copy of random weights; what is not proven takes the host path.

**Tower, connector, language**: layers that adapters may change, and the row rules proven for those of the encoder (how
rows divide among the pictures of a batch). The numbers are those of the tiny builds in `tests/families`, from which
the rows are measured. **Video**: taken as such (*only*: and no pictures), or as sampled frames. **No effect**: layers
that load but change nothing, as the features are taken before them.
**Refused**: what an adapter on it is refused for. Further reasons for a refusal are in [adapters](adapters.md).

| family | level | tower | connector | language | video | no effect | refused |
|-|-|-|-|-|-|-|-|
"""


@dataclass(frozen=True)
class Row:
    family: str
    level: str
    tower: str = ""
    connector: str = ""
    language: str = ""
    video: str = ""
    no_effect: str = ""
    refused: str = ""

    def line(self) -> str:
        return "| " + " | ".join(vars(self).values()) + " |"


def main(families: Sequence[str]) -> None:
    """families: those to measure; the others keep their rows. None: all."""
    torch.set_num_threads(1)
    TABLE.write_text(HEAD + "".join(f"{line}\n" for line in lines(families)), encoding="utf-8")


def lines(families: Sequence[str]) -> Iterable[str]:
    known = {line.split("|")[1].strip(): line for line in TABLE.read_text(encoding="utf-8").splitlines() if "|" in line}
    for family in sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *ALL_FAMILIES}):
        if family not in ALL_FAMILIES:
            yield told(family).line()
        elif not families or family in families or family not in known:
            yield measured(family).line()
        else:
            yield known[family]


def told(family: str) -> Row:
    """What transformers' classes say of a family without a build, or the family's note."""
    if (reason := notes_for(family).processor.no_chat) is not None:
        return Row(family, f"refused: {reason}")
    model_class = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family])
    if (reason := notes_for(family).refused) is not None:
        return Row(family, f"refused: {reason}")
    if not model_class.can_generate():
        return Row(family, "refused: does not generate text")
    if not issubclass(model_class, GenerationMixin):
        return Row(family, "refused: does not generate text token by token")
    if not model_class.config_class.sub_configs:
        return Row(family, "a language model without an encoder: mixed")
    if getattr(model_class.config_class, "is_encoder_decoder", False):
        return Row(family, "host path if it has a chat template: it is an encoder-decoder (not tested here)")
    return Row(family, UNTESTED)


def measured(family: str) -> Row:
    config = EngineConfig(max_model_len=ALL_FAMILIES[family].max_model_len)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(load_model(build_checkpoint(family, folder), config), config)
        engine.prepare_for_adapters()
        row = _row(family, engine)
        engine.close()
    return row


def _row(family: str, engine: Engine) -> Row:
    assert engine.probe is not None
    found = description(engine.loaded, engine.probe)
    tower, connector, language = (_component(found.components[part.value]) for part in Component)
    return Row(
        family,
        f"{found.level}: {found.reason}" if found.reason else found.level,
        tower,
        connector,
        language,
        video="only"
        if not found.takes_pictures
        else "yes"
        if found.takes_videos
        else "no"
        if engine.loaded.processing.notes.one_picture
        else "as frames",
        no_effect=_counted(found.no_effect[::-1]),
        refused=_counted(sorted(found.refused)),
    )


def _component(found: ComponentDescription) -> str:
    """`24 linear, 9 norm; rows by patches`."""
    text = ", ".join(f"{count} {kind}" for kind, count in found.num_layers.items())
    return f"{text}; rows by {', '.join(found.row_rules)}" if found.row_rules else text


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)}, e.g. `{names[0]}`" if names else ""


if __name__ == "__main__":
    main(sys.argv[1:])
