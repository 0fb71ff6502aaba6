"""An adapter replaced under its name: new requests get the new one, running ones keep the old, nothing is stale."""

from __future__ import annotations

from typing import Any

import pytest

from polylens import LLM
from polylens.errors import AdapterConflictError, UnknownAdapterError
from tests.parity.harness import BASE, Bench, Case, assert_equal, mixed, step

OLD, NEW = "all", "connector+language"


def test_the_same_picture_after_a_replacement(bench: Bench) -> None:
    request = bench.request(Case("two", "mine"))
    with LLM(bench.checkpoint, {"mine": bench.adapters[OLD]}) as llm:
        before = llm.generate([request])
        llm.load_adapter("mine", bench.adapters[NEW], replace=True)
        after = llm.generate([request])
        llm.check_integrity()
    assert_equal(bench.compare([Case("two", OLD)], before), [Case("two", OLD)])
    assert_equal(bench.compare([Case("two", NEW)], after), [Case("two", NEW)])


def test_a_running_request_keeps_the_old_adapter(bench: Bench) -> None:
    request, answers = bench.request(Case("picture", "mine")), {}
    with LLM(bench.checkpoint, {"mine": bench.adapters[OLD]}) as llm:
        alone_bytes = llm.registry.resident_bytes()
        running = llm.engine.add_request(request)
        _steps(llm, answers, 3)
        llm.load_adapter("mine", bench.adapters[NEW], replace=True)
        waiting = llm.engine.add_request(request)
        assert llm.registry.resident_bytes() > alone_bytes
        _steps(llm, answers, None)
        assert llm.registry.resident_bytes() == _bytes_of(bench, NEW)
    cases = [Case("picture", OLD), Case("picture", NEW)]
    assert_equal(bench.compare(cases, [answers[running], answers[waiting]]), cases)


def test_other_content_needs_replace_and_the_same_content_changes_nothing(bench: Bench) -> None:
    with LLM(bench.checkpoint, {"mine": bench.adapters[OLD]}) as llm:
        loaded = llm.registry.get("mine")
        llm.load_adapter("mine", bench.adapters[OLD])
        assert llm.registry.get("mine") is loaded
        with pytest.raises(AdapterConflictError):
            llm.load_adapter("mine", bench.adapters[NEW])
        assert llm.registry.get("mine") is loaded


def test_unloading(bench: Bench) -> None:
    """An unloaded adapter answers what runs with it, and no request after."""
    answers: dict[str, Any] = {}
    with bench.llm() as llm:
        running = llm.engine.add_request(bench.request(Case("picture", OLD)))
        _steps(llm, answers, 1)
        llm.unload_adapter(OLD)
        with pytest.raises(UnknownAdapterError):
            llm.chat(bench.questions["text"], adapter=OLD)
        _steps(llm, answers, None)
        assert_equal(bench.compare([Case("picture", OLD)], [answers[running]]), [])
        bench.check(llm, mixed(["picture"], [BASE, NEW]))


def _steps(llm: LLM, answers: dict[str, Any], count: int | None) -> None:
    """Run `count` steps, or until nothing is left; collect finished answers."""
    done = 0
    while llm.engine.has_unfinished() and (count is None or done < count):
        step(llm, answers)
        done += 1


def _bytes_of(bench: Bench, adapter: str) -> int:
    with LLM(bench.checkpoint, {adapter: bench.adapters[adapter]}) as llm:
        return llm.registry.resident_bytes()
