"""Families that run in mixed batches whose checkpoints have no chat template, or whose pictures become tokens."""

from __future__ import annotations

from collections.abc import Mapping

from tests.families import blip, fuyu, kosmos, vq
from tests.families.recipes import Family

WITHOUT_TEMPLATE: Mapping[str, Family] = {
    "blip-2": Family(
        blip.blip_tokenizer, blip.blip_2_processor, blip.blip_2, ("</s>",), one_picture=True, needs_picture=True
    ),
    "chameleon": Family(
        vq.chameleon_tokenizer,
        vq.chameleon_processor,
        vq.chameleon,
        ("</s>",),
        takes_turns=False,
        lacks=("tower", "connector", "connector+language"),
    ),
    "emu3": Family(
        vq.emu3_tokenizer,
        vq.emu3_processor,
        vq.emu3,
        ("<|extra_204|>",),
        lacks=("tower", "connector", "connector+language"),
    ),
    "fuyu": Family(
        fuyu.fuyu_tokenizer, fuyu.fuyu_processor, fuyu.fuyu, ("|ENDOFTEXT|",), one_picture=True, lacks=("tower",)
    ),
    "instructblip": Family(
        blip.blip_tokenizer,
        blip.instructblip_processor,
        blip.instructblip,
        ("</s>",),
        one_picture=True,
        needs_picture=True,
    ),
    "instructblipvideo": Family(
        blip.video_tokenizer,
        blip.instructblipvideo_processor,
        blip.instructblipvideo,
        ("</s>",),
        takes_videos=True,
        needs_picture=True,
        only_videos_of=4,
    ),
    "kosmos-2": Family(
        kosmos.kosmos_2_tokenizer, kosmos.kosmos_2_processor, kosmos.kosmos_2, ("</s>",), one_picture=True
    ),
}
