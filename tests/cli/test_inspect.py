"""`polylens inspect`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.cli.conftest import Shop
from tests.cli.process import assert_refused, polylens
from tests.families.build import build_checkpoint

KEYS = {
    "path", "loads", "options", "num_tensors", "num_parameters", "dtypes", "ranks", "model_type", "components",
    "digests", "layers", "processing_files", "refused", "problems", "warnings",
}  # fmt: skip


def test_with_the_model_every_component_is_told(shop: Shop):
    done = polylens("inspect", shop.eyes, "--model", shop.model, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert told.keys() == KEYS
    assert told["loads"] is True
    assert set(told["components"]) == {"vision_tower", "connector", "language_model"}
    assert all(part["ranks"] == [4] and part["scalings"] == [2.0] for part in told["components"].values())
    assert sum(part["num_tensors"] for part in told["components"].values()) == told["num_tensors"]
    assert len(told["digests"]["whole"]) == 64
    assert told["refused"] == told["problems"] == []
    text = polylens("inspect", shop.eyes, "--model", shop.model).stdout
    assert told["digests"]["whole"] in text
    assert "loads       yes" in text


def test_without_a_model_it_says_what_only_the_model_can_tell(shop: Shop):
    told = json.loads(polylens("inspect", shop.words, "--json").stdout)
    assert told["loads"] is None
    assert told["components"] == "unknown, give --model"
    assert told["options"]["rank"] == 4


def test_what_would_be_refused_is_told_with_exit_code_1(shop: Shop, tmp_path: Path):
    folder = Path(shutil.copytree(shop.words, tmp_path / "replicated"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "layer_replication": [[0, 1]]}))
    done = polylens("inspect", folder, "--model", shop.model, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["loads"] is False
    assert [refusal["option"] for refusal in told["refused"]] == ["layer_replication"]
    assert "refused     layer_replication" in polylens("inspect", folder).stdout


def test_broken_files_are_refused(shop: Shop, tmp_path: Path):
    folder = Path(shutil.copytree(shop.words, tmp_path / "broken"))
    (folder / "adapter_config.json").write_text("{")
    assert_refused(polylens("inspect", folder), "adapter_config.json", "not valid JSON")
    assert_refused(polylens("inspect", shop.words, "--model", tmp_path), "no config.json")


def test_of_a_model_it_tells_how_it_is_run(shop: Shop):
    told = json.loads(polylens("inspect", shop.model, "--json").stdout)
    assert (told["level"], told["reason"]) == ("mixed", None)
    assert told["components"]["vision_tower"]["row_rules"]
    assert told["components"]["language_model"]["num_layers"]["linear"] > 0
    text = polylens("inspect", shop.model).stdout
    assert "level       mixed" in text


def test_of_a_model_that_transformers_runs_it_tells_the_reason(tmp_path: Path):
    folder = build_checkpoint("florence2", tmp_path)
    (folder / "model.safetensors").unlink()
    done = polylens("inspect", folder)
    assert done.returncode == 0, done.stderr
    assert "level       host path: it is an encoder-decoder" in done.stdout
