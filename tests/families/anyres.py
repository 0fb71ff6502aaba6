"""LLaVA-NeXT and its kin: a thumbnail and tiles on a grid chosen by aspect ratio, padding cut off the features."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPImageProcessor,
    Granite4VisionConfig,
    Granite4VisionForConditionalGeneration,
    Granite4VisionProcessor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaNextVideoProcessor,
    LlavaNextVideoVideoProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    VideoLlavaConfig,
    VideoLlavaForConditionalGeneration,
    VideoLlavaImageProcessor,
    VideoLlavaProcessor,
    VideoLlavaVideoProcessor,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)

from tests.families.recipes import SMALL_TOWER, text_config
from tests.families.tiled_templates import (
    CHATML_SPECIAL,
    GRANITE_SPECIAL,
    GRANITE_TEMPLATE,
    LLAVA_VIDEO_TEMPLATE,
    ONEVISION_TEMPLATE,
)
from tests.families.tokenizers_and_templates import LLAVA_TEMPLATE, llava_tokenizer, qwen_tokenizer

SIDE = 28
PATCH = 7
PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84]]


def clip_vision(**more: Any) -> dict[str, Any]:
    shape = {
        "model_type": "clip_vision_model",
        **SMALL_TOWER,
        "num_hidden_layers": 3,
        "image_size": SIDE,
        "patch_size": PATCH,
        "projection_dim": 32,
    }
    return {**shape, **more}


def siglip_vision(**more: Any) -> dict[str, Any]:
    shape = {
        "model_type": "siglip_vision_model",
        **SMALL_TOWER,
        "num_hidden_layers": 3,
        "image_size": SIDE,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    return {**shape, **more}


def anyres_images(**more: Any) -> LlavaNextImageProcessor:
    return LlavaNextImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS, **more
    )


def llava_next(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = LlavaNextConfig(
        text_config=text_config(tokenizer, "</s>", model_type="llama", head_dim=8),
        vision_config=clip_vision(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    return LlavaNextForConditionalGeneration(config)


def llava_next_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return LlavaNextProcessor(
        image_processor=anyres_images(),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )


def granite_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(GRANITE_SPECIAL, eos="<|end_of_text|>", pad="<|pad|>", bos="<|end_of_text|>")


def llava_next_granite(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Granite Vision 3: several levels of the tower side by side, multipliers in the text model."""
    config = LlavaNextConfig(
        text_config=text_config(
            tokenizer,
            "<|end_of_text|>",
            model_type="granite",
            embedding_multiplier=3.0,
            attention_multiplier=0.3,
            residual_multiplier=0.7,
            logits_scaling=2.0,
        ),
        vision_config=siglip_vision(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=[-3, -2, -1],
        vision_feature_select_strategy="full",
    )
    return LlavaNextForConditionalGeneration(config)


def llava_next_granite_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return LlavaNextProcessor(
        image_processor=anyres_images(),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        chat_template=GRANITE_TEMPLATE,
    )


def llava_next_video_tokenizer() -> PreTrainedTokenizerBase:
    return llava_tokenizer(("<video>", "<image>", "<pad>"))


def llava_next_video(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = LlavaNextVideoConfig(
        text_config=text_config(tokenizer, "</s>", model_type="llama", head_dim=8),
        vision_config=clip_vision(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
    )
    return LlavaNextVideoForConditionalGeneration(config)


def llava_next_video_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return LlavaNextVideoProcessor(
        image_processor=anyres_images(),
        video_processor=LlavaNextVideoVideoProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_VIDEO_TEMPLATE,
    )


def onevision_tokenizer() -> PreTrainedTokenizerBase:
    return qwen_tokenizer((*CHATML_SPECIAL, "<image>", "<video>"))


def llava_onevision(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = LlavaOnevisionConfig(
        text_config=text_config(tokenizer, "<|im_end|>", model_type="qwen2"),
        vision_config=siglip_vision(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_2",  # so that the largest pictures' features are shrunk
    )
    return LlavaOnevisionForConditionalGeneration(config)


def llava_onevision_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"height": SIDE, "width": SIDE}
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=PINPOINTS),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=tokenizer,
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
        chat_template=ONEVISION_TEMPLATE,
    )


def granite4_vision(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = Granite4VisionConfig(
        text_config=text_config(
            tokenizer,
            "<|end_of_text|>",
            model_type="granite4_vision_text",
            num_hidden_layers=5,
            embedding_multiplier=2.0,
            attention_multiplier=0.3,
            residual_multiplier=0.7,
        ),
        vision_config=siglip_vision(hidden_size=64),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        downsample_rate="2/4",
        deepstack_layer_map=[[-2, 4]],
        spatial_vision_layer=-1,
        spatial_target_layers=[1, 0, 3, 2],
        qformer_config={
            "model_type": "blip_2_qformer",
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "cross_attention_frequency": 1,
        },
    )
    return Granite4VisionForConditionalGeneration(config)


def granite4_vision_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return Granite4VisionProcessor(
        image_processor=anyres_images(),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
        chat_template=GRANITE_TEMPLATE,
    )


def vipllava(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """One tile a picture; several levels of the tower side by side."""
    config = VipLlavaConfig(
        text_config=text_config(tokenizer, "</s>", model_type="llama", head_dim=8),
        vision_config=clip_vision(num_hidden_layers=4),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=[-2, -3, 1],
    )
    return VipLlavaForConditionalGeneration(config)


def vipllava_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )


def video_llava(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A tower for pictures and one for videos, which keeps its class token."""
    config = VideoLlavaConfig(
        text_config=text_config(tokenizer, "</s>", model_type="llama", head_dim=8),
        vision_config=clip_vision(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )
    return VideoLlavaForConditionalGeneration(config)


def video_llava_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size, crop_size = {"shortest_edge": SIDE}, {"height": SIDE, "width": SIDE}
    return VideoLlavaProcessor(
        image_processor=VideoLlavaImageProcessor(size=size, crop_size=crop_size),
        video_processor=VideoLlavaVideoProcessor(size=size, crop_size=crop_size),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=LLAVA_VIDEO_TEMPLATE,
    )
