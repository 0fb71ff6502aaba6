"""Factors of a mixture's experts and its router: as PEFT saves them today, and one expert at a time as before."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.aria.configuration_aria import AriaTextConfig
from transformers.models.aria.modeling_aria import AriaTextMoELayer
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

from polylens.adapters import load_adapter, merge_into
from polylens.config import ApplyMode
from polylens.core import Adapter, Component, LayerKind, LayerSpec, ModelLayers
from polylens.errors import AdapterMismatchError
from polylens.lora.context import RoutingContext
from polylens.lora.cost import CostModel
from polylens.lora.layers import wrap_layers
from polylens.lora.routing import segments
from polylens.models.components import EXPERT_PARAMETERS, experts_kind, is_router, renamer
from tests.adapters.fake_layers import config as written_config
from tests.adapters.fake_layers import write_adapter

EXPERTS, WIDTH, INNER, CHOSEN = 5, 12, 8, 2


class Mixture(nn.Module):
    """A linear layer, and a family's own block after it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(self.q_proj(x))
        return y[0].view_as(x) if isinstance(y, tuple) else y


def qwen(implementation: str = "grouped_mm") -> nn.Module:
    """Weights (experts, out, in)."""
    config = Qwen3VLMoeTextConfig(
        hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    config._experts_implementation = implementation
    return Qwen3VLMoeTextSparseMoeBlock(config)


def aria(implementation: str = "grouped_mm") -> nn.Module:
    """Weights (experts, in, out), as the module says of itself."""
    config = AriaTextConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=2,
        moe_num_experts=EXPERTS,
        moe_topk=CHOSEN,
        moe_num_shared_experts=1,
    )
    config._experts_implementation = implementation
    return AriaTextMoELayer(config)


def llama4() -> nn.Module:
    """Weights (experts, in, out), of which the module says nothing: PEFT takes their sides the other way round."""
    config = Llama4TextConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    return Llama4TextMoe(config)


BLOCKS: dict[str, Callable[[], nn.Module]] = {"qwen": qwen, "aria": aria, "llama4": llama4}


def mixture(block: nn.Module | None = None) -> Mixture:
    generator = torch.Generator().manual_seed(0)
    model = Mixture(qwen() if block is None else block).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def layers_of(model: nn.Module, rename: Any = lambda path: path) -> ModelLayers:
    specs = []
    for name, module in model.named_modules():
        if kind := experts_kind(module):
            for parameter in EXPERT_PARAMETERS:
                num, out, inputs = module.get_parameter(parameter).shape
                sides = (inputs, out) if kind is LayerKind.EXPERTS else (out, inputs)
                specs.append(spec_of(f"{name}.{parameter}", kind, *sides, num))
        elif is_router(module):
            out, inputs = module.get_parameter("weight").shape
            specs.append(spec_of(name, LayerKind.ROUTER, inputs, out))
        elif isinstance(module, nn.Linear):
            specs.append(spec_of(name, LayerKind.LINEAR, module.in_features, module.out_features))
    return ModelLayers(
        {spec.name: spec for spec in specs}, rename, "toy", "Toy", 1, parameters=dict(model.named_parameters())
    )


def spec_of(name: str, kind: LayerKind, inputs: int, out: int, num: int = 1) -> LayerSpec:
    return LayerSpec(name, Component.LANGUAGE_MODEL, kind, inputs, out, num)


def saved(folder: Path, model: nn.Module, seed: int = 0, **options: Any) -> Path:
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(adapted.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(str(folder))
    return folder


def merged(model: nn.Module, folder: Path) -> nn.Module:
    return PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).merge_and_unload()


def load(folder: Path, layers: ModelLayers, dtype: torch.dtype = torch.float32) -> Adapter:
    return load_adapter(folder, layers, name="a", dtype=dtype, device="cpu")[0]


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = {"qwen": "gate", "aria": "router", "llama4": "router"}
CONFIGS: dict[str, dict[str, Any]] = {
    "both": {"target_modules": [], "target_parameters": BOTH, "r": 3},
    "both and more": {
        "target_modules": ["q_proj"],
        "target_parameters": [*BOTH, "mlp.gate.weight"],
        "r": 2,
        "use_rslora": True,
        "rank_pattern": {"experts.down_proj": 4},  # PEFT warns that it matches no module, and applies it
        "alpha_pattern": {"gate.weight": 3, "gate_up_proj": 5},
    },
    "gate_up": {"target_modules": [], "target_parameters": BOTH[:1], "r": 1},
    "down": {"target_modules": ["q_proj"], "target_parameters": BOTH[1:], "r": 2, "lora_alpha": 32},
    "router": {"target_modules": [], "target_parameters": ["gate.weight"], "r": 2, "lora_alpha": 32},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["experts", "gate"]},
}


