"""Batches, the training loop and free-running evaluation, shared by the base model and the adapters.

What is trained is what is served: prompts come from the saved processor's own chat template and
tokenizer, pixels from its image processor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from transformers import Qwen2_5_VLProcessor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

IGNORED = -100  # label of tokens that carry no loss
PROMPTS = ("What number is shown?", "Which number do you see?", "Read the number.")
# Text-only skills, so that the model also answers without a picture and has seen JSON's tokens.
REPEAT, WRITE_JSON = "Repeat {}.", "Write {} as JSON."


def json_answer(number: int) -> str:
    return f'{{"value": {number}}}'


@dataclass
class Example:
    prompt: str
    answer: str
    image: Image.Image | None = None


class Encoder:
    """Turns examples into model inputs with the processor, its slow parts done once per prompt."""

    def __init__(self, processor: Qwen2_5_VLProcessor) -> None:
        self.processor = processor
        self._prompts: dict[tuple, list[int]] = {}

    @cached_property
    def end_id(self) -> int:
        return self.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")

    @cached_property
    def image_id(self) -> int:
        return self.processor.image_token_id

    def prompt_ids(self, prompt: str, grid: tuple[int, int] | None) -> list[int]:
        """Ids up to and with the assistant's header; `grid` is the picture's (rows, columns) of patches."""
        key = (prompt, grid)
        if key not in self._prompts:
            self._prompts[key] = self._render(prompt, grid)
        return self._prompts[key]

    def _render(self, prompt: str, grid: tuple[int, int] | None) -> list[int]:
        patch = self.processor.image_processor.patch_size
        content = [{"type": "text", "text": prompt}]
        if grid is not None:
            blank = Image.new("RGB", (grid[1] * patch, grid[0] * patch))
            content.insert(0, {"type": "image", "image": blank})
        encoded = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(encoded["input_ids"][0])

    def __call__(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        """Right-padded `input_ids`, `labels` and masks; pixels of the examples that have a picture."""
        pictures = [e.image.convert("RGB") for e in examples if e.image is not None]
        inputs: dict[str, torch.Tensor] = {}
        if pictures:
            inputs.update(self.processor.image_processor(pictures, return_tensors="pt"))
        grids = iter(inputs["image_grid_thw"].tolist() if pictures else [])
        rows, labels = [], []
        for example in examples:
            grid = tuple(next(grids)[1:]) if example.image is not None else None
            prompt = self.prompt_ids(example.prompt, grid)
            answer = [*self.processor.tokenizer(example.answer)["input_ids"], self.end_id]
            rows.append(torch.tensor(prompt + answer))
            labels.append(torch.tensor([IGNORED] * len(prompt) + answer))
        pad = functional.pad
        longest = max(map(len, rows))
        inputs["input_ids"] = torch.stack([pad(r, (0, longest - len(r)), value=0) for r in rows])
        inputs["labels"] = torch.stack([pad(r, (0, longest - len(r)), value=IGNORED) for r in labels])
        lengths = torch.tensor([len(r) for r in rows])
        inputs["attention_mask"] = (torch.arange(longest)[None] < lengths[:, None]).long()
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.image_id).long()
        return inputs


def attend_in_dense_batches() -> None:
    """Training speed only: pictures of one size attend as one dense batch, not one call a picture."""
    ragged = qwen.Qwen2_5_VLVisionAttention.forward

    def forward(self, hidden_states, cu_seqlens, position_embeddings=None, max_seqlen=None, **kwargs):
        lengths = cu_seqlens.diff().tolist()
        if len(set(lengths)) != 1:
            return ragged(self, hidden_states, cu_seqlens, position_embeddings, max_seqlen, **kwargs)
        count, rows = len(lengths), lengths[0]
        q, k, v = self.qkv(hidden_states).reshape(count * rows, 3, self.num_heads, -1).unbind(1)
        q, k = qwen.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        q, k, v = (x.reshape(count, rows, self.num_heads, -1).transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, scale=self.scaling)
        return self.proj(out.transpose(1, 2).reshape(count * rows, -1))

    qwen.Qwen2_5_VLVisionAttention.forward = forward


def cosine(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of `peak`."""
    return peak * min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def answer_loss(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Mean cross-entropy over answer tokens, and the fraction of answers whose every token is right."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits[:, :-1]
    targets = labels[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    right = ((logits.argmax(-1) == targets) | (targets == IGNORED)).all(1).float().mean()
    return loss, right.item()


def train(
    model: torch.nn.Module,
    batches: Callable[[int, float], dict[str, torch.Tensor]],
    steps: int,
    peak_rate: float,
    weight_decay: float = 0.01,
    warmup: int = 50,
    report_every: int = 50,
    on_report: Callable[[int], None] = lambda step: None,
) -> None:
    """AdamW with a cosine schedule. `batches(step, exact)` gets the running share of exact answers."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=peak_rate, weight_decay=weight_decay, betas=(0.9, 0.98))
    exact, started = 0.0, time.perf_counter()
    model.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = cosine(step, steps, peak_rate, warmup)
        loss, right = answer_loss(model, batches(step, exact))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        exact = 0.9 * exact + 0.1 * right
        if step % report_every == report_every - 1 or step < 3:
            seconds = time.perf_counter() - started
            print(f"step {step + 1} loss {loss.item():.3f} exact {exact:.3f} {seconds:.0f} s", flush=True)
            on_report(step)
    model.eval()


@torch.no_grad()
def answers(
    model: torch.nn.Module, processor: Qwen2_5_VLProcessor, pictures: Iterable[Image.Image], prompt: str = PROMPTS[0]
) -> list[str]:
    """Greedy free-running answers, one picture at a time through the processor, as a user would ask."""
    texts = []
    for picture in pictures:
        content = [{"type": "image", "image": picture.convert("RGB")}, {"type": "text", "text": prompt}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        texts.append(processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def seed_everything(seed: int) -> np.random.Generator:
    torch.manual_seed(seed)
    return np.random.default_rng(seed)
