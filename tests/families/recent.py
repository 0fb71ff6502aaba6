"""Families of 2025 and 2026 with oddities of their own, each in the smallest form that has them."""

from __future__ import annotations

from collections.abc import Mapping

from tests.families import (
    gemma3n,
    gemma4,
    gemma4_unified,
    inkling,
    minimax_m3_vl,
    mistral,
    molmo2,
    nemotron_h_omni,
    paligemma,
    pixtral,
    t5gemma2,
)
from tests.families.recipes import Family

RECENT: Mapping[str, Family] = {
    "gemma3n": Family(
        gemma3n.gemma3n_tokenizer, gemma3n.gemma3n_processor, gemma3n.gemma3n, ("<eos>", "<end_of_turn>")
    ),
    "gemma4_unified": Family(
        gemma4.gemma4_tokenizer,
        gemma4_unified.gemma4_unified_processor,
        gemma4_unified.gemma4_unified,
        ("<eos>", "<turn|>"),
        takes_videos=True,
    ),
    "mistral3_mistral4": Family(
        pixtral.pixtral_tokenizer, pixtral.mistral3_processor, mistral.mistral3_mistral4, ("</s>",)
    ),
    "molmo2": Family(
        molmo2.molmo2_tokenizer,
        molmo2.molmo2_processor,
        molmo2.molmo2,
        ("<|im_end|>", "<|endoftext|>"),
        takes_videos=True,
        mixes_kinds=False,
        several_videos=False,
    ),
    "paligemma2": Family(
        paligemma.paligemma_tokenizer,
        paligemma.paligemma_processor,
        paligemma.paligemma2,
        ("<eos>",),
        needs_picture=True,
        takes_turns=False,
    ),
}
"""By `config.model_type`; PaliGemma 2 has its elder's, Mistral Small 4 Mistral 3's."""

RECENT_HOSTED: Mapping[str, Family] = {
    "inkling2": Family(inkling.inkling_tokenizer, inkling.inkling2_processor, inkling.inkling2, (inkling.EOS,)),
    "inkling2_loop": Family(
        inkling.inkling_tokenizer, inkling.inkling2_processor, inkling.inkling2_loop, (inkling.EOS,)
    ),
    "inkling_mm_model": Family(
        inkling.inkling_tokenizer,
        inkling.inkling_processor,
        inkling.inkling,
        (inkling.EOS,),
        lacks=("connector",),
    ),
    "minimax_m3_vl": Family(
        minimax_m3_vl.minimax_tokenizer,
        minimax_m3_vl.minimax_m3_vl_processor,
        minimax_m3_vl.minimax_m3_vl,
        ("[e~[",),
        takes_videos=True,
    ),
    "mistral_large4": Family(pixtral.pixtral_tokenizer, pixtral.mistral3_processor, mistral.mistral_large4, ("</s>",)),
    "nemotron_h_omni": Family(
        nemotron_h_omni.nemotron_tokenizer,
        nemotron_h_omni.nemotron_processor,
        nemotron_h_omni.nemotron_h_omni,
        ("<|im_end|>",),
        takes_videos=True,
    ),
    "t5gemma2": Family(
        t5gemma2.t5gemma2_tokenizer,
        t5gemma2.t5gemma2_processor,
        t5gemma2.t5gemma2,
        ("<eos>",),
        takes_turns=False,
    ),
}
"""Those that transformers' own generation runs."""
