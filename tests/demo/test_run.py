"""`polylens demo` end to end, with a few pictures a domain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polylens.engine.compare import LOGIT_TOLERANCE
from tests.cli.process import polylens

DOMAINS = {"clean", "handwritten", "seven-segment", "thermal"}
ADAPTERS = {"base", "handwritten", "seven-segment", "thermal", "json", "handwritten-language", "handwritten-connector"}
PER_DOMAIN = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    done = polylens("demo", "--json", "--limit", str(PER_DOMAIN), cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def test_mixed_batch_equals_merged_models(told: dict[str, Any]) -> None:
    assert told["parity"].keys() == {"max_logit_error", "tokens_equal", "ties"}
    assert told["parity"]["tokens_equal"] is True
    assert told["parity"]["max_logit_error"] <= LOGIT_TOLERANCE


def test_every_adapter_reads_its_own_domain(told: dict[str, Any]) -> None:
    accuracy = told["accuracy"]
    assert accuracy.keys() == ADAPTERS
    assert all(shares.keys() == DOMAINS for shares in accuracy.values())
    assert accuracy["base"]["clean"] >= 0.75
    for name in ("handwritten", "seven-segment", "thermal"):
        assert accuracy[name][name] >= 0.5
    assert accuracy["json"]["clean"] >= 0.75


def test_counts_and_times(told: dict[str, Any]) -> None:
    assert told.keys() == {"accuracy", "parity", "mixed_batch_s", "merged_runs_s", "adapters", "requests"}
    assert told["adapters"] == len(ADAPTERS) - 1
    assert told["requests"] == PER_DOMAIN * len(DOMAINS) * len(ADAPTERS)
    assert told["mixed_batch_s"] > 0
    assert told["merged_runs_s"] > 0


def test_contact_sheet_is_a_picture(told: dict[str, Any], folder: Path) -> None:
    with Image.open(folder / "demo-contact-sheet.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > picture.height // 2
