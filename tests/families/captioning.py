"""Families without a chat template that transformers generates for: captions, documents, formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    DonutImageProcessor,
    DonutProcessor,
    GitConfig,
    GitForCausalLM,
    GitProcessor,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    IdeficsImageProcessor,
    IdeficsProcessor,
    Kosmos2_5Config,
    Kosmos2_5ForConditionalGeneration,
    Kosmos2_5ImageProcessor,
    Kosmos2_5Processor,
    MBartConfig,
    Pix2StructConfig,
    Pix2StructForConditionalGeneration,
    Pix2StructImageProcessor,
    Pix2StructProcessor,
    PPFormulaNetConfig,
    PPFormulaNetForConditionalGeneration,
    PPFormulaNetImageProcessor,
    PPFormulaNetProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from tests.families.kosmos import kosmos_tokenizer
from tests.families.recipes import SMALL_TOWER, Family, text_config, vocab_size
from tests.families.tokenizers_and_templates import llava_tokenizer

SIDE = 28
PATCH = 7
MAX_LEN = 256
IDEFICS_ADDED = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<pad>")


def bert_tokenizer() -> PreTrainedTokenizerBase:
    """Letters, as words and within them."""
    letters = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isupper()]
    first = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]")
    vocabulary = [*first, *letters, *(f"##{letter}" for letter in letters)]
    return BertTokenizer(vocab={token: index for index, token in enumerate(vocabulary)}, extra_special_tokens=["[DEC]"])


def _vision(**more: Any) -> dict[str, Any]:
    shape = {
        **SMALL_TOWER,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    return {**shape, **more}


def _text(tokenizer: PreTrainedTokenizerBase, **more: Any) -> dict[str, Any]:
    shape = {
        "vocab_size": vocab_size(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LEN,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return {**shape, **more}


def blip(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    separator = tokenizer.sep_token_id
    text = _text(
        tokenizer,
        encoder_hidden_size=32,
        bos_token_id=tokenizer.convert_tokens_to_ids("[DEC]"),
        eos_token_id=separator,
        sep_token_id=separator,
        tie_word_embeddings=False,
    )
    return BlipForConditionalGeneration(
        BlipConfig(text_config=text, vision_config=_vision(), tie_word_embeddings=False)
    )


def blip_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return BlipProcessor(BlipImageProcessor(size={"height": SIDE, "width": SIDE}), tokenizer)


def git(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = _text(tokenizer, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ends = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    return GitForCausalLM(GitConfig(vision_config=_vision(), **text, **ends))


def git_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    size = {"height": SIDE, "width": SIDE}
    return GitProcessor(CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=size), tokenizer)


def idefics_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = llava_tokenizer(IDEFICS_ADDED)
    tokenizer.pad_token = "<unk>"
    return tokenizer


def idefics(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """As the published ones: a resampler, and rows of their own for the added tokens."""
    added = len(IDEFICS_ADDED)
    vision = {
        "embed_dim": 32,
        "image_size": SIDE,
        "patch_size": PATCH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    perceiver = {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
    text = {**text_config(tokenizer, "</s>"), "vocab_size": len(tokenizer) - added}
    del text["num_key_value_heads"]
    config = IdeficsConfig(
        **text,
        additional_vocab_size=added,
        vision_config=vision,
        perceiver_config=perceiver,
        use_resampler=True,
        cross_layer_interval=2,
        freeze_text_layers=False,
        freeze_vision_layers=False,
        alpha_type="vector",
        alpha_initializer="random",
        alphas_initializer_range=1.0,
    )
    return IdeficsForVisionText2Text(config)


def idefics_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return IdeficsProcessor(IdeficsImageProcessor(image_size=SIDE), tokenizer, image_size=SIDE)


def kosmos_2_5_tokenizer() -> PreTrainedTokenizerBase:
    return kosmos_tokenizer(("<ocr>", "<md>"), {"image_token": "<s>", "boi_token": "<image>", "eoi_token": "</image>"})


def kosmos_2_5(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = {
        "vocab_size": vocab_size(tokenizer),
        "max_position_embeddings": MAX_LEN,
        "embed_dim": 32,
        "layers": 2,
        "ffn_dim": 64,
        "attention_heads": 4,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "hidden_size": 32,
        "patch_embed_hidden_size": 3 * PATCH * PATCH,
        "intermediate_size": 64,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_num_patches": 4096,
    }
    return Kosmos2_5ForConditionalGeneration(
        Kosmos2_5Config(text_config=text, vision_config=vision, latent_query_num=6)
    )


def kosmos_2_5_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = Kosmos2_5ImageProcessor(patch_size={"height": PATCH, "width": PATCH})
    return Kosmos2_5Processor(images, tokenizer, num_image_tokens=6)


def plain_tokenizer() -> PreTrainedTokenizerBase:
    return llava_tokenizer(("<pad>",))


def pix2struct(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    shared = {"hidden_size": 32, "d_kv": 8, "d_ff": 64}
    text = {
        **shared,
        "vocab_size": vocab_size(tokenizer),
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": tokenizer.pad_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        **shared,
        "patch_embed_hidden_size": 3 * PATCH * PATCH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "seq_len": 4096,
    }
    return Pix2StructForConditionalGeneration(Pix2StructConfig(text_config=text, vision_config=vision))


def pix2struct_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    images = Pix2StructImageProcessor(patch_size={"height": PATCH, "width": PATCH})
    return Pix2StructProcessor(images, tokenizer)


def pp_formulanet(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    text = {
        "vocab_size": vocab_size(tokenizer),
        "max_position_embeddings": MAX_LEN,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_ffn_dim": 64,
        "decoder_attention_heads": 4,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
        "window_size": 3,
        "global_attn_indexes": [1],
        "mlp_dim": 64,
        "post_conv_in_channels": 16,
        "post_conv_mid_channels": 24,
        "post_conv_out_channels": 32,
        "decoder_hidden_size": 32,
    }
    return PPFormulaNetForConditionalGeneration(PPFormulaNetConfig(text_config=text, vision_config=vision))


def pp_formulanet_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return PPFormulaNetProcessor(PPFormulaNetImageProcessor(size={"height": 64, "width": 64}), tokenizer)


def donut_tokenizer() -> PreTrainedTokenizerBase:
    return llava_tokenizer(("<pad>", "<s_caption>", "<s_question>", "</s_question>", "<s_answer>"))


def donut(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    decoder = MBartConfig(
        vocab_size=vocab_size(tokenizer),
        max_position_embeddings=MAX_LEN,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        is_decoder=True,
        add_cross_attention=True,
        tie_word_embeddings=False,
        dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**_vision()), decoder)
    config.decoder_start_token_id = tokenizer.bos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return VisionEncoderDecoderModel(config)


def donut_processor(tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    return DonutProcessor(DonutImageProcessor(size={"height": SIDE, "width": SIDE}), tokenizer)


CAPTIONING: Mapping[str, Family] = {
    "blip": Family(
        bert_tokenizer,
        blip_processor,
        blip,
        ("[SEP]",),
        one_picture=True,
        needs_picture=True,
        silent_tokens=("[SEP]",),
        lacks=("connector",),
    ),
    "git": Family(bert_tokenizer, git_processor, git, ("[SEP]",), one_picture=True),
    "idefics": Family(idefics_tokenizer, idefics_processor, idefics, ("</s>",)),
    "kosmos-2.5": Family(
        kosmos_2_5_tokenizer, kosmos_2_5_processor, kosmos_2_5, ("</s>",), one_picture=True, needs_picture=True
    ),
    "pix2struct": Family(
        plain_tokenizer,
        pix2struct_processor,
        pix2struct,
        ("</s>",),
        one_picture=True,
        needs_picture=True,
        max_model_len=MAX_LEN,
        lacks=("connector",),
    ),
    "pp_formulanet": Family(
        plain_tokenizer,
        pp_formulanet_processor,
        pp_formulanet,
        ("</s>",),
        one_picture=True,
        needs_picture=True,
        lacks=("tower", "connector", "connector+language", "all"),  # PEFT 0.21.2 cannot wrap it
    ),
    "vision-encoder-decoder": Family(
        donut_tokenizer,
        donut_processor,
        donut,
        ("</s>",),
        one_picture=True,
        needs_picture=True,
        lacks=("connector",),
    ),
}
