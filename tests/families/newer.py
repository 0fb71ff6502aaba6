"""Newer families, of all kinds of towers: one build each, in a module named after the family."""

from __future__ import annotations

from collections.abc import Mapping

from tests.families.cosmos3 import COSMOS3
from tests.families.exaone4_5 import EXAONE4_5
from tests.families.hunyuan_vl import HUNYUAN_VL
from tests.families.lfm3_vl import LFM3_VL
from tests.families.muse import MUSE
from tests.families.qwen_omni import QWEN_OMNI
from tests.families.recipes import Family
from tests.families.sparse import SPARSE
from tests.families.step3p7 import STEP3P7

NEWER: Mapping[str, Family] = {
    **COSMOS3,
    **MUSE,
    **QWEN_OMNI,
    **SPARSE,
    "exaone4_5": EXAONE4_5,
    "hunyuan_vl": HUNYUAN_VL,
    "lfm3_vl": LFM3_VL,
    "step3p7": STEP3P7,
}
