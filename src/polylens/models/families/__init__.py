"""The families of vision-language models that need a note, and those the test suite proves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polylens.models.families import (
    captioning,
    chameleon,
    emu3,
    ernie4_5_vl_moe,
    florence2,
    frames,
    fuyu,
    gemma3n,
    gemma4,
    git,
    got_ocr2,
    granite4_vision,
    idefics,
    instructblipvideo,
    kosmos2,
    llama4,
    llava_onevision,
    minicpmv4_6,
    molmo2,
    ovis2,
    perception_lm,
    unlimited_ocr,
    video_llama_3,
)
from polylens.models.families.notes import FamilyNotes, ProcessorNotes, TwoWay
from polylens.models.families.plain_text import plain_template

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "FamilyNotes", "TwoWay", "notes_for"]

FAMILIES: Mapping[str, FamilyNotes] = {
    "apertus1p5": FamilyNotes(hosted="its pictures' codes are looked up in the text's embedding"),
    "aria": FamilyNotes(),
    "aya_vision": FamilyNotes(),
    "blip": FamilyNotes(
        processor=ProcessorNotes(
            chat_template=plain_template("BLIP", ""), one_picture=True, stop_entries=("sep_token_id",)
        )
    ),
    "blip-2": FamilyNotes(processor=ProcessorNotes(chat_template=plain_template("BLIP-2", ""), one_picture=True)),
    "chameleon": FamilyNotes(
        not_adaptable=chameleon.NOT_ADAPTABLE,
        never_answered=chameleon.picture_tokens,
        processor=ProcessorNotes(chat_template=plain_template("Chameleon", "<image>")),
    ),
    "cohere2_vision": FamilyNotes(),
    "cohere_compass": FamilyNotes(),
    "cosmos3_edge": FamilyNotes(),
    "cosmos3_omni": FamilyNotes(),
    "deepseek_ocr2": FamilyNotes(
        # the model's plain form: no roles, a picture on a line of its own
        processor=ProcessorNotes(chat_template=plain_template("DeepSeek-OCR 2", "<image>\\n")),
    ),
    "deepseek_vl": FamilyNotes(),
    "deepseek_vl_hybrid": FamilyNotes(),
    "emu3": FamilyNotes(encode=emu3.encode, not_adaptable=chameleon.NOT_ADAPTABLE),
    "ernie4_5_vl_moe": FamilyNotes(
        text_arguments=ernie4_5_vl_moe.text_arguments,
        prepare_text=ernie4_5_vl_moe.route_by_kind,
    ),
    "evolla": FamilyNotes(refused="its processor takes proteins, no pictures"),
    "exaone4_5": FamilyNotes(),
    "fast_vlm": FamilyNotes(),
    "florence2": FamilyNotes(
        processor=ProcessorNotes(chat_template=florence2.TEMPLATE, commands=florence2.COMMANDS),
    ),
    "fuyu": FamilyNotes(
        encode=fuyu.encode,
        processor=ProcessorNotes(
            chat_template=plain_template("Fuyu", ""),
            one_picture=True,
            call=fuyu.call,
            item_inputs=("pixel_values",),
            dropped_inputs=("images",),
            pieces=fuyu.PIECES,
        ),
    ),
    "gemma3": FamilyNotes(
        matmul_parameters=("mm_input_projection_weight",),
        two_way=TwoWay.IMAGES,
    ),
    "gemma3n": FamilyNotes(
        embed=gemma3n.embed,
        text_arguments=gemma3n.text_arguments,
        not_adaptable={r"hard_embedding_norm$": "the norm of the tokens that bound pictures and sounds"},
    ),
    "gemma4": FamilyNotes(
        two_way=TwoWay.IMAGES,
        two_way_in_windows_only=True,
        two_way_when=gemma4.sees_both_ways,
        media_embed_as_padding=True,
        text_arguments=gemma4.text_arguments,
        processor=ProcessorNotes(dropped_inputs=("num_soft_tokens_per_image", "num_soft_tokens_per_video")),
    ),
    "gemma4_unified": FamilyNotes(
        two_way=TwoWay.IMAGES,  # in all layers, as transformers' forward has it (the mask for its static cache differs)
        two_way_beyond_windows=True,
        two_way_when=gemma4.sees_both_ways,
        media_embed_as_padding=True,
        processor=ProcessorNotes(dropped_inputs=("num_soft_tokens_per_image", "num_soft_tokens_per_video")),
    ),
    "git": FamilyNotes(
        hosted="its prompts have no tokens for a picture",
        processor=ProcessorNotes(chat_template=git.TEMPLATE, one_picture=True, call=git.call),
    ),
    "glm46v": FamilyNotes(),
    "glm4v": FamilyNotes(),
    "glm4v_moe": FamilyNotes(),
    "glm_ocr": FamilyNotes(),
    "glmga": FamilyNotes(),
    "got_ocr2": FamilyNotes(processor=ProcessorNotes(chat_template=got_ocr2.TEMPLATE, flat_images=True)),
    "granite4_vision": FamilyNotes(read_features=granite4_vision.read, text_arguments=granite4_vision.text_arguments),
    "granite_docling": FamilyNotes(),
    "hunyuan_vl": FamilyNotes(),
    "hyperclovax_vision_v2": FamilyNotes(),
    "idefics": FamilyNotes(
        not_adaptable=idefics.NOT_ADAPTABLE,
        processor=ProcessorNotes(chat_template=idefics.TEMPLATE, call=idefics.call),
    ),
    "idefics2": FamilyNotes(),
    "idefics3": FamilyNotes(),
    "instructblip": FamilyNotes(
        processor=ProcessorNotes(
            chat_template=plain_template("InstructBLIP", ""),
            one_picture=True,
            item_inputs=("qformer_input_ids", "qformer_attention_mask"),
        ),
    ),
    "instructblipvideo": FamilyNotes(
        processor=ProcessorNotes(
            chat_template=plain_template("InstructBLIP-Video", ""),
            one_picture=True,
            num_frames=4,
            call=instructblipvideo.call,
            item_inputs=("qformer_input_ids", "qformer_attention_mask"),
        ),
    ),
    "internvl": FamilyNotes(
        collate=frames.concat_frames,
        encode=frames.encode_as_pictures,
        processor=ProcessorNotes(dropped_inputs=("num_patches",), plain_call=True),
    ),
    "janus": FamilyNotes(),
    "kimi_k25": FamilyNotes(),
    "kosmos-2": FamilyNotes(
        encode=kosmos2.encode,
        first_position=2,
        prepare_text=kosmos2.without_own_mask,
        processor=ProcessorNotes(
            chat_template=plain_template("KOSMOS-2", ""),
            commands=kosmos2.COMMANDS,
            one_picture=True,
            call=kosmos2.call,
            media_mask=kosmos2.MASK,
        ),
    ),
    "kosmos-2.5": FamilyNotes(
        hosted="its text model marks the tokens around a picture too",
        processor=ProcessorNotes(
            chat_template=plain_template("KOSMOS-2.5", ""),
            commands=kosmos2.COMMANDS_2_5,
            one_picture=True,
            call=kosmos2.call_2_5,
        ),
    ),
    "lfm2_vl": FamilyNotes(),
    "lfm3_vl": FamilyNotes(),
    "lighton_ocr": FamilyNotes(),
    "llama4": FamilyNotes(encode=llama4.encode, prepare_text=llama4.scale_queries_by_position),
    "llava": FamilyNotes(),
    "llava_next": FamilyNotes(),
    "llava_next_video": FamilyNotes(collate=frames.concat_frames),
    "llava_onevision": FamilyNotes(
        collate=frames.concat_frames,
        encode=llava_onevision.encode,
        read_features=llava_onevision.read,
        processor=ProcessorNotes(pictures_together=True),
    ),
    "minicpm_ocr": FamilyNotes(collate=minicpmv4_6.concat_strips),
    "minicpmv4_6": FamilyNotes(collate=minicpmv4_6.concat_strips),
    "minicpmv4_7": FamilyNotes(collate=minicpmv4_6.concat_strips),
    "mistral3": FamilyNotes(),
    "mllama": FamilyNotes(),
    "molmo2": FamilyNotes(
        two_way=TwoWay.ALL_IMAGES,
        features_are_added=True,
        collate=molmo2.concat_crops,
        processor=ProcessorNotes(dropped_inputs=("image_num_crops",)),
    ),
    "muse_glimmer": FamilyNotes(media_embed_as_first=True),
    "muse_spark": FamilyNotes(media_embed_as_first=True),
    "nemotron_h_omni": FamilyNotes(hosted="its videos share a batch only if they are equally large"),
    "ovis2": FamilyNotes(
        encode=ovis2.encode, processor=ProcessorNotes(feature_ids_entries=("visual_indicator_token_ids",))
    ),
    "paddleocr_vl": FamilyNotes(),
    "paligemma": FamilyNotes(
        two_way=TwoWay.PROMPT,
        two_way_beyond_windows=True,
        first_position=1,
        processor=ProcessorNotes(chat_template=plain_template("PaliGemma", "<image>")),
    ),
    "perception_lm": FamilyNotes(collate=perception_lm.concat_tiles, encode=perception_lm.encode),
    "pix2struct": FamilyNotes(
        processor=ProcessorNotes(
            chat_template=plain_template("Pix2Struct", ""), one_picture=True, call=captioning.pix2struct
        )
    ),
    "pp_chart2table": FamilyNotes(processor=ProcessorNotes(written_out=True)),
    "pp_formulanet": FamilyNotes(
        processor=ProcessorNotes(
            chat_template=plain_template("PP-FormulaNet", ""), one_picture=True, call=captioning.formula
        )
    ),
    "qianfan_ocr": FamilyNotes(processor=ProcessorNotes(dropped_inputs=("num_patches",))),
    "qwen2_5_omni_thinker": FamilyNotes(),
    "qwen2_5_vl": FamilyNotes(),
    "qwen2_vl": FamilyNotes(),
    "qwen3_5": FamilyNotes(),
    "qwen3_5_moe": FamilyNotes(),
    "qwen3_omni_moe_thinker": FamilyNotes(),
    "qwen3_vl": FamilyNotes(),
    "qwen3_vl_moe": FamilyNotes(),
    "shieldgemma2": FamilyNotes(
        processor=ProcessorNotes(no_chat="its processor writes prompts of its own, about a picture and its policies")
    ),
    "smolvlm": FamilyNotes(),
    "step3p7": FamilyNotes(),
    "t5gemma2": FamilyNotes(
        matmul_parameters=("mm_input_projection_weight",),
        processor=ProcessorNotes(chat_template=plain_template("T5Gemma 2", "<start_of_image>")),
    ),
    "udop": FamilyNotes(refused="its processor needs the words of the document and their places, which OCR must read"),
    "unlimited_ocr": FamilyNotes(
        encode=unlimited_ocr.encode, processor=ProcessorNotes(listed_inputs=unlimited_ocr.LISTS)
    ),
    "video_llama_3": FamilyNotes(encode=video_llama_3.encode),
    "video_llava": FamilyNotes(collate=frames.concat_frames),
    "vipllava": FamilyNotes(),
    "vision-encoder-decoder": FamilyNotes(
        processor=ProcessorNotes(
            chat_template=plain_template("The model", ""),
            commands=captioning.COMMANDS,
            one_picture=True,
            call=captioning.vision_encoder_decoder,
        )
    ),
}
"""By `config.model_type`, in alphabetical order: the families whose parity with merged weights the tests prove."""


def notes_for(model_type: str) -> FamilyNotes:
    """The notes of a family; a family without an entry has nothing special to note."""
    return FAMILIES.get(model_type, FamilyNotes())
