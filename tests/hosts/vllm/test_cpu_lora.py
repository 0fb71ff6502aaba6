"""Runs of rows, of which vLLM's own LoRA is made on CPUs."""

from __future__ import annotations

import pytest

from polylens.errors import RowRuleError
from polylens.hosts.vllm import cpu_lora


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ([], ()),
        ([-1, -1], ()),
        ([0, 0, -1, 2, 0], ((0, 0, 2), (2, 3, 4), (0, 4, 5))),
        ([-1, 1], ((1, 1, 2),)),
    ],
)
def test_base_rows_are_in_no_run(slots: list[int], runs: cpu_lora.Runs):
    assert cpu_lora.runs_of(slots) == (len(slots), runs)


def test_a_layer_with_other_rows_than_the_mapping_is_an_error():
    with pytest.raises(RowRuleError, match="covers 2 rows, the layer has 3"):
        cpu_lora.checked_runs((2, ()), 3)
