"""Checks that run inside vLLM's own venv, many of them a start of vLLM: `python -m tests.hosts.vllm.inside FOLDER`.

FOLDER is one family's, as `checkpoints.prepare` wrote it. Prints one line for each check and ends with status 1 if one
fails.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
)

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from tests.hosts.vllm.media import picture, video
from tests.hosts.vllm.stepwise import SAMPLING, Requests, replaced

ADAPTERS = ("a", "v", "l")
MAX_LOGPROB_ERROR = 1e-3
"""Of a chosen token's log-probability against the reference's, in float32: rounding of other kernels."""
MIN_RATIO = 4
"""In bfloat16: how much farther the nearest other adapter's answer is than rounding."""


class Inside:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        stored = torch.load(folder / "answers.pt", weights_only=False)
        self.kinds, self.answers, self.prompts = stored["kinds"], stored["answers"], stored["prompts"]
        self.special = sorted({name for name, _, _ in self.answers} - {"base", *ADAPTERS})
        limits = {"image": 2} | ({"video": 1} if "video" in self.kinds else {})
        given: dict[str, Any] = {
            "worker_cls": "polylens.hosts.vllm.Worker",
            "dtype": "float32",
            "enforce_eager": True,
            "enable_lora": True,
            "max_loras": 4,
            "max_cpu_loras": 4,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "limit_mm_per_prompt": limits,
            "enable_prefix_caching": True,
        }
        self.llm = LLM(str(folder / "model"), **{**given, **options})
        first = self.llm.get_tokenizer().bos_token
        # transformers adds none to a template's text that begins with it; vLLM, given text, would add a second one.
        self.tokenizing = {"add_special_tokens": not (first and self.prompts["text", 0].startswith(first))}
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner

    def request(self, kind: str, index: int) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": self.prompts[kind, index]}
        if kind == "image":
            prompt["multi_modal_data"] = {"image": picture(index)}
        elif kind == "images":
            prompt["multi_modal_data"] = {"image": [picture(index), picture(index + 1)]}
        elif kind == "video":
            prompt["multi_modal_data"] = {"video": (video(index), video_facts(index))}
        return prompt

    def run(self, wanted: Sequence[tuple[str, str, int]]) -> list[Any]:
        """Answers of (adapter or "base", kind, index), all in one batch."""
        requests = [self.request(kind, index) for _, kind, index in wanted]
        adapters = [self.adapter(name) for name, _, _ in wanted]
        return self.generate(requests, SAMPLING, adapters)

    def generate(self, requests: Sequence[Any], sampling: Any, adapters: Sequence[LoRARequest | None]) -> list[Any]:
        outputs = self.llm.generate(
            requests,
            sampling,
            lora_request=adapters,
            use_tqdm=False,
            tokenization_kwargs=self.tokenizing,
        )
        return [output.outputs[0] for output in outputs]

    def adapter(self, name: str) -> LoRARequest | None:
        if name == "base":
            return None
        known = (*ADAPTERS, *self.special)
        return LoRARequest(name, 1 + known.index(name), str(self.folder / name))

    def check(self, wanted: Sequence[tuple[str, str, int]]) -> None:
        for key, output in zip(wanted, self.run(wanted), strict=True):
            self.compare(key, output)

    def compare(self, key: tuple[str, str, int], output: Any) -> None:
        token_ids, logprobs = self.answers[key]
        assert list(output.token_ids) == list(token_ids), f"{key}: {list(output.token_ids)} is not {list(token_ids)}"
        for step, token_id in enumerate(token_ids):
            ours, theirs = output.logprobs[step][token_id].logprob, logprobs[step, token_id].item()
            assert abs(ours - theirs) <= MAX_LOGPROB_ERROR, f"{key}: token {step} has {ours}, reference {theirs}"

    def forget(self) -> None:
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.runner.reset_encoder_cache()
        self.llm.llm_engine.reset_encoder_cache()


