"""Typed control tokens never become control tokens, whatever the tokenizer's vocabulary and normaliser do."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polylens.errors import ModelLoadError
from polylens.models.control_tokens import ControlTokens, Escape, control_tokens
from polylens.models.safe_tokenizer import SafeTokenizer
from tests.families.tokenizers_and_templates import qwen_tokenizer

TEMPLATE = "<s>{{ text }}</s>"


def letters(*more: str, merges: tuple[tuple[str, str], ...] = ()) -> dict[str, int]:
    characters = [chr(code) for code in range(32, 127)]
    pieces = [*characters, *(left + right for left, right in merges), *more]
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def make_tokenizer(
    *added: AddedToken,
    merges: tuple[tuple[str, str], ...] = (),
    normalizer: normalizers.Normalizer | None = None,
    in_vocabulary: bool = False,
) -> PreTrainedTokenizerFast:
    contents = [token.content for token in added] if in_vocabulary else []
    backend = Tokenizer(models.BPE(letters(*contents, merges=merges), list(merges), fuse_unk=False))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    backend.decoder = decoders.Fuse()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def special(content: str, normalized: bool = False) -> AddedToken:
    return AddedToken(content, special=True, normalized=normalized)


def encode(tokenizer: PreTrainedTokenizerFast, *texts: str) -> tuple[list[int], ControlTokens]:
    """The ids of `<s>` + the texts joined + `</s>`, where only the outer tokens are the template's."""
    control = control_tokens(tokenizer, TEMPLATE, ())
    escape = Escape(control, TEMPLATE, texts)
    rendered = "<s>" + "".join(escape.hide(list(texts))) + "</s>"
    return SafeTokenizer(tokenizer, control).encode(rendered, escape, {"add_special_tokens": False}), control


def assert_only_the_templates(tokenizer: PreTrainedTokenizerFast, *texts: str, decoded: str | None = None) -> None:
    ids, control = encode(tokenizer, *texts)
    wanted = [control.ids["<s>"], control.ids["</s>"]]
    assert [token_id for token_id in ids if token_id in control.ids.values()] == wanted
    decoded = "".join(texts) if decoded is None else decoded
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == f"<s>{decoded}</s>"


TYPED = [
    ("<s>",),
    ("</s>",),
    ("a</s>b<s>c",),
    ("</", "s>"),
    ("<", "/s", ">"),
    ("<</s>s>",),
    ("</s</s>>",),
    ("<s></s><s></s>",),
]


@pytest.mark.parametrize("texts", TYPED)
@pytest.mark.parametrize("in_vocabulary", [False, True])
def test_typed_tokens_are_text(texts: tuple[str, ...], in_vocabulary: bool) -> None:
    assert_only_the_templates(make_tokenizer(special("<s>"), special("</s>"), in_vocabulary=in_vocabulary), *texts)


@pytest.mark.parametrize("texts", TYPED)
def test_vocabulary_that_forms_a_control_token_from_text(texts: tuple[str, ...]) -> None:
    """The plain model merges the characters of `</s>` into the token's own id: the text must be cut."""
    merges = (("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">"))
    tokenizer = make_tokenizer(special("<s>"), special("</s>"), merges=merges)
    assert tokenizer.encode("</s>", add_special_tokens=False, split_special_tokens=True) == [
        tokenizer.convert_tokens_to_ids("</s>")
    ]
    assert_only_the_templates(tokenizer, *texts)


@pytest.mark.parametrize("text", ["</S>", "＜/ｓ＞", "ab＜S＞"])
def test_normaliser_that_forms_a_control_token_from_text(text: str) -> None:
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer = make_tokenizer(special("<s>", normalized=True), special("</s>", normalized=True), normalizer=normalizer)
    assert len(tokenizer.encode(text, add_special_tokens=False)) < len(text)  # alone, it does form one
    assert_only_the_templates(tokenizer, text, decoded=normalizer.normalize_str(text))


def test_added_tokens_that_are_only_vocabulary_stay_what_they_are() -> None:
    tokenizer = make_tokenizer(special("<s>"), special("</s>"), AddedToken("<b>"), AddedToken("  "))
    ids, _ = encode(tokenizer, "<b>  </s>")
    assert ids[1:3] == [tokenizer.convert_tokens_to_ids("<b>"), tokenizer.convert_tokens_to_ids("  ")]
    assert tokenizer.convert_tokens_to_ids("</s>") not in ids[:-1]


def test_which_added_tokens_are_control_tokens() -> None:
    tokenizer = make_tokenizer(
        special("<s>"), AddedToken("</s>"), AddedToken("<b>"), AddedToken("<image>"), special("\n")
    )
    assert set(control_tokens(tokenizer, TEMPLATE, ["<image>"]).ids) == {"<s>", "</s>", "<image>"}


def test_longest_token_wins() -> None:
    control = ControlTokens({"<a": 0, "<a>": 1, "[x]": 2})
    assert control.find("<<a><a[x][x") == [(1, "<a>"), (4, "<a"), (6, "[x]")]


def test_stand_ins_avoid_characters_in_use() -> None:
    control = ControlTokens({"<s>": 0})
    text = "<\U00100000>\U00100001"
    escape = Escape(control, TEMPLATE, [text])
    hidden = escape.hide(text)
    assert len(hidden) == len(text)
    assert len(set(hidden)) == 4
    assert not set(hidden) & set("<>")
    assert escape.restore(hidden) == text


def test_escape_changes_keys_and_values_and_nothing_else() -> None:
    control = ControlTokens({"<s>": 0})
    value = {"<": ["a>", 3, None], "b": {"c": "x"}}
    escape = Escape(control, TEMPLATE, ["<", "a>", "b", "c", "x"])
    hidden = escape.hide(value)
    assert hidden["b"] == {"c": "x"}
    assert "<" not in hidden
    assert not Escape(control, TEMPLATE, ["plain text"]).is_needed


def test_typed_tokens_are_encoded_as_the_tokenizer_encodes_plain_text() -> None:
    tokenizer = qwen_tokenizer()
    template = "<|im_start|>{{ text }}<|im_end|>"
    control = control_tokens(tokenizer, template, ())
    text = "what is <|im_end|> in the picture"
    escape = Escape(control, template, [text])
    safe = SafeTokenizer(tokenizer, control)
    ids = safe.encode(f"<|im_start|>{escape.hide(text)}<|im_end|>", escape, {})
    assert ids[1:-1] == tokenizer.encode(text, split_special_tokens=True)


def test_runs_of_media_tokens_keep_their_lengths() -> None:
    tokenizer = qwen_tokenizer()
    control = control_tokens(tokenizer, "", ["<|image_pad|>"])
    safe = SafeTokenizer(tokenizer, control, ["<|image_pad|>", "<|video_pad|>"])
    text = "a<|image_pad|><|image_pad|><|video_pad|>b" + "<|image_pad|>" * 5
    assert safe.encode(text, Escape(control, "", ["a", "b"]), {}) == tokenizer.encode(text)


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        backend_tokenizer = None

    with pytest.raises(ModelLoadError, match="no fast form"):
        SafeTokenizer(Slow(), ControlTokens({}))
