"""vLLM's own worker and manager over polylens' CPU operations: `python -m tests.hosts.vllm.stock FOLDER`.

The same mixed batches as `inside`, with base rows in them, which vLLM's own operations give the last slot's adapter.
Of adapters that vLLM itself takes: it refuses `a`, which has the output head.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
)
os.environ.setdefault("POLYLENS_VLLM_CPU_LORA", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from tests.hosts.vllm.media import picture

NAMES = ("base", "v", "l")
MAX_LOGPROB_ERROR = 1e-3


def main(folder: Path) -> int:
    stored = torch.load(folder / "answers.pt", weights_only=False)
    llm = LLM(
        str(folder / "model"),
        dtype="float32",
        enforce_eager=True,
        enable_lora=True,
        enable_tower_connector_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_model_len=1024,
        limit_mm_per_prompt={"image": 1, "video": 0},
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    wrong = 0
    for round_, order in enumerate(itertools.permutations(NAMES)):
        llm.llm_engine.reset_encoder_cache()
        request = {"prompt": stored["prompts"]["image", 0], "multi_modal_data": {"image": picture(0)}}
        loras = [None if name == "base" else LoRARequest(name, NAMES.index(name), str(folder / name)) for name in order]
        outputs = llm.generate([request] * len(order), sampling, lora_request=loras, use_tqdm=False)
        for name, output in zip(order, outputs, strict=True):
            token_ids, logprobs = stored["answers"][name, "image", 0]
            got = output.outputs[0]
            error = max(
                (abs(got.logprobs[i][t].logprob - logprobs[i, t].item()) if t in got.logprobs[i] else 9.0)
                for i, t in enumerate(token_ids)
            )
            if list(got.token_ids) != list(token_ids) or error > MAX_LOGPROB_ERROR:
                wrong += 1
                print(f"order {round_} {order}: {name} differs from its merged model by {error:.1e}")
    print(f"{wrong} wrong answers of 18", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)
