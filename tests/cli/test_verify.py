"""`polylens verify`."""

from __future__ import annotations

import json

from polylens.engine.compare import LOGIT_TOLERANCE
from tests.cli.conftest import Shop
from tests.cli.process import assert_refused, polylens, polylens_process


def test_dynamic_equals_merged(shop: Shop):
    arguments = [shop.model, *shop.adapters, "--image", shop.image, "--max-tokens", "4", "--json"]
    done = polylens_process("verify", *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert told.keys() == {"reference", "adapters", "base", "ok"}
    assert told["ok"] is True
    assert told["reference"] == "peft"
    assert told["adapters"].keys() == {"eyes", "words"}
    for check in told["adapters"].values():
        assert check.keys() == {"layers", "logits", "tokens_equal", "ties", "requests", "problems"}
        assert check["tokens_equal"] is True
        assert 0 <= check["logits"]["max_abs_err"] <= LOGIT_TOLERANCE
        for layer in check["layers"]:
            assert layer.keys() == {"name", "component", "rows", "max_abs_err", "rel_err"}
            assert layer["rows"] > 0
            assert layer["rel_err"] < 1e-4
    assert {layer["component"] for layer in told["adapters"]["words"]["layers"]} == {"language_model"}


def test_wrong_input_is_refused(shop: Shop):
    assert_refused(polylens("verify", shop.model, *shop.adapters, "--image", "none.png"), "none.png")
