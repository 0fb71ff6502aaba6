"""The worker for GPUs and the V2 model runner, as far as a machine without a GPU can tell.

`python -m tests.hosts.vllm.gpu`. vLLM's own classes take part wherever they can be made without CUDA; the rest are
fakes of what they call. Nothing here has run on a GPU.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from polylens.errors import ModelLoadError
from polylens.hosts.vllm import front, runner, runner_v2, worker
from polylens.hosts.vllm.encoder import EncoderCalls
from polylens.hosts.vllm.names import content_id

A, B = content_id("a"), content_id("b")
WIDTH = 4


class Platform:
    def __init__(self, name: str) -> None:
        self._name = name

    def is_cpu(self) -> bool:
        return self._name == "cpu"

    def is_cuda(self) -> bool:
        return self._name == "cuda"


def the_worker_is_chosen_by_the_platform() -> None:
    for name, module in (("cuda", "gpu_worker"), ("cpu", "cpu_worker")):
        with mock.patch.object(worker, "current_platform", Platform(name)):
            assert worker.platform_worker().__module__.endswith(module)
    with mock.patch.object(worker, "current_platform", Platform("tpu")):
        assert_raises(worker.platform_worker, "CUDA GPUs")


def the_seams_of_the_gpu_worker_and_of_both_runners_are_there() -> None:
    assert issubclass(worker.make_worker(GPUWorker), GPUWorker)
    runner.check_runner(RunnerV1)
    runner_v2.check_runner(RunnerV2)


def a_changed_runner_is_noticed() -> None:
    class Changed(RunnerV2):
        def load_lora_model(self, model: Any) -> Any: ...  # type: ignore[override]

    assert_raises(lambda: runner_v2.check_runner(Changed), "has no parameter 'vllm_config'")


def a_front_process_that_was_left_as_it_is_is_noticed() -> None:
    with mock.patch.object(InputProcessor, "_polylens_installed", False, create=True):
        assert_raises(front.check_installed, "add 'polylens' to VLLM_PLUGINS")
        with mock.patch.object(InputProcessor, "_get_mm_identifier", lambda self, mm_hash: mm_hash):
            assert_raises(front.check_installed, "_get_mm_identifier")


def the_gpu_workers_runner_becomes_ours() -> None:
    for base, mixin in ((RunnerV1, runner.AdapterRunnerMixin), (RunnerV2, runner_v2.AdapterRunnerV2Mixin)):

        class Fake(GPUWorker):
            def __init__(self, *args: Any) -> None: ...

            def init_device(self, base: type = base) -> None:
                self.model_runner = object.__new__(base)

        ours = object.__new__(worker.make_worker(Fake))
        ours.init_device()
        assert type(ours.model_runner).__mro__[1:4] == (mixin, runner.LoadsAdapters, base)


def memory_is_kept_for_adapters() -> None:
    class Fake(GPUWorker):
        def determine_available_memory(self) -> int:
            return 1000

    ours = object.__new__(worker.make_worker(Fake))
    ours.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(reserved_bytes=300))
    for asked, left in ((None, 700), (1000, 1000)):
        ours.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=asked))
        assert ours.determine_available_memory() == left


def numbers_of_62_bits_pass_through_vllms_state() -> None:
    ours = object.__new__(type("Ours", (runner_v2.AdapterRunnerV2Mixin, RunnerV2), {}))
    ours.lora_state = LoraState(3)
    with mock.patch.object(runner.LoadsAdapters, "load_lora_model", lambda self, model, *_: model):
        ours.load_lora_model(None, None, None)
    ours.lora_state.add_request("one", 0, request("a", A))
    ours.lora_state.add_request("two", 1, None)
    ours.lora_state.add_request("three", 2, request("b", B))
    seen = []
    ours.lora_manager = SimpleNamespace(set_active_adapters=lambda *given: seen.append(given), adapter=str)
    rows = ours.lora_state.make_lora_inputs(["two", "one", "three"], np.array([1, 0, 2]), np.array([2, 1, 3]))
    ours._set_active_loras(*rows)
    ((requests, mapping),) = seen
    assert {one.lora_int_id for one in requests} == {A, B}
    assert isinstance(mapping, LoRAMapping)
    assert tuple(mapping.index_mapping) == (0, 0, A, B, B, B)
    assert tuple(mapping.prompt_mapping) == (0, A, B)
    assert [ours.adapter_of(one) for one in ("one", "two", "three")] == [str(A), None, str(B)]


def encoder_calls_of_the_v2_runner_know_whose_items_they_hold() -> None:
    """Two requests' pictures and a video, a cached and a skipped item: one call a modality, in the adapters' order."""
    found = encoder(mixed=True)
    hashes, pairs = found.runner.prepare_mm_inputs({"one": [0, 1], "two": [0, 1, 2], "three": [0]})
    features = found.runner.execute_mm_encoder(pairs)
    assert found.calls == [(["A", "A", "b"], [1.0, 2.0, 5.0]), (["b"], [3.0])]
    assert {name: feature[0, 0].item() for name, feature in zip(hashes, features, strict=True)} == {
        "one-0": 1.0, "one-1": 2.0, "two-0": 3.0, "three-0": 5.0,
    }  # fmt: skip
    assert found.adapted.group == ((), ())


def where_adapters_may_not_mix_each_has_a_call_of_its_own() -> None:
    found = encoder(mixed=False)
    _, pairs = found.runner.prepare_mm_inputs({"one": [0, 1], "two": [0, 1, 2], "three": [0]})
    found.runner.execute_mm_encoder(pairs)
    assert found.calls == [(["A", "A"], [1.0, 2.0]), (["b"], [5.0]), (["b"], [3.0])]


def vllms_own_items_are_the_base_models() -> None:
    found = encoder(mixed=True)
    features = found.runner.execute_mm_encoder([("image", item(7.0))])
    assert found.calls == [([], [7.0])]
    assert features[0][0, 0].item() == 7.0


def request(name: str, number: int) -> LoRARequest:
    return LoRARequest(name, number, "/nowhere")


def item(value: float) -> MultiModalKwargsItem:
    element = MultiModalFieldElem(data=torch.full((1, WIDTH), value), field=MultiModalBatchedField())
    return MultiModalKwargsItem({"pixel_values": element})


def feature(name: str, modality: str, value: float | None) -> MultiModalFeatureSpec:
    data = None if value is None else item(value)
    return MultiModalFeatureSpec(
        data=data, modality=modality, identifier=name, mm_position=PlaceholderRange(offset=0, length=1)
    )


@dataclass(frozen=True)
class Owner:
    """As much of an adapter as is asked for."""

    name: str
    undivided: bool = False

    def __str__(self) -> str:
        return self.name


class Adapted:
    """`AdaptedModel`'s part in it."""

    def __init__(self, *, mixed: bool) -> None:
        self.group: Any = ((), ())
        self._mixed = mixed

    def set_encoder_rows(self, items: Any, adapters: Any) -> None:
        self.group = (items, adapters)

    def may_mix(self, modality: str) -> bool:
        return self._mixed


