"""`polylens merge`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Shop
from tests.cli.process import assert_refused, polylens


def test_merged_model_answers_without_the_adapter(shop: Shop, tmp_path: Path) -> None:
    output = tmp_path / "merged"
    done = polylens("merge", shop.model, "--adapter", shop.words, "--output", output, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == {"output", "num_tensors", "num_changed", "num_shards", "untied", "adapter"}
    assert told["num_changed"] == told["adapter"]["components"]["language_model"]["num_layers"]
    question = ["--prompt", "what is seven plus five?", "--max-tokens", "4", "--dtype", "float32"]
    merged = polylens("run", output, *question)
    adapted = polylens("run", shop.model, "--adapter", shop.words, "--use", shop.words.name, *question)
    assert merged.stdout == adapted.stdout
    assert merged.returncode == adapted.returncode == 0


def test_a_folder_that_is_not_empty_is_left_alone(shop: Shop) -> None:
    assert_refused(
        polylens("merge", shop.model, "--adapter", shop.words, "--output", shop.model), "is not an empty folder"
    )
