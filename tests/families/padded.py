"""Families that pad pictures to one size or patch count: Pixtral towers, Idefics, Gemma 4, LFM2-VL and their kin."""

from __future__ import annotations

from collections.abc import Mapping

from tests.families import gemma4, idefics, lfm2_vl, minicpm, pixtral
from tests.families.recipes import Family

_GEMMA4_STOP = ("<eos>", "<turn|>")
_IDEFICS_STOP = ("<end_of_utterance>",)
_QWEN_STOP = ("<|im_end|>", "<|endoftext|>")

PADDED: Mapping[str, Family] = {
    "gemma4": Family(gemma4.gemma4_tokenizer, gemma4.gemma4_processor, gemma4.small, _GEMMA4_STOP, takes_videos=True),
    "gemma4_large": Family(
        gemma4.gemma4_tokenizer, gemma4.gemma4_processor, gemma4.large, _GEMMA4_STOP, takes_videos=True
    ),
    "idefics2": Family(idefics.idefics2_tokenizer, idefics.idefics2_processor, idefics.idefics2, _IDEFICS_STOP),
    "idefics3": Family(idefics.idefics3_tokenizer, idefics.idefics3_processor, idefics.idefics3, _IDEFICS_STOP),
    "lfm2_vl": Family(lfm2_vl.lfm2_tokenizer, lfm2_vl.lfm2_vl_processor, lfm2_vl.lfm2_vl, ("<|im_end|>",)),
    "lighton_ocr": Family(pixtral.lighton_tokenizer, pixtral.lighton_ocr_processor, pixtral.lighton_ocr, _QWEN_STOP),
    "llava_pixtral": Family(
        pixtral.pixtral_tokenizer, pixtral.llava_pixtral_processor, pixtral.llava_pixtral, ("</s>",)
    ),
    "minicpm_ocr": Family(
        minicpm.minicpm_tokenizer,
        minicpm.minicpm_ocr_processor,
        minicpm.minicpm_ocr,
        _QWEN_STOP,
        seed=1,
        takes_videos=True,
    ),
    "minicpmv4_7": Family(
        minicpm.minicpm_tokenizer,
        minicpm.minicpmv4_7_processor,
        minicpm.minicpmv4_7,
        _QWEN_STOP,
        seed=1,
        takes_videos=True,
    ),
    "minicpmv4_6": Family(
        minicpm.minicpm_tokenizer,
        minicpm.minicpmv4_6_processor,
        minicpm.minicpmv4_6,
        _QWEN_STOP,
        seed=1,
        takes_videos=True,
    ),
    "mistral3": Family(pixtral.pixtral_tokenizer, pixtral.mistral3_processor, pixtral.mistral3, ("</s>",)),
    "smolvlm": Family(
        idefics.smolvlm_tokenizer, idefics.smolvlm_processor, idefics.smolvlm, _IDEFICS_STOP, takes_videos=True
    ),
}
"""By `config.model_type`; two families come in two kinds."""
