"""MiniMax M3: each token sees a few blocks of earlier ones, chosen by its layers; experts."""

from __future__ import annotations

from transformers import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLConfig,
    MiniMaxM3VLImageProcessor,
    MiniMaxM3VLProcessor,
    MiniMaxM3VLVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import MAX_PIXELS, MERGE, PATCH, SMALL_TOWER, text_config
from tests.families.tokenizers_and_templates import qwen_tokenizer

SPECIAL = ("]~!b[", "]~b]", "[e~[", "]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")

TEMPLATE = (
    "{{ ']~!b[' }}{% for message in messages %}"
    "{{ ']~b]' + ('ai' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] in ('image', 'video') %}{{ ']<]' + content['type'] + '[>[' }}"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{ '[e~[\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\\n' }}{% endif %}"
)


def minimax_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(SPECIAL, eos="[e~[", pad="[e~[", bos="]~!b[")


def minimax_m3_vl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = text_config(
        tokenizer,
        "[e~[",
        head_dim=8,
        rotary_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        num_experts_per_tok=2,
        num_local_experts=4,
        dense_intermediate_size=64,
        shared_intermediate_size=16,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=4,
        index_topk_blocks=3,
    )
    tower = {
        **SMALL_TOWER,
        "image_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
    }
    config = MiniMaxM3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_index=tokenizer.convert_tokens_to_ids("]<]image[>["),
        video_token_index=tokenizer.convert_tokens_to_ids("]<]video[>["),
        projector_hidden_size=48,
    )
    return MiniMaxM3SparseForConditionalGeneration(config)


def minimax_m3_vl_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "size": {"shortest_edge": 64, "longest_edge": MAX_PIXELS}}
    return MiniMaxM3VLProcessor(
        image_processor=MiniMaxM3VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=MiniMaxM3VLVideoProcessor(**sizes),
        chat_template=TEMPLATE,
    )
