"""The five families' tokenizers and chat templates, small: real classes, real special tokens, true style."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

NUM_TEXT_TOKENS = 320
"""Alphabet and merges; the special tokens come on top."""

QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
GEMMA_FIRST_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
GEMMA_TURN_TOKENS = ("<start_of_turn>", "<end_of_turn>")
GEMMA_IMAGE_TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
LLAMA_FIRST_TOKENS = ("<unk>", "<s>", "</s>")
LLAVA_ADDED_TOKENS = ("<image>", "<pad>")

_CORPUS = (
    "what is in the picture and what is shown in this video",
    "describe the difference between the first picture and the second one",
    "the gauge reads forty two degrees; answer with one number only",
    "You are a helpful assistant. Answer briefly. Yes, no, red, green, blue, left, right.",
    "USER: ASSISTANT: system user assistant model\nseconds\n\n0.0 1.5 12:34",
    'café naïve 東京 {"value": 42} <b>&amp;</b>\n\tindented\n',
)

QWEN2_TEMPLATE = """\
{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}\
{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}\
{% set image_count.value = image_count.value + 1 %}\
{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif content['type'] == 'video' or 'video' in content %}\
{% set video_count.value = video_count.value + 1 %}\
{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen2-VL's and Qwen2.5-VL's, with its default system turn and `add_vision_id`."""

QWEN3_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].content is string %}
        {{- messages[0].content }}
    {%- else %}
        {%- for content in messages[0].content %}
            {%- if 'text' in content %}{{- content.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set image_count = namespace(value=0) %}
{%- set video_count = namespace(value=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for content in message.content %}
                {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                    {%- set image_count.value = image_count.value + 1 %}
                    {%- if add_vision_id %}Picture {{ image_count.value }}: {% endif -%}
                    <|vision_start|><|image_pad|><|vision_end|>
                {%- elif content.type == 'video' or 'video' in content %}
                    {%- set video_count.value = video_count.value + 1 %}
                    {%- if add_vision_id %}Video {{ video_count.value }}: {% endif -%}
                    <|vision_start|><|video_pad|><|vision_end|>
                {%- elif 'text' in content %}
                    {{- content.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for content in message.content %}
                {%- if 'text' in content %}{{- content.text }}{%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Qwen3-VL's without tool calls: a system turn only where the messages have one."""

GEMMA3_TEMPLATE = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{# Render all images first #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{# Render all text next #}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""LLaVA 1.5's: all pictures of a message come before its text, and content must be a list of parts
(a string renders as nothing: whoever calls it has to wrap strings)."""


def qwen_tokenizer(
    special: Sequence[str] = QWEN_SPECIAL_TOKENS,
    named: Mapping[str, str] | None = None,
    *,
    eos: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
    bos: str | None = None,
) -> Qwen2Tokenizer:
    """Byte-level BPE with Qwen's special tokens, or others; `<|im_end|>` ends an answer.

    named: special tokens that the tokenizer has as attributes, which some processors want.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    vocab, merges = train_bpe(trained, sorted(pre_tokenizers.ByteLevel.alphabet()))
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        extra_special_tokens=list(special),
        **({"model_specific_special_tokens": dict(named)} if named else {}),
        model_max_length=2048,
    )


def gemma_tokenizer(
    turn_tokens: Sequence[str] = GEMMA_TURN_TOKENS, named: Mapping[str, str] = GEMMA_IMAGE_TOKENS
) -> GemmaTokenizer:
    """SentencePiece-style BPE with byte fallback; spaces become `▁` and stay before their word."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), behavior="isolated")
    vocab, merges = train_bpe(trained, _printable())
    tokenizer = GemmaTokenizer(
        vocab=_with_byte_fallback(GEMMA_FIRST_TOKENS, vocab),
        merges=merges,
        extra_special_tokens=[AddedToken(token, special=True, normalized=False) for token in turn_tokens],
        **({"model_specific_special_tokens": dict(named)} if named else {}),
        add_bos_token=True,
        model_max_length=2048,
    )
    return _retyped(tokenizer, GemmaTokenizer)


def llava_tokenizer(added: Sequence[str] = LLAVA_ADDED_TOKENS) -> LlamaTokenizer:
    """Llama 2 style BPE: `▁` put before the text's first word, byte fallback, `<s>` added by the tokenizer."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    vocab, merges = train_bpe(trained, _printable())
    tokenizer = LlamaTokenizer(
        vocab=_with_byte_fallback(LLAMA_FIRST_TOKENS, vocab),
        merges=merges,
        pad_token="<pad>",
        extra_special_tokens=[AddedToken(token, special=True, normalized=False) for token in added],
        add_bos_token=True,
        model_max_length=2048,
    )
    return _retyped(tokenizer, LlamaTokenizer)


def train_bpe(tokenizer: Tokenizer, alphabet: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges, in the trainer's order (the same on every run for the same corpus)."""
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS, initial_alphabet=list(alphabet), limit_alphabet=len(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _printable() -> list[str]:
    return [*map(chr, range(0x21, 0x7F)), "▁", "\n"]


def _with_byte_fallback(first: Iterable[str], vocab: dict[str, int]) -> dict[str, int]:
    """`first`, then 256 byte tokens, then the trained tokens, numbered in that order."""
    ordered = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(vocab, key=vocab.__getitem__)]
    return {token: index for index, token in enumerate(ordered)}


def _retyped(tokenizer: PreTrainedTokenizerBase, expected: type) -> PreTrainedTokenizerBase:
    assert isinstance(tokenizer, expected)
    return tokenizer
