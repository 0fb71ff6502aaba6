"""What `peers.py` and `vllm_prefill.py` run in vLLM's own environment: lines of JSON in, a line of JSON back for each.

It imports nothing of polylens. The first line is a job: model, adapter (or null), how adapters are applied, length
limits. Every other line is a batch of requests (prompt, picture file, number of tokens), timed from the moment it is
handed in, its pictures not yet processed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

LORA_FLAGS: dict[str, dict[str, Any]] = {
    "vllm": {"enable_tower_connector_lora": True},
    "polylens": {"worker_cls": "polylens.hosts.vllm.Worker"},
}
"""Of a job's "lora": vLLM's own LoRA, or polylens' worker."""


def main() -> None:
    job = json.loads(sys.stdin.readline())
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
    )
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed meanwhile is no answer
    import torch
    import vllm
    from vllm import LLM

    torch.set_num_threads(job["threads"])
    flags = {
        "dtype": "float32",
        "enforce_eager": job["eager"],
        "max_model_len": job["max_model_len"],
        "max_num_batched_tokens": job["max_model_len"],
        "max_num_seqs": 8,
        "limit_mm_per_prompt": {"image": 1},
        "mm_processor_cache_gb": 0,
        "enable_prefix_caching": False,
    }
    if job["adapter"]:
        flags |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": job["rank"], **LORA_FLAGS[job["lora"]]}
    llm = LLM(job["model"], **flags)
    _answer(answers, {"version": vllm.__version__, "torch": torch.__version__, "flags": flags})
    while line := sys.stdin.readline():
        seconds, tokens = _run(llm, json.loads(line), job["adapter"])
        _answer(answers, {"seconds": seconds, "tokens": tokens})
    answers.close()


def _run(llm: Any, batch: list[dict], adapter: str | None) -> tuple[float, list[list[int]]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    inputs = [{"prompt": one["prompt"], **_media(one)} for one in batch]
    sampling = [SamplingParams(temperature=0, max_tokens=one["tokens"], ignore_eos=True) for one in batch]
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    start = time.perf_counter()
    outputs = llm.generate(inputs, sampling, lora_request=lora, use_tqdm=False)
    return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]


def _media(one: dict) -> dict[str, Any]:
    from PIL import Image

    if one["picture"] is None:
        return {}
    return {"multi_modal_data": {"image": Image.open(one["picture"]).convert("RGB")}}


def _answer(answers: Any, content: dict[str, Any]) -> None:
    print(json.dumps(content), file=answers, flush=True)


main()
