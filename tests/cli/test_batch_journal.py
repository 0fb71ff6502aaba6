"""Answers of a batch outlive the process, and only those of the same run are gone on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from polylens.cli.batch_journal import Journal, journal_of
from polylens.errors import RequestError

MADE_BY = {"model": "m", "adapters": {"a": "digest"}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return journal_of(tmp_path / "out.jsonl")


def test_answers_are_found_again_after_a_crash(path: Path):
    journal = Journal(path, MADE_BY, resume=False)
    journal.add("line 1", "answer 1\n")
    journal.add("line é\ud800", "answer \ud800\n")
    # Nothing was closed, as in a crash; the last line is torn.
    path.write_bytes(path.read_bytes() + b'{"line": "ab')
    again = Journal(path, MADE_BY, resume=True)
    assert len(again) == 2
    assert again.find("line 1") == "answer 1\n"
    assert again.find("line é\ud800") == "answer \ud800\n"
    assert again.find("line 2") is None
    again.add("line 2", "answer 2\n")
    assert len(Journal(path, MADE_BY, resume=True)) == 3
    again.remove()
    assert not path.exists()


def test_a_run_that_did_not_end_is_not_overwritten(path: Path):
    Journal(path, MADE_BY, resume=False).add("line", "answer\n")
    before = path.read_bytes()
    with pytest.raises(RequestError, match="1 answers of a run that did not end: give --resume"):
        Journal(path, MADE_BY, resume=False)
    with pytest.raises(RequestError, match="another model"):
        Journal(path, {**MADE_BY, "adapters": {"a": "other"}}, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "hello", "hello\n", "{}\n[1]\n", '{}\n{"line": 1}\n'])
def test_other_files_are_left_alone(path: Path, content: str):
    path.write_text(content)
    with pytest.raises(RequestError):
        Journal(path, MADE_BY, resume=True)
    assert path.read_text() == content


def test_resume_without_a_journal_begins(path: Path):
    with Journal(path, MADE_BY, resume=True) as journal:
        assert len(journal) == 0
    assert path.exists()
