"""Options: those applied are validated, those that matter and are not applied are refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from polylens.adapters.options import check_refusals, parse_options, refusals
from polylens.errors import AdapterFormatError, AdapterUnsupportedError
from tests.adapters.fake_layers import config


def test_scalings() -> None:
    options = parse_options(
        config(r=4, lora_alpha=8, rank_pattern={"k_proj": 16}, alpha_pattern={"layers.1.q_proj": 2})
    )
    assert options.scaling_of("model.layers.0.q_proj") == 2
    assert options.scaling_of("model.layers.0.k_proj") == 0.5
    assert options.scaling_of("model.layers.1.q_proj") == 0.5
    stabilised = parse_options(config(r=4, lora_alpha=8, use_rslora=True, rank_pattern={"k_proj": 16}))
    assert stabilised.scaling_of("model.layers.0.q_proj") == 8 / math.sqrt(4)
    assert stabilised.scaling_of("model.layers.0.k_proj") == 8 / math.sqrt(16)


def test_what_peft_writes_by_default_is_taken(tmp_path: Path) -> None:
    LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.1).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert refusals(written) == ()
    assert parse_options(written).rank == 8


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bias", "most"),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("megatron_config", {"a": 1}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "an_init_of_the_future"),
        ("peft_type", "IA3"),
        ("an_option_of_the_future", "on"),
        ("an_option_of_the_future", 0),
    ],
)
def test_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(AdapterUnsupportedError, match=option) as caught:
        check_refusals(config(**{option: value}))
    assert caught.value.option == option


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_options_at_neutral_values_are_taken(value: Any) -> None:
    check_refusals(config(an_option_of_the_future=value, use_dora=value, bias=value, modules_to_save=value))


@pytest.mark.parametrize("value", [True, False, "gaussian", "eva", "mica", "orthogonal"])
def test_inits_that_keep_the_base_weights(value: Any) -> None:
    check_refusals(config(init_lora_weights=value))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("r", 0),
        ("r", -1),
        ("r", True),
        ("r", 8.0),
        ("r", "8"),
        ("r", None),
        ("r", 10**400),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        ("lora_alpha", 10**400),
        ("lora_alpha", None),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"(": 4}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": math.nan}),
        ("use_rslora", "yes"),
        ("fan_in_fan_out", 1),
        ("target_modules", [1]),
        ("target_modules", {"a": 1}),
        ("target_parameters", "x"),
        ("base_model_name_or_path", 3),
        ("use_dora", "yes"),
        ("bias", 1),
        ("modules_to_save", "lm_head"),
        ("trainable_token_indices", [1, 1]),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", {"embed_tokens": 4}),
    ],
)
def test_values_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(AdapterFormatError, match=option.split("_")[0]):
        parse_options(config(**{option: value}))


def test_no_peft_type() -> None:
    with pytest.raises(AdapterFormatError, match="not a PEFT adapter"):
        parse_options({"r": 2, "lora_alpha": 2})
