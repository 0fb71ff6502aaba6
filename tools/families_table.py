"""Write docs/families.md: one row for every model type that transformers' AutoModelForImageTextToText loads.

Rows of families with a tiny build (tests/families) are measured from it: what the engine finds when it makes itself
ready for adapters. The others are told from transformers alone.

    python -m tools.families_table            # writes docs/families.md
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tests.families.build import ALL_FAMILIES, build_checkpoint
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from polylens.config import EngineConfig
from polylens.core import Component, LayerKind, LayerSpec
from polylens.engine.engine import Engine
from polylens.models.loading import load_model
from polylens.models.probe import ProbeResult
from polylens.models.row_rules import RowRule

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
the rows are measured. **No effect**: layers that load but change nothing, as the features are taken before them.
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


def main() -> None:
    torch.set_num_threads(1)
    TABLE.write_text(HEAD + "".join(f"{row.line()}\n" for row in rows()), encoding="utf-8")


def rows() -> Iterable[Row]:
    for family in sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *ALL_FAMILIES}):
        yield measured(family) if family in ALL_FAMILIES else told(family)


def told(family: str) -> Row:
    """What transformers' classes say of a family without a build."""
    model_class = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family])
    if not model_class.can_generate():
        return Row(family, "refused: does not generate text")
    if getattr(model_class.config_class, "is_encoder_decoder", False):
        return Row(family, "host path if it has a chat template: it is an encoder-decoder (not tested here)")
    return Row(family, UNTESTED)


def measured(family: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(load_model(build_checkpoint(family, folder), EngineConfig()), EngineConfig())
        engine.prepare_for_adapters()
        row = _row(family, engine)
        engine.close()
    return row


def _row(family: str, engine: Engine) -> Row:
    probe = engine.probe
    assert probe is not None
    specs = engine.loaded.layers.specs
    return Row(
        family,
        _level(engine),
        tower=_component(specs.values(), Component.VISION_TOWER, probe),
        connector=_component(specs.values(), Component.CONNECTOR, probe),
        language=_component(specs.values(), Component.LANGUAGE_MODEL, probe),
        video="yes" if engine.loaded.processing.takes_videos else "as frames",
        no_effect=_no_effect(probe),
        refused=_refused(specs.values(), probe),
    )


def _level(engine: Engine) -> str:
    if engine.loaded.is_hosted:
        return f"host path: {engine.loaded.host_reason}"
    return "mixed" if engine.vision.mixed else "one adapter at a time in the encoder"


def _component(specs: Iterable[LayerSpec], component: Component, probe: ProbeResult) -> str:
    """`24 linear, 9 norm; rows by patches`."""
    own = [spec for spec in specs if spec.component is component]
    kinds = Counter(spec.kind.value for spec in own)
    text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    settled = {RowRule.NO_EFFECT, RowRule.UNPROVEN}
    rules = {probe.rules[spec.name] for spec in own if spec.name in probe.rules} - settled
    return f"{text}; rows by {', '.join(sorted(rule.value for rule in rules))}" if rules else text


def _no_effect(probe: ProbeResult) -> str:
    idle = sorted(probe.layers_with(RowRule.NO_EFFECT))
    return f"{len(idle)}, e.g. `{idle[-1]}`" if idle else ""


def _refused(specs: Iterable[LayerSpec], probe: ProbeResult) -> str:
    undivided = [
        spec.name
        for spec in specs
        if spec.kind in (LayerKind.NORM, LayerKind.CONV) and probe.rules.get(spec.name) is RowRule.UNPROVEN
    ]
    names = sorted({*undivided, *probe.unreachable})
    return f"{len(names)}, e.g. `{names[0]}`" if names else ""


if __name__ == "__main__":
    main()
