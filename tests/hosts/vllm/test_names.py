"""Names that carry content: what vLLM keys its caches by."""

from __future__ import annotations

import pytest

from polylens.core import Digests
from polylens.hosts.vllm.names import BASE_DIGEST, content_id, digest_in_name, read_stamp, stamped


def digests(whole: str, vision: str = "") -> Digests:
    return Digests("", "", whole, vision, whole)


def test_a_stamped_name_is_read_back():
    name = stamped("gauges@v2", digests("ab" * 32))
    assert read_stamp(name) == ("gauges@v2", "ab" * 16)


def test_a_name_without_a_stamp_has_no_digest():
    assert read_stamp("gauges@v2") == ("gauges@v2", None)


def test_an_adapter_that_changes_nothing_has_a_digest_too():
    assert digest_in_name(digests("")) == BASE_DIGEST


def test_numbers_differ_by_name_and_by_content_and_lie_above_those_of_a_server():
    names = [stamped(name, digests(whole)) for name in "ab" for whole in ("1" * 64, "2" * 64)]
    numbers = [content_id(name) for name in names]
    assert len(set(numbers)) == 4
    assert all(2**61 <= number < 2**62 for number in numbers)


@pytest.mark.parametrize("name", ["a", "b"])
def test_numbers_are_the_same_in_all_processes(name: str):
    known = {"a": 3932871137703526844, "b": 4226764736340772797}
    assert content_id(stamped(name, digests("ab" * 32))) == known[name]
