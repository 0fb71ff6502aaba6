"""The demo's result: accuracy, JSON, table and contact sheet, from made-up answers."""

import itertools

import pytest
from PIL import Image
from rich.console import Console

from polylens.demo import DOMAINS
from polylens.demo.contact_sheet import draw
from polylens.demo.report import render
from polylens.demo.run import DemoResult, Parity, Question, list_questions


@pytest.fixture
def result() -> DemoResult:
    picture = Image.new("RGB", (84, 84))
    adapters = ("base", "handwritten", "json")
    questions = [Question(a, d, n, picture, str(n)) for d in DOMAINS for n in range(2) for a in adapters]
    # The base always answers 0, so it is right on one of each two pictures.
    answers = {"base": "0", "handwritten": "{}", "json": '{{"value": {}}}'}
    texts = [answers[q.adapter].format(q.label) for q in questions]
    return DemoResult(questions, texts, Parity(1e-6, True, 0), 1.0, 3.0, 2.0)


def test_accuracy_is_the_share_of_right_answers(result: DemoResult) -> None:
    assert result.accuracy == {
        "base": dict.fromkeys(DOMAINS, 0.5),
        "handwritten": dict.fromkeys(DOMAINS, 1.0),
        "json": dict.fromkeys(DOMAINS, 1.0),
    }


def test_json_has_the_documented_keys(result: DemoResult) -> None:
    answer = result.to_json()
    assert list(answer) == ["accuracy", "parity", "mixed_batch_s", "merged_runs_s", "adapters", "requests"]
    assert answer["parity"] == {"max_logit_error": 1e-6, "tokens_equal": True, "ties": 0}
    assert (answer["adapters"], answer["requests"]) == (2, 24)


def test_table_names_adapters_domains_and_times(result: DemoResult) -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(result))
    text = console.export_text()
    for word in (*DOMAINS, "base", "json", "50%", "100%", "tokens equal", "one mixed batch"):
        assert word in text


def test_contact_sheet_colours_right_and_wrong(result: DemoResult) -> None:
    colours = {colour for _, colour in draw(result).getcolors(1 << 20)}
    assert (10, 130, 50) in colours
    assert (200, 30, 30) in colours


def test_neighbouring_questions_use_different_adapters() -> None:
    questions = list_questions(per_domain=2)
    assert len(questions) == 4 * 2 * 7
    assert all(a.adapter != b.adapter for a, b in itertools.pairwise(questions))