def of_family(options: dict[str, Any], family: str) -> dict[str, Any]:
    """`options` with the family's own name of its router."""
    text = (
        json.dumps(options).replace("gate.weight", f"{ROUTER[family]}.weight").replace('"gate"', f'"{ROUTER[family]}"')
    )
    return json.loads(text)


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_merged_weights_equal_pefts(options: dict[str, Any], family: str, tmp_path: Path) -> None:
    model = mixture(BLOCKS[family]())
    options = of_family(options, family)
    adapter = load(saved(tmp_path, model, **options), layers := layers_of(model))
    state = dict(model.state_dict())
    merge_into(state, adapter.deltas.values(), layers)
    expected = merged(model, tmp_path).state_dict()
    assert state.keys() == expected.keys()
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=1e-6, rtol=1e-5, msg=name)


@settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(
    st.sampled_from(list(BLOCKS)),
    st.lists(st.sampled_from([*BOTH, "mlp.gate.weight"]), min_size=1, unique=True),
    st.sampled_from([[], ["q_proj"]]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.booleans(),
    st.dictionaries(
        st.sampled_from(["down_proj", "experts.gate_up_proj", r".*gate\.weight"]), st.integers(1, 5), max_size=2
    ),
)
def test_any_config_on_experts(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    parameters: list[str],
    modules: list[str],
    rank: int,
    alpha: int,
    use_rslora: bool,
    pattern: dict[str, int],
) -> None:
    options = {
        "target_modules": modules,
        "target_parameters": parameters,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": use_rslora,
        "rank_pattern": pattern,
        "alpha_pattern": {key: value + 1 for key, value in pattern.items()},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        test_merged_weights_equal_pefts(options, family, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("mode", ["factored", "fused"])
@pytest.mark.parametrize(
    ("family", "implementation", "dtype"),
    [
        ("qwen", "eager", torch.float32),
        ("qwen", "grouped_mm", torch.float32),
        ("aria", "eager", torch.float64),
        ("llama4", None, torch.float64),
    ],
)
def test_mixed_tokens_equal_merged_models(
    family: str, implementation: str | None, dtype: torch.dtype, mode: ApplyMode, tmp_path: Path
) -> None:
    """Tokens of all adapters and of none in one call, and each adapter alone, are what PEFT's merged models give."""
    block = BLOCKS[family]
    model = mixture(block() if implementation is None else block(implementation))  # type: ignore[call-arg]
    configs = [of_family(options, family) for options in CONFIGS.values()]
    folders = [saved(tmp_path / str(index), model, index, **options) for index, options in enumerate(configs)]
    layers = layers_of(model.to(dtype))
    adapters = [None, *(load(folder, layers, dtype) for folder in folders), None]
    references = [model, *(merged(model, folder) for folder in folders), model]
    counts = [3, 7, 1, 4, 2, 5, 6, 2]
    x = torch.randn(1, sum(counts), WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = [one(part) for one, part in zip(references, x.split(counts, dim=1), strict=True)]
    alone = [one(x) for one in references]
    base = model(x)
    ctx = RoutingContext()
    wrapped = wrap_layers(model, layers.specs.values(), ctx, {}, CostModel(mode))
    with ctx.text(segments(counts, adapters)):
        torch.testing.assert_close(model(x), torch.cat(expected, dim=1), atol=2e-5, rtol=1e-5)
    for adapter, own in zip(adapters, alone, strict=True):
        with ctx.text(segments([x.shape[1]], [adapter])):
            torch.testing.assert_close(model(x), own, atol=2e-5, rtol=1e-5)
    for own in alone[1:-1]:
        assert (own - base).abs().max() > 0.01
    wrapped.unwrap()
    assert torch.equal(model(x), base)


def per_expert(rank: int, seed: int, prefix: str = "base_model.model.mlp") -> dict[str, torch.Tensor]:
    """Factors of every expert's own linear layers; expert 1 has none, expert 2 only those of `up_proj`."""
    generator = torch.Generator().manual_seed(seed)
    sides = {"gate_proj": (WIDTH, INNER), "up_proj": (WIDTH, INNER), "down_proj": (INNER, WIDTH)}
    return {
        f"{prefix}.experts.{expert}.{leaf}.lora_{slot}.weight": 0.3 * torch.randn(shape, generator=generator)
        for expert in range(EXPERTS)
        for leaf, (inputs, out) in sides.items()
        for slot, shape in (("A", (rank, inputs)), ("B", (out, rank)))
        if expert != 1 and (expert != 2 or leaf == "up_proj")
    }


def test_one_expert_at_a_time(tmp_path: Path) -> None:
    """What the definition says: every expert's part of the weight gets its own update."""
    model = mixture()
    tensors = per_expert(rank=2, seed=0)
    adapter, report = load_adapter(
        write_adapter(tmp_path, tensors, written_config(r=2, lora_alpha=6, alpha_pattern={"up_proj": 8})),
        layers := layers_of(model),
        name="a",
        dtype=torch.float32,
        device="cpu",
    )
    assert report.num_tensors == len(tensors)
    state = dict(model.state_dict())
    merge_into(state, adapter.deltas.values(), layers)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for name in tensors:
        if ".lora_A." in name:
            expert, leaf = int(name.split(".")[4]), name.split(".")[5]
            update = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            rows = slice(INNER, 2 * INNER) if leaf == "up_proj" else slice(0, INNER if leaf == "gate_proj" else WIDTH)
            parameter = "down_proj" if leaf == "down_proj" else "gate_up_proj"
            expected[f"mlp.experts.{parameter}"][expert, rows] += (4.0 if leaf == "up_proj" else 3.0) * update
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=1e-6, rtol=1e-5, msg=name)


def test_one_expert_at_a_time_as_peft_converts_it(tmp_path: Path) -> None:
    """A family whose experts were modules once: PEFT stacks such a file's factors, with transformers' tables."""
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=6,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    prefix = "base_model.model.model.layers.0.mlp"
    sides = {"gate_proj": (WIDTH, INNER), "up_proj": (WIDTH, INNER), "down_proj": (INNER, WIDTH)}
    tensors = {
        f"{prefix}.experts.{expert}.{leaf}.lora_{slot}.weight": torch.randn(shape, generator=generator)
        for expert in range(EXPERTS)
        for leaf, (inputs, out) in sides.items()
        for slot, shape in (("A", (2, inputs)), ("B", (out, 2)))
    }
    write_adapter(tmp_path, tensors, written_config(r=2, lora_alpha=4, target_modules=list(sides)))
    layers = layers_of(model, renamer(model))
    adapter = load(tmp_path, layers)
    state = dict(model.state_dict())
    merge_into(state, adapter.deltas.values(), layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = merged(model, tmp_path).state_dict()
    changed = 0
    for name in state:
        torch.testing.assert_close(state[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)
        changed += not torch.equal(state[name], model.state_dict()[name])
    assert changed == 2


def test_older_pefts_order_of_sides(tmp_path: Path) -> None:
    """PEFT that took an expert's outputs for its inputs: the same update under swapped roles."""
    model = mixture()
    folder = saved(tmp_path / "new", model, **CONFIGS["down"] | {"target_modules": []})
    new = load(folder, layers := layers_of(model))
    tensors = load_file(folder / "adapter_model.safetensors")
    (a_name, a), (b_name, b) = sorted(tensors.items())
    rank = a.shape[0] // EXPERTS
    # The same delta, read as (experts, inputs, outputs) with inputs and outputs exchanged.
    swapped = {
        a_name: b.reshape(-1, rank, EXPERTS).permute(2, 1, 0).reshape(rank * EXPERTS, -1),
        b_name: a.reshape(EXPERTS, rank, -1).permute(2, 1, 0).reshape(-1, rank * EXPERTS),
    }
    old = tmp_path / "old"
    old.mkdir()
    (old / "adapter_config.json").write_text((folder / "adapter_config.json").read_text())
    save_file({name: value.contiguous() for name, value in swapped.items()}, old / "adapter_model.safetensors")
    assert load(old, layers).digests == new.digests


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {k.replace("experts.4", "experts.7"): v for k, v in t.items()}, "experts 0 to 4"),
        (lambda t: {k: v[:, :-1] if k.endswith("A.weight") else v for k, v in t.items()}, "the model's expert has"),
        (lambda t: {k: torch.cat([v, v], 0 if "lora_A" in k else 1) for k, v in t.items()}, "rank 4 in the file, 2"),
        (lambda t: t | {"base_model.model.mlp.experts.lora_A.weight": torch.ones(10, INNER)}, "no lora_B"),
        (
            lambda t: {
                "base_model.model.mlp.experts.lora_A.weight": torch.ones(5, INNER),
                "base_model.model.mlp.experts.lora_B.weight": torch.ones(WIDTH, 5),
            },
            "rank 5 in the file for 5 experts, 2 for each",
        ),
        (
            lambda t: {
                "base_model.model.mlp.experts.lora_A.weight": torch.ones(10, 3),
                "base_model.model.mlp.experts.lora_B.weight": torch.ones(WIDTH, 10),
            },
            "of all experts",
        ),
        (
            lambda t: (
                t
                | {
                    "base_model.model.mlp.experts.lora_A.weight": torch.ones(10, INNER),
                    "base_model.model.mlp.experts.lora_B.weight": torch.ones(WIDTH, 10),
                }
            ),
            "are the same layer mlp.experts.down_proj",
        ),
    ],
)
def test_wrong_experts(change: Any, words: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, {k: v.contiguous() for k, v in change(per_expert(2, 0)).items()}, written_config(r=2))
    with pytest.raises(AdapterMismatchError) as caught:
        load(tmp_path, layers_of(mixture()))
    assert words in str(caught.value)
