"""How much more memory a mixed batch takes than the same batch of the base model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from polylens.bench.sides import Side
from polylens.engine.measure import largest_layer_bytes
from polylens.engine.peak import peak_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polylens.bench.result import Result
    from polylens.bench.setting import Setting

NUM_ADAPTERS = 2


def mixed_batch(setting: Setting) -> Iterator[Result]:
    """Pictures and long texts of two adapters and the base in one batch, against three of the base."""
    adapters = setting.adapters(NUM_ADAPTERS)
    peaks = []
    for names in ([*adapters, None], [None] * (NUM_ADAPTERS + 1)):
        # An engine each: what one run keeps for the next must count in both.
        with setting.dynamic(adapters) as llm:
            side = Side(llm)
            prepared = side.prepare([setting.picture_request(name, seed) for seed, name in enumerate(names)])
            peaks.append(peak_bytes(llm.loaded.device, partial(side.until_done_s, prepared)))
            largest = largest_layer_bytes(llm.loaded)
    yield setting.compare(
        f"peak memory of a mixed batch minus that of the same batch of the base model ({peaks[1] / 1e6:.0f} MB), "
        "vs the largest adapted layer",
        float(peaks[0] - peaks[1]),
        float(largest),
        1.1,
        "bytes",
    )
