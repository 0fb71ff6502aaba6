"""`polylens demo`, with a few pictures of each domain."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.process import polylens

DOMAINS = {"clean", "handwritten", "seven-segment", "thermal"}
ADAPTERS = {"base", "handwritten", "seven-segment", "thermal", "json", "handwritten-language", "handwritten-connector"}


def test_one_json_object(tmp_path: Path):
    done = polylens("demo", "--json", "--limit", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert told.keys() == {"accuracy", "parity", "mixed_batch_s", "merged_runs_s", "adapters", "requests"}
    assert told["accuracy"].keys() == ADAPTERS
    assert all(shares.keys() == DOMAINS for shares in told["accuracy"].values())
    assert told["parity"].keys() == {"max_logit_error", "tokens_equal", "ties"}
    assert told["parity"]["tokens_equal"] is True
    assert told["adapters"] == 6
    assert told["requests"] == 7 * 4 * 2
    assert (tmp_path / "demo-contact-sheet.png").stat().st_size > 0
