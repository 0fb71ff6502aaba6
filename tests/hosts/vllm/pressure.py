"""vLLM's engine under pressure: `python -m tests.hosts.vllm.pressure FOLDER`.

Few pages, small steps and fewer adapters at once than are asked for, so that prompts come in chunks, requests are
preempted, wait for adapters, end early and meet cached pages. FOLDER is a family's, as `checkpoints.prepare` wrote it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from tests.hosts.vllm.inside import ADAPTERS, Inside, finish, prompt_logprobs_of_changed_heads
from tests.hosts.vllm.stepwise import SAMPLING, Key, Requests, replaced

BLOCK_SIZE = 32
"""The least that vLLM's attention takes on CPUs."""
NUM_STEP_TOKENS = 44
"""Pictures' tokens lie across such borders; `prompts_in_chunks` looks. As many encoder rows are kept: with room for one
picture only, vLLM does not get on with two that adjoin (Gemma 3's)."""
MAX_LORAS = 2
NUM_LEFT_PAGES = 8
"""For `preempted_requests`: of as many requests as run at once, most want two."""

OPTIONS: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 8,
    "max_num_batched_tokens": NUM_STEP_TOKENS,
    "max_loras": MAX_LORAS,
    "max_cpu_loras": MAX_LORAS,
    "scheduler_reserve_full_isl": False,  # else no request begins for whose whole prompt there is no room
}

EVERYBODY = ("base", *ADAPTERS)


def scheduler(inside: Inside) -> Any:
    return inside.llm.llm_engine.engine_core.engine_core.scheduler


def everything(inside: Inside) -> list[Key]:
    return [(name, kind, index) for index in (0, 1) for kind in inside.kinds for name in EVERYBODY]


