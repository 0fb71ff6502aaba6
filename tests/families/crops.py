"""Families that cut a picture into crops of one size by its aspect ratio: InternVL, Aya Vision and their kin."""

from __future__ import annotations

from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    AyaVisionProcessor,
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Cohere2VisionImageProcessor,
    Cohere2VisionProcessor,
    GotOcr2Config,
    GotOcr2ForConditionalGeneration,
    GotOcr2ImageProcessor,
    GotOcr2Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4ImageProcessor,
    Llama4Processor,
    Ovis2Config,
    Ovis2ForConditionalGeneration,
    Ovis2ImageProcessor,
    Ovis2Processor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tests.families.recipes import HIDDEN, SMALL_TOWER, text_config, vocab_size
from tests.families.tiled_templates import (
    CHATML_SPECIAL,
    COHERE_IMAGE_TOKENS,
    COHERE_SPECIAL,
    INTERNVL_NAMED,
    INTERNVL_TEMPLATE,
    LLAMA4_SPECIAL,
    OVIS2_SPECIAL,
    OVIS2_TEMPLATE,
    cohere_template,
)
from tests.families.tokenizers_and_templates import qwen_tokenizer

SIDE = 28
PATCH = 7
HALF = [0.5, 0.5, 0.5]
MAX_CROPS = 3


def internvl_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(CHATML_SPECIAL, INTERNVL_NAMED)


def internvl(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **SMALL_TOWER,
        "image_size": [SIDE, SIDE],
        "patch_size": [PATCH, PATCH],
    }
    config = InternVLConfig(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen2"),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=(SIDE // PATCH // 2) ** 2,
        tie_word_embeddings=False,
    )
    return InternVLForConditionalGeneration(config)


def internvl_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"height": SIDE, "width": SIDE}
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, max_patches=MAX_CROPS, image_mean=HALF, image_std=HALF
        ),
        video_processor=InternVLVideoProcessor(size=size, image_mean=HALF, image_std=HALF),
        tokenizer=tokenizer,
        image_seq_length=(SIDE // PATCH // 2) ** 2,
        chat_template=INTERNVL_TEMPLATE,
    )


def siglip(**more: object) -> dict[str, object]:
    shape = {
        "model_type": "siglip_vision_model",
        **SMALL_TOWER,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    return {**shape, **more}


def _crops(cls: type, **more: object) -> object:
    """A crop costs SIDE x SIDE pixels; a picture of several has a thumbnail besides."""
    size = {"height": SIDE, "width": SIDE}
    return cls(size=size, crop_to_patches=True, max_patches=MAX_CROPS, image_mean=HALF, image_std=HALF, **more)


def cohere_text(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Windows shorter than a picture's tokens, and a full layer without rotary positions."""
    return text_config(
        tokenizer,
        "<|END_OF_TURN_TOKEN|>",
        model_type="cohere2",
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=6,
    )


def aya_tokenizer() -> PreTrainedTokenizerBase:
    """`<image>`, which the template writes, is no token."""
    special = (*COHERE_SPECIAL, *COHERE_IMAGE_TOKENS.values())
    return qwen_tokenizer(special, eos="<|END_OF_TURN_TOKEN|>", pad="<PAD>", bos="<BOS_TOKEN>")


def aya_vision(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = AyaVisionConfig(
        text_config=cohere_text(tokenizer),
        vision_config=siglip(vision_use_head=False),
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        alignment_intermediate_size=64,
    )
    return AyaVisionForConditionalGeneration(config)


def aya_vision_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return AyaVisionProcessor(
        image_processor=_crops(GotOcr2ImageProcessor),
        tokenizer=tokenizer,
        patch_size=PATCH,
        img_size=SIDE,
        downsample_factor=2,
        chat_template=cohere_template("<image>"),
    )


def cohere2_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(
        COHERE_SPECIAL, COHERE_IMAGE_TOKENS, eos="<|END_OF_TURN_TOKEN|>", pad="<PAD>", bos="<BOS_TOKEN>"
    )


def cohere2_vision(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The tower has a pooling head that nothing uses."""
    config = Cohere2VisionConfig(
        text_config=cohere_text(tokenizer),
        vision_config=siglip(),
        image_token_id=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        alignment_intermediate_size=64,
    )
    return Cohere2VisionForConditionalGeneration(config)


def cohere2_vision_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return Cohere2VisionProcessor(
        image_processor=_crops(Cohere2VisionImageProcessor, patch_size=SIDE // PATCH // 2),
        tokenizer=tokenizer,
        chat_template=cohere_template("<|IMG_PATCH|>"),
    )


def ovis2_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer((*CHATML_SPECIAL, *OVIS2_SPECIAL))


def ovis2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vision = {
        **SMALL_TOWER,
        "image_size": SIDE,
        "patch_size": PATCH,
        "vocab_size": 40,
        "hidden_stride": 2,
        "num_visual_indicator_tokens": 5,
    }
    config = Ovis2Config(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen2"),
        vision_config=vision,
        hidden_size=HIDDEN,
        vocab_size=vocab_size(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids(list(OVIS2_SPECIAL[2:])),
        tie_word_embeddings=False,
    )
    return Ovis2ForConditionalGeneration(config)


def ovis2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return Ovis2Processor(
        image_processor=_crops(Ovis2ImageProcessor),
        tokenizer=tokenizer,
        image_seq_length=(SIDE // PATCH // 2) ** 2,
        chat_template=OVIS2_TEMPLATE,
    )


GOT_SIDE = 32
GotOcr2Processor.num_image_tokens = (GOT_SIDE // 4 // 4) ** 2
"""A checkpoint cannot set it: with the class's own 256, the smallest tower would have 4096 patches."""


def got_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer((*CHATML_SPECIAL, "<img>", "</img>", "<imgpad>"), eos="<|endoftext|>")


def got_vision() -> dict[str, object]:
    """SAM's tower: windows (with padding) and a layer that sees everything; a tower in convolutions' layout."""
    return {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": GOT_SIDE,
        "patch_size": 4,
        "window_size": 3,
        "global_attn_indexes": [1],
        "mlp_dim": 64,
    }


def got_ocr2(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = GotOcr2Config(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen2"),
        vision_config=got_vision(),
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"),
    )
    return GotOcr2ForConditionalGeneration(config)


def got_ocr2_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"height": GOT_SIDE, "width": GOT_SIDE}
    return GotOcr2Processor(image_processor=GotOcr2ImageProcessor(size=size), tokenizer=tokenizer)


def llama4_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(LLAMA4_SPECIAL, eos="<|eot|>", pad="<|finetune_right_pad|>", bos="<|begin_of_text|>")


def llama4(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Chunks shorter than a prompt, a layer without rotary positions whose queries are scaled early, experts."""
    text = text_config(
        tokenizer,
        "<|eot|>",
        head_dim=8,
        num_hidden_layers=3,
        intermediate_size_mlp=64,
        num_local_experts=2,
        moe_layers=[1],
        no_rope_layers=[1, 1, 0],
        attention_chunk_size=16,
        floor_scale=16,
        attn_scale=0.5,
    )
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vision_output_dim": 32,
        "image_size": SIDE,
        "patch_size": PATCH,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    config = Llama4Config(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<|image_start|>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<|image_end|>"),
    )
    return Llama4ForConditionalGeneration(config)


def llama4_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """With the chat template that transformers gives it."""
    images = Llama4ImageProcessor(size={"height": SIDE, "width": SIDE}, max_patches=4)
    return Llama4Processor(image_processor=images, tokenizer=tokenizer, patch_size=PATCH)
