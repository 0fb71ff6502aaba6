"""What `peers.py` runs in vLLM's own environment: one job in as JSON, its answer out.

It imports nothing of polylens. A job: model, adapter (or null), length limits, and requests (prompt, picture file,
number of tokens). Every request is timed from the moment it is handed in, its picture not yet processed.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    job = json.load(sys.stdin)
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
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

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
    lora = None
    if job["adapter"]:
        flags |= {"enable_lora": True, "enable_tower_connector_lora": True, "max_loras": 1}
        flags |= {"max_lora_rank": job["rank"]}
        lora = LoRARequest("adapter", 1, job["adapter"])
    llm = LLM(job["model"], **flags)

    def run(batch: list[dict]) -> tuple[float, list[list[int]]]:
        inputs = [{"prompt": one["prompt"], **_media(one, Image)} for one in batch]
        sampling = [SamplingParams(temperature=0, max_tokens=one["tokens"], ignore_eos=True) for one in batch]
        start = time.perf_counter()
        outputs = llm.generate(inputs, sampling, lora_request=lora, use_tqdm=False)
        return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]

    result = {"version": vllm.__version__, "torch": torch.__version__, "flags": flags, "runs": []}
    run(job["warm_up"])
    for rounds in job["batches"]:
        times, tokens = [], []
        for batch in rounds:
            took, tokens = run(batch)
            times.append(took)
        result["runs"].append({"times": times, "tokens": tokens})
    json.dump(result, answers)
    answers.close()


def _media(one: dict, image_module) -> dict:
    if one["picture"] is None:
        return {}
    return {"multi_modal_data": {"image": image_module.open(one["picture"]).convert("RGB")}}


main()
