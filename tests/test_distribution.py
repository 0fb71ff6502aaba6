"""Tests that share something are told to one worker."""

from __future__ import annotations

import pytest

from tests.distribution import group_of


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/parity/test_budgets.py::test_prefill_chunks_among_decodes[qwen2_vl]", "qwen2_vl"),
        ("tests/adapters/test_against_peft.py::test_merge_equals_peft[True-llava]", "llava"),
        ("tests/server/test_stopping.py::test_the_limit_ends_what_is_left[0.0]", "tests/server/"),
        ("tests/engine/test_constraints.py::test_constraints_in_a_mixed_batch[gemma3]", "gemma3"),
        ("tests/engine/test_pages.py::test_pages", "tests/engine/test_pages.py"),
    ],
)
def test_groups(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group
