"""The demo end to end, with a few pictures a domain."""

from pathlib import Path

import pytest
from PIL import Image

from polylens.demo import ADAPTERS, DOMAINS
from polylens.demo.run import DemoResult, run_demo
from polylens.engine.compare import LOGIT_TOLERANCE

PER_DOMAIN = 4


@pytest.fixture(scope="module")
def sheet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "sheet.png"


@pytest.fixture(scope="module")
def result(sheet: Path) -> DemoResult:
    return run_demo(PER_DOMAIN, sheet)


def test_mixed_batch_equals_merged_models(result: DemoResult) -> None:
    assert result.parity.tokens_equal
    assert result.parity.max_logit_error <= LOGIT_TOLERANCE


def test_every_adapter_reads_its_own_domain(result: DemoResult) -> None:
    assert result.accuracy["base"]["clean"] >= 0.75
    for name in ("handwritten", "seven-segment", "thermal"):
        assert result.accuracy[name][name] >= 0.5
    assert result.accuracy["json"]["clean"] >= 0.75


def test_counts_and_times(result: DemoResult) -> None:
    answer = result.to_json()
    assert answer["adapters"] == len(ADAPTERS)
    assert answer["requests"] == PER_DOMAIN * len(DOMAINS) * (len(ADAPTERS) + 1)
    assert answer["mixed_batch_s"] > 0
    assert answer["merged_runs_s"] > 0


def test_contact_sheet_is_a_picture(result: DemoResult, sheet: Path) -> None:
    with Image.open(sheet) as picture:
        assert picture.format == "PNG"
        assert picture.width > picture.height // 2
