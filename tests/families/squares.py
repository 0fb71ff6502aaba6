"""Families whose tower takes squares: a picture padded to one, or cut into several."""

from __future__ import annotations

from collections.abc import Mapping

from tests.families import (
    aria,
    crops,
    deepseek_vl,
    granite_docling,
    pp_chart2table,
    qianfan_ocr,
    timm_towers,
    unlimited_ocr,
)
from tests.families.recipes import Family

_DEEPSEEK_STOP = ("<|end_of_sentence|>",)
_CHATML_STOP = ("<|im_end|>", "<|endoftext|>")

SQUARES: Mapping[str, Family] = {
    "aria": Family(aria.aria_tokenizer, aria.aria_processor, aria.aria, _CHATML_STOP),
    "deepseek_vl": Family(
        deepseek_vl.deepseek_vl_tokenizer, deepseek_vl.deepseek_vl_processor, deepseek_vl.deepseek_vl, _DEEPSEEK_STOP
    ),
    "deepseek_vl_hybrid": Family(
        deepseek_vl.deepseek_vl_tokenizer,
        deepseek_vl.deepseek_vl_hybrid_processor,
        deepseek_vl.deepseek_vl_hybrid,
        _DEEPSEEK_STOP,
    ),
    "fast_vlm": Family(
        timm_towers.fast_vlm_tokenizer, timm_towers.fast_vlm_processor, timm_towers.fast_vlm, _CHATML_STOP
    ),
    "granite_docling": Family(
        granite_docling.granite_docling_tokenizer,
        granite_docling.granite_docling_processor,
        granite_docling.granite_docling,
        ("<|end_of_text|>",),
    ),
    "janus": Family(deepseek_vl.janus_tokenizer, deepseek_vl.janus_processor, deepseek_vl.janus, _DEEPSEEK_STOP),
    "perception_lm": Family(
        timm_towers.perception_lm_tokenizer,
        timm_towers.perception_lm_processor,
        timm_towers.perception_lm,
        ("<|eot_id|>", "<|end_of_text|>"),
        takes_videos=True,
        stacks_videos=True,
        stacks_pictures=True,
    ),
    "pp_chart2table": Family(
        crops.got_tokenizer,
        pp_chart2table.pp_chart2table_processor,
        pp_chart2table.pp_chart2table,
        _CHATML_STOP,
        needs_picture=True,
    ),
    "qianfan_ocr": Family(
        qianfan_ocr.qianfan_tokenizer, qianfan_ocr.qianfan_ocr_processor, qianfan_ocr.qianfan_ocr, _CHATML_STOP
    ),
    "unlimited_ocr": Family(
        unlimited_ocr.unlimited_ocr_tokenizer,
        unlimited_ocr.unlimited_ocr_processor,
        unlimited_ocr.unlimited_ocr,
        _CHATML_STOP,
    ),
}