def encoder(*, mixed: bool) -> Any:
    """vLLM's `EncoderRunner` over a model that notes its calls."""
    adapted, calls = Adapted(mixed=mixed), []

    class Model:
        def embed_multimodal(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
            items, owners = adapted.group
            values = pixel_values[:, 0, 0].tolist()
            assert [one.data["pixel_values"].data[0, 0].item() for one in items] == (values if items else [])
            calls.append(([str(owner) for owner in owners], values))
            return list(pixel_values)

    cache = EncoderCache()
    cache.add_request("one", [feature("one-0", "image", 1.0), feature("one-1", "image", 2.0)])
    cache.add_request(
        "two", [feature("two-0", "video", 3.0), feature("two-1", "image", None), feature("two-2", "image", 4.0)]
    )
    cache.add_request("three", [feature("three-0", "image", 5.0)])
    cache.encoder_outputs["two-2"] = torch.zeros(1, WIDTH)
    made = EncoderRunner(Model(), 8, WIDTH, cache, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    owners = {"one": Owner("A"), "two": Owner("b"), "three": Owner("b")}
    runner_v2.adapt_encoder_runner(
        made,
        SimpleNamespace(encoder_calls=EncoderCalls(adapted), adapter_of=owners.__getitem__),  # type: ignore[arg-type]
    )
    return SimpleNamespace(runner=made, calls=calls, adapted=adapted)


def assert_raises(call: Callable[[], Any], words: str) -> None:
    said = ""
    try:
        call()
    except ModelLoadError as error:
        said = str(error)
    assert words in said, f"raised: {said!r}"


@contextmanager
def told(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  # every check is to be seen
        print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
        traceback.print_exc(file=sys.stdout)
    else:
        print(f"ok {name}", flush=True)


CHECKS = (
    the_worker_is_chosen_by_the_platform,
    the_seams_of_the_gpu_worker_and_of_both_runners_are_there,
    a_changed_runner_is_noticed,
    a_front_process_that_was_left_as_it_is_is_noticed,
    the_gpu_workers_runner_becomes_ours,
    memory_is_kept_for_adapters,
    numbers_of_62_bits_pass_through_vllms_state,
    encoder_calls_of_the_v2_runner_know_whose_items_they_hold,
    where_adapters_may_not_mix_each_has_a_call_of_its_own,
    vllms_own_items_are_the_base_models,
)

if __name__ == "__main__":
    for check in CHECKS:
        with told(check.__name__):
            check()
