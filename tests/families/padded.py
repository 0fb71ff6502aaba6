"""Families that pad pictures to one size or patch count: Pixtral towers, Idefics, Gemma 4, LFM2-VL and their kin."""

from __future__ import annotations

from collections.abc import Mapping

from tests.families.recipes import Family

PADDED: Mapping[str, Family] = {}