def video_facts(index: int) -> dict[str, Any]:
    num_frames = len(video(index))
    return {
        "fps": 2.0,
        "duration": num_frames / 2.0,
        "total_num_frames": num_frames,
        "frames_indices": list(range(num_frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def rules_are_proven(inside: Inside) -> None:
    adapted = inside.runner.adapted
    print("   rules", {str(rule): list(adapted.rules.values()).count(rule) for rule in set(adapted.rules.values())})
    print("   refused", dict(itertools.islice(adapted.refused.items(), 6)), len(adapted.refused))
    print("   absent", len(adapted.absent), "mixed", sorted(adapted.mixed))
    assert adapted.mixed, "no modality may be mixed"


def rules_are_kept(inside: Inside) -> None:
    """A second start finds the rules that the first one measured, without measuring."""
    from polylens.hosts.vllm import rules
    from polylens.hosts.vllm.base import read_base
    from polylens.hosts.vllm.placement import place_layers

    def probe(*_: Any, **__: Any) -> Any:
        raise AssertionError("probed again")

    adapted, config = inside.runner.adapted, inside.runner.vllm_config.model_config
    base = read_base(config)
    places = {n: p for n, p in place_layers(base, inside.runner.model).places.items() if n in adapted.rules}
    measured, rules.probe_row_rules = rules.probe_row_rules, probe
    try:
        kept = rules.find_encoder_rules(inside.runner.model, config, base.layers.specs, places, inside.runner.device)
    finally:
        rules.probe_row_rules = measured
    assert kept.rules == adapted.rules, "other rules than measured"
    assert kept.mixed == adapted.mixed, "other modalities than measured"


def alone(inside: Inside) -> None:
    for name in ("base", *ADAPTERS):
        for kind in inside.kinds:
            inside.forget()
            inside.check([(name, kind, 0)])


def every_slot_order(inside: Inside) -> None:
    """Base and three adapters in one batch, in every order, nothing cached."""
    for order in itertools.permutations(("base", *ADAPTERS)):
        inside.forget()
        inside.check([(name, "image", 0) for name in order])


def one_order(inside: Inside) -> None:
    """Base and three adapters in one batch, pictures and text, nothing cached."""
    inside.forget()
    inside.check([(name, kind, 0) for name in ("l", "base", "v", "a") for kind in ("image", "text")])


def many_items_in_a_step(inside: Inside) -> None:
    inside.forget()
    inside.check([(name, kind, index) for index in (0, 1) for kind in inside.kinds for name in ("base", *ADAPTERS)])


def image_and_video_in_a_step(inside: Inside) -> None:
    if "video" not in inside.kinds:
        print("   (the family has no videos)")
        return
    for one, other in itertools.permutations(ADAPTERS, 2):
        inside.forget()
        inside.check([(one, "image", 1), (other, "video", 1)])


def one_at_a_time(inside: Inside) -> None:
    """The way that is taken where rules are not proven, or do not hold."""
    adapted = inside.runner.adapted
    before, adapted.mixed = adapted.mixed, frozenset()
    try:
        many_items_in_a_step(inside)
    finally:
        adapted.mixed = before


def a_wrong_rule_ends_no_request(inside: Inside) -> None:
    from polylens.hosts.vllm import model as host_model
    from polylens.models.row_rules import ItemSize, RowRule

    adapted, size_of = inside.runner.adapted, host_model.ItemSize.of
    before = adapted.mixed
    wrong = itertools.count(7)
    host_model.ItemSize.of = lambda item: ItemSize(next(wrong), next(wrong), next(wrong))
    try:
        many_items_in_a_step(inside)
        sized = set(adapted.rules.values()) - {RowRule.IMAGES}  # items of one size whatever they are
        assert not (sized and adapted.mixed), "the wrong sizes were not noticed"
    finally:
        host_model.ItemSize.of, adapted.mixed = size_of, before


def vision_rows_are_shared(inside: Inside) -> None:
    """The encoder does not run again for an adapter that leaves it alone."""
    inside.forget()
    calls = []
    model = inside.runner.model
    embed = model.embed_multimodal
    model.embed_multimodal = lambda **kwargs: calls.append(1) or embed(**kwargs)
    try:
        inside.check([("base", "image", 0)])
        inside.check([("l", "image", 0)])
        assert len(calls) == 1, f"{len(calls)} encoder calls"
        inside.check([("v", "image", 0)])
        assert len(calls) == 2, f"{len(calls)} encoder calls"
    finally:
        model.embed_multimodal = embed


def one_picture_of_many_requests(inside: Inside) -> None:
    """A picture is encoded once for every content of tower and connector, whoever asks and how often."""
    items = []

    def noting(noted: Any) -> Any:
        return lambda pair, num_tokens, owner: items.append(owner) or noted(pair, num_tokens, owner)

    inside.forget()
    shutil.rmtree(inside.folder / "twin", ignore_errors=True)
    shutil.copytree(inside.folder / "v", inside.folder / "twin")
    requests = Requests(inside)
    with replaced(inside.runner.encoder_calls, "note", noting):
        for name in ("v", "v", "base", "l", "a", "a"):
            requests.add((name, "image", 0))
        requests.add(("v", "image", 0), LoRARequest("twin", 12, str(inside.folder / "twin")))
        requests.finish()
    assert len(items) == 3, f"{len(items)} items were encoded: of base and `l`, of `v` and its twin, of `a`"


def replaced_under_one_name(inside: Inside) -> None:
    """Other content under the same name and path: never the old encoder or prefix entries."""
    place = inside.folder / "replaced"
    request = LoRARequest("replaced", 9, str(place))
    for source in ("a", "v", "l", "a"):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(inside.folder / source, place)
        inside.compare((source, "image", 0), inside.generate([inside.request("image", 0)], SAMPLING, [request])[0])


def a_broken_adapter_fails_its_request_only(inside: Inside) -> None:
    from safetensors.torch import load_file, save_file

    place = inside.folder / "broken"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(inside.folder / "a", place)
    tensors = load_file(place / "adapter_model.safetensors")
    tensors["base_model.model.model.no.such.layer.lora_A.weight"] = torch.zeros(4, 8)
    save_file(tensors, place / "adapter_model.safetensors")
    said = ""
    try:
        inside.llm.generate(inside.request("text", 0), lora_request=LoRARequest("b", 8, str(place)), use_tqdm=False)
    except ValueError as error:
        said = str(error)
    assert "no.such.layer" in said, f"a broken adapter was served, or failed otherwise: {said}"
    inside.check([("a", "image", 0), ("base", "text", 0)])


def a_folder_that_changes_before_its_request_is_run(inside: Inside) -> None:
    """The request gets what was there when it arrived; the next one what is there then."""
    place = inside.folder / "meanwhile"
    request = LoRARequest("meanwhile", 10, str(place))
    engine = inside.llm.llm_engine
    for source in ("a", "v"):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(inside.folder / source, place)
        inside.runner.lora_manager.remove_all_adapters()
        asked = inside.request("image", 0)
        engine.add_request(
            f"meanwhile-{source}", asked, SAMPLING, lora_request=request, tokenization_kwargs=inside.tokenizing
        )
        shutil.rmtree(place)
        shutil.copytree(inside.folder / "l", place)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
        inside.compare((source, "image", 0), outputs[0].outputs[0])


def prompt_logprobs_of_changed_heads(inside: Inside) -> None:
    """Of prompts that end with an answer's tokens, which have that answer's log-probabilities; all in one batch."""
    wanted = [name for name in ("base", "head", "a", "head_saved", "l") if (name, "image", 0) in inside.answers]
    prompts = []
    for name in wanted:
        request = inside.request("image", 0)
        token_ids = inside.llm.get_tokenizer().encode(request.pop("prompt"), **inside.tokenizing)
        prompts.append(request | {"prompt_token_ids": [*token_ids, *inside.answers[name, "image", 0][0]]})
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    adapters = [inside.adapter(name) for name in wanted]
    for name, output in zip(
        wanted, inside.llm.generate(prompts, sampling, lora_request=adapters, use_tqdm=False), strict=True
    ):
        token_ids, logprobs = inside.answers[name, "image", 0]
        for step, token_id in enumerate(token_ids):
            ours = output.prompt_logprobs[step - len(token_ids)][token_id].logprob
            theirs = logprobs[step, token_id].item()
            assert abs(ours - theirs) <= MAX_LOGPROB_ERROR, f"{name}: token {step} has {ours}, reference {theirs}"


OLD_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen2_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
    "qwen2_5_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
    "llava": (
        ("lm_head.", "language_model.lm_head."),
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
}
"""Beginnings of module paths, by family: of now, and as transformers 4.4x wrote them."""


def an_adapter_of_old_names(inside: Inside) -> None:
    from safetensors.torch import load_file, save_file

    names = OLD_NAMES.get(inside.folder.name)
    if names is None:
        print("   (its names have not changed, or are of other families here)")
        return
    place = inside.folder / "old"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(inside.folder / "a", place)
    tensors = load_file(place / "adapter_model.safetensors")
    renamed = {_renamed(name, names): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, place / "adapter_model.safetensors")
    inside.forget()
    requests = [inside.request(kind, 0) for kind in inside.kinds]
    outputs = inside.generate(requests, SAMPLING, [LoRARequest("old", 13, str(place))] * len(requests))
    for kind, output in zip(inside.kinds, outputs, strict=True):
        inside.compare(("a", kind, 0), output)


def _renamed(name: str, names: Sequence[tuple[str, str]]) -> str:
    prefix = "base_model.model."
    bare = name.removeprefix(prefix)
    return prefix + next((old + bare.removeprefix(new) for new, old in names if bare.startswith(new)), bare)


REFUSED: dict[str, tuple[str, ...]] = {"qwen3_vl_moe": ("experts", "experts_saved")}
"""Kinds of adapter, by family, that change what vLLM's modules take no change of."""


def special_adapters(inside: Inside) -> None:
    """DoRA, biases, saved modules, head, patch embedding: equal to the merged model, mixed with others, or refused."""
    refused = []
    for name in inside.special:
        try:
            inside.forget()
            inside.check([("base", "image", 0), (name, "image", 0), ("a", "image", 0)])
        except ValueError as error:
            print(f"   {name} refused: {error}")
            refused.append(name)
    assert tuple(sorted(refused)) == REFUSED.get(inside.folder.name, ()), refused


def answers_are_nearest_to_their_own_references(inside: Inside) -> None:
    """Rounded, so not equal; but far nearer to what their own adapter answers than to any other's answer."""
    names = ("l", "base", "v", "a")
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=20, detokenize=False)
    inside.forget()
    requests = [inside.request("image", 0) for _ in names]
    for name, output in zip(
        names, inside.generate(requests, sampling, [inside.adapter(n) for n in names]), strict=True
    ):
        said = output.logprobs[0]
        ours = torch.tensor([entry.logprob for entry in said.values()])
        errors = {n: (ours - inside.answers[n, "image", 0][1][0, list(said)]).abs().mean().item() for n in names}
        own = errors.pop(name)
        print(f"   {name}: off by {own:.3f}, the nearest other by {min(errors.values()):.3f}")
        assert own * MIN_RATIO <= min(errors.values()), f"{name}: off by {own}, others by {errors}"


SHORT: tuple[Callable[[Inside], None], ...] = (
    rules_are_proven,
    rules_are_kept,
    one_order,
    image_and_video_in_a_step,
    vision_rows_are_shared,
    replaced_under_one_name,
    a_broken_adapter_fails_its_request_only,
)
"""For every change of the code: a start of vLLM and a few seconds."""

HALF: tuple[Callable[[Inside], None], ...] = (rules_are_proven, answers_are_nearest_to_their_own_references)
"""In bfloat16, after a start in float32."""

CHECKS: tuple[Callable[[Inside], None], ...] = (
    *SHORT,
    alone,
    every_slot_order,
    many_items_in_a_step,
    one_at_a_time,
    a_wrong_rule_ends_no_request,
    one_picture_of_many_requests,
    a_folder_that_changes_before_its_request_is_run,
    prompt_logprobs_of_changed_heads,
    an_adapter_of_old_names,
    special_adapters,
)


def run_checks(inside: Inside, checks: Sequence[Callable[[Inside], None]]) -> int:
    failed = 0
    for check in checks:
        try:
            check(inside)
        except Exception as error:  # noqa: BLE001  # every check is to be seen, also after one that failed
            failed += 1
            print(f"FAILED {check.__name__}: {type(error).__name__}: {error}", flush=True)
            if os.environ.get("TRACE"):
                import traceback

                traceback.print_exc()
        else:
            print(f"ok {check.__name__}", flush=True)
    return 1 if failed else 0


def finish(inside: Inside, checks: Sequence[Callable[[Inside], None]]) -> NoReturn:
    """Run checks and end the process: vLLM's worker threads need not be waited for."""
    status = run_checks(inside, checks)
    sys.stdout.flush()
    os._exit(status)


MODES: dict[str, tuple[Sequence[Callable[[Inside], None]], dict[str, Any]]] = {
    "": (CHECKS, {}),
    "--short": (SHORT, {}),
    "--half": (HALF, {"dtype": "bfloat16"}),
}
"""What is checked, and the options of vLLM for it."""

if __name__ == "__main__":
    checks, options = MODES["".join(sys.argv[2:])]
    finish(Inside(Path(sys.argv[1]), **options), checks)