def prompts_in_chunks(inside: Inside) -> None:
    """Base and three adapters, whose prompts' pictures lie across the borders of steps."""
    seen = []

    def noting(schedule: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = schedule(*args, **kwargs)
            running = {request.request_id: request for request in scheduler(inside).running}
            for request_id, num_tokens in result.num_scheduled_tokens.items():
                end = running[request_id].num_computed_tokens
                seen.extend(
                    place.mm_position
                    for place in running[request_id].mm_features
                    if place.mm_position.offset < end < place.mm_position.offset + place.mm_position.length
                    and num_tokens > 1
                )
            return result

        return noted

    inside.forget()
    with replaced(scheduler(inside), "schedule", noting):
        inside.check(everything(inside))
    assert seen, "no picture lay across a border of steps"
    print(f"   {len(seen)} times a picture lay across a border of steps")


def cached_prompts(inside: Inside) -> None:
    """Pages and encoder rows of earlier requests are met by the same adapter's only, whoever came first."""
    inside.forget()
    kind = "images" if "images" in inside.kinds else "image"
    wanted = [(name, kind, 0) for name in EVERYBODY]
    for _ in range(2):
        outputs = inside.llm.generate(
            [inside.request(kind, index) for _, kind, index in wanted],
            SAMPLING,
            lora_request=[inside.adapter(name) for name, _, _ in wanted],
            use_tqdm=False,
            tokenization_kwargs=inside.tokenizing,
        )
        for key, output in zip(wanted, outputs, strict=True):
            inside.compare(key, output.outputs[0])
        cached = [output.num_cached_tokens for output in outputs]
    assert all(cached), f"nothing was cached: {cached}"
    inside.check(list(reversed(wanted)))


def preempted_requests(inside: Inside) -> None:
    """Pages for fewer requests than run: some lose theirs and are computed anew."""
    preempted = []

    def noting(preempt: Any) -> Any:
        return lambda request, *args, **kwargs: preempted.append(request) or preempt(request, *args, **kwargs)

    inside.forget()
    pool = scheduler(inside).kv_cache_manager.block_pool
    held = pool.get_new_blocks(pool.get_num_free_blocks() - NUM_LEFT_PAGES)
    try:
        with replaced(scheduler(inside), "_preempt_request", noting):
            inside.check(everything(inside))
    finally:
        pool.free_blocks(held)
    assert preempted, "no request was preempted"
    print(f"   {len(preempted)} times a request was preempted")


def aborted_requests(inside: Inside) -> None:
    """Clients that go while their picture is being encoded, or while they wait: the others' answers are right."""
    for gone in (("a", "image", 0), ("v", "image", 1), ("base", "image", 0)):
        inside.forget()
        requests = Requests(inside)
        for key in [(name, "image", index) for index in (0, 1) for name in EVERYBODY]:
            requests.add(key)

        def aborting(embed: Any, requests: Requests = requests, gone: Key = gone) -> Any:
            def embedded(**kwargs: Any) -> Any:
                if gone in requests.running:
                    requests.engine.abort_request([requests.running.pop(gone)], internal=True)
                return embed(**kwargs)

            return embedded

        with replaced(inside.runner.model, "embed_multimodal", aborting):
            requests.finish()
        assert gone not in requests.done, f"{gone} was not aborted"
        assert len(requests.done) == 2 * len(EVERYBODY) - 1
    inside.check([("a", "image", 0), ("v", "image", 1), ("base", "image", 0)])


def more_adapters_than_run_at_once(inside: Inside) -> None:
    """Adapters wait for their turn, and are loaded again after others took their place."""
    running = []

    def noting(activate: Any) -> Any:
        def noted(requests: Any, mapping: Any) -> Any:
            running.append(len(requests))
            return activate(requests, mapping)

        return noted

    inside.forget()
    with replaced(inside.runner.lora_manager, "set_active_adapters", noting):
        inside.check([(name, "text", index) for index in (0, 1) for name in EVERYBODY])
        for name in (*ADAPTERS, *ADAPTERS):
            inside.check([(name, "image", 0)])
    assert max(running) == MAX_LORAS < len(ADAPTERS)
    assert len(inside.runner.lora_manager.list_adapters()) <= MAX_LORAS


def an_adapter_that_waits_for_the_encoder(inside: Inside) -> None:
    """Its request has begun; others take its place in a step, and then all of them run, more than `MAX_LORAS`."""
    inside.forget()
    requests, held, running = Requests(inside), [], []

    def holding(schedule_inputs: Any) -> Any:
        def scheduled(request: Any, num_computed: int, num_new: int, budget: int, *args: Any, **kwargs: Any) -> Any:
            if request.request_id == requests.running["a", "image", 0] and num_computed and len(held) < 2:
                held.append(request)
                return [], 0, budget, [], []
            return schedule_inputs(request, num_computed, num_new, budget, *args, **kwargs)

        return scheduled

    def noting(activate: Any) -> Any:
        return lambda loras, mapping: running.append(len(loras)) or activate(loras, mapping)

    requests.add(("a", "image", 0))
    with replaced(scheduler(inside), "_try_schedule_encoder_inputs", holding):
        with replaced(scheduler(inside), "max_num_scheduled_tokens", lambda _: 20):
            requests.step()
        for name in ("v", "l"):
            requests.add((name, "text", 0))
        with replaced(inside.runner.lora_manager, "set_active_adapters", noting):
            requests.finish()
    assert held, "nothing was held back"
    assert max(running) > MAX_LORAS
    assert len(requests.done) == 3


def adapters_removed_while_their_requests_run(inside: Inside) -> None:
    """Also with their folder: requests that have begun, or wait, are answered as when they came."""
    place = inside.folder / "removed"
    inside.forget()
    requests = Requests(inside)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(inside.folder / "a", place)
    lora = LoRARequest("removed", 11, str(place))
    requests.engine.add_lora(lora)
    for index in (0, 1):
        requests.add(("a", "image", index), lora)
        requests.add(("l", "image", index))
    for step in range(6):
        requests.step()
        if step == 2:
            shutil.rmtree(place)
        for number in requests.engine.list_loras():
            requests.engine.remove_lora(number)
    requests.finish()
    assert len(requests.done) == 4


def names_and_numbers_given_twice(inside: Inside) -> None:
    """Who gives one name, or one number, to two adapters in one batch gets each of them."""
    inside.forget()
    requests = Requests(inside)
    for name in ("a", "v"):
        requests.add((name, "image", 0), LoRARequest("same", 20, str(inside.folder / name)))
        requests.add((name, "text", 0), LoRARequest(f"{name}-named", 21, str(inside.folder / name)))
    requests.finish()
    assert len(requests.done) == 4


def what_no_adapter_may_be(inside: Inside) -> None:
    """Each fails its own request before it is queued, and the next ones are answered."""
    wrong = {
        "base": "a",
        " spaces ": "a",
        "two\nlines": "a",
        "a@polylens-00000000000000000000000000000000": "a",
        "of a file": "model/config.json",
        "of nothing": "nowhere",
        "of a model": "model",
        "out of here": "../../../../../../etc",
    }
    for name, path in wrong.items():
        said = ""
        try:
            inside.generate([inside.request("text", 0)], SAMPLING, [LoRARequest(name, 30, str(inside.folder / path))])
        except ValueError as error:
            said = str(error)
        assert "adapter" in said, f"{name!r} of {path!r} was served, or failed otherwise: {said!r}"
        assert "\n" not in said
    inside.check([("a", "image", 0), ("base", "text", 0)])


CHECKS: Sequence[Callable[[Inside], None]] = (
    prompts_in_chunks,
    prompt_logprobs_of_changed_heads,
    cached_prompts,
    preempted_requests,
    aborted_requests,
    more_adapters_than_run_at_once,
    an_adapter_that_waits_for_the_encoder,
    adapters_removed_while_their_requests_run,
    names_and_numbers_given_twice,
    what_no_adapter_may_be,
)

if __name__ == "__main__":
    finish(Inside(Path(sys.argv[1]), **OPTIONS), CHECKS)
