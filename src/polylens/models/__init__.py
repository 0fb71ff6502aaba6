"""The border to transformers: which module is what, how items are packed, how positions are made."""
