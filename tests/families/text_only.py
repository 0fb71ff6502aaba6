"""Tiny checkpoints of language models without an encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.families.build import generation_config, randomise
from tests.families.mistral import mistral4
from tests.families.pixtral import pixtral_tokenizer
from tests.families.recipes import text_config
from tests.families.tokenizers_and_templates import llava_tokenizer, qwen_tokenizer

QWEN2_TEXT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2_TEXT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def _qwen2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**text_config(tokenizer, "<|im_end|>"), tie_word_embeddings=True))


def _llama(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**text_config(tokenizer, "</s>"), tie_word_embeddings=False))


def _granite(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Logits are divided behind the head."""
    return GraniteForCausalLM(GraniteConfig(**text_config(tokenizer, "<|im_end|>"), logits_scaling=4.0))


MISTRAL_TEXT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)

LANGUAGE_MODELS: dict[str, tuple[Callable[[], PreTrainedTokenizerBase], str, Callable, tuple[str, ...]]] = {
    "granite": (qwen_tokenizer, QWEN2_TEXT_TEMPLATE, _granite, ("<|im_end|>",)),
    "llama": (llava_tokenizer, LLAMA2_TEXT_TEMPLATE, _llama, ("</s>",)),
    "mistral4": (pixtral_tokenizer, MISTRAL_TEXT_TEMPLATE, mistral4, ("</s>",)),
    "qwen2": (qwen_tokenizer, QWEN2_TEXT_TEMPLATE, _qwen2, ("<|im_end|>",)),
}
"""By model type: tokenizer, chat template, model, stop tokens."""


def build_language_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a float32 checkpoint into `folder`; the same seed, the same bytes."""
    make_tokenizer, template, make_model, stop_tokens = LANGUAGE_MODELS[name]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    model = make_model(tokenizer).eval()
    randomise(model, seed)
    model.generation_config = generation_config(tokenizer, stop_tokens)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
