from __future__ import annotations

import random

import pytest

from polylens.core import FinishReason, SamplingParams
from polylens.engine.stopping import (
    REPLACEMENT,
    Detokenizer,
    OutputRules,
    OutputStep,
    StopStrings,
    special_token_ids,
)
from tests.families.tokenizers_and_templates import gemma_tokenizer, llava_tokenizer, qwen_tokenizer

TEXTS = (
    "what is in the picture?",
    'café naïve 東京 {"value": 42} <b>&amp;</b>\n\tindented\n',
    "😀👍🏽👨‍👩‍👧 mixed with words 😀",
    " leading and  double   spaces ",
    "\n\n- a list\n- of lines .",
    "don't . do , n't",
)
MAKERS = {"qwen": qwen_tokenizer, "gemma": gemma_tokenizer, "llava": llava_tokenizer}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request):
    return MAKERS[request.param]()


def decode(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def pieces(tokenizer, ids, hidden=frozenset()):
    detokenizer = Detokenizer(tokenizer, hidden)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_text_and_no_character_is_broken(tokenizer, text):
    ids = encode(tokenizer, text)
    found = pieces(tokenizer, ids)
    assert "".join(found) == decode(tokenizer, ids)
    assert not any(REPLACEMENT in piece for piece in found)


def test_special_tokens_are_hidden_or_shown(tokenizer):
    special = sorted(special_token_ids(tokenizer))
    ids = [special[0], *encode(tokenizer, "one"), special[-1], *encode(tokenizer, " two 東"), special[1]]
    assert "".join(pieces(tokenizer, ids, special_token_ids(tokenizer))) == decode(tokenizer, ids)
    assert "".join(pieces(tokenizer, ids)) == decode(tokenizer, ids, skip=False)


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_join_to_the_whole_text_where_it_is_unicode(tokenizer, seed):
    rng = random.Random(seed)
    ids = [rng.randrange(len(tokenizer)) for _ in range(60)]
    whole = decode(tokenizer, ids)
    found = "".join(pieces(tokenizer, ids, special_token_ids(tokenizer)))
    assert found == whole or REPLACEMENT in whole


@pytest.mark.parametrize("seed", range(20))
def test_byte_level_tokens_join_to_the_whole_text_even_when_broken(seed):
    tokenizer, rng = qwen_tokenizer(), random.Random(seed)
    single_bytes = [token for token in range(256) if len(tokenizer.convert_ids_to_tokens(token)) == 1]
    ids = [rng.choice(single_bytes) for _ in range(200)]
    assert "".join(pieces(tokenizer, ids)) == decode(tokenizer, ids)


def test_a_character_waits_for_its_last_byte():
    tokenizer = qwen_tokenizer()
    ids = encode(tokenizer, "a😀b")
    found = pieces(tokenizer, ids)
    assert [piece for piece in found if piece] == ["a", "😀", "b"]
    assert len(ids) > 3


def test_an_incomplete_character_comes_out_at_the_end_only():
    tokenizer = qwen_tokenizer()
    ids = encode(tokenizer, "a😀")[:-1]
    assert pieces(tokenizer, ids)[:-1] == ["a", *[""] * (len(ids) - 1)]
    assert pieces(tokenizer, ids)[-1] == REPLACEMENT


def test_a_long_run_of_broken_bytes_is_not_held_for_ever():
    tokenizer = qwen_tokenizer()
    (broken,) = [token for token in range(256) if tokenizer.convert_ids_to_tokens(token) == "ÿ"]
    detokenizer = Detokenizer(tokenizer)
    for _ in range(300):
        detokenizer.push(broken)
    assert len(detokenizer._held) <= 20


# ---- stop strings


def run_stops(stops, parts):
    matcher, text = StopStrings(stops), ""
    for part in parts:
        certain, stop = matcher.push(part)
        text += certain
        if stop is not None:
            return text, stop
    return text + matcher.flush(), None


def plain_stop(stops, text):
    """The definition: read character by character until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(200))
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(seed):
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab東", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
    text = "".join(rng.choices("ab東c", k=20))
    cuts = sorted(rng.choices(range(21), k=6))
    parts = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, 20], strict=True)]
    assert run_stops(stops, parts) == plain_stop(stops, text)


def test_only_a_possible_beginning_is_held_back():
    matcher = StopStrings(["END", "###"])
    assert matcher.push("text E") == ("text ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("O #") == ("ENO ", None)
    assert matcher.push("##!") == ("", "###")


# ---- whole answers


def answer(tokenizer, ids, sampling, eos=(), **options):
    stream, text = OutputRules(tokenizer, eos).start(sampling, **options), ""
    for count, token in enumerate(ids, start=1):
        step = stream.push(token)
        text += step.text
        if step.finish_reason is not None:
            return text, step.finish_reason, step.matched_stop, count
    return text + stream.complete(OutputStep("")).text, None, None, len(ids)


def test_a_stop_string_across_tokens_is_cut_out(tokenizer):
    ids = encode(tokenizer, "the answer is 東京 \n\nUSER: more")
    text, reason, matched, count = answer(tokenizer, ids, SamplingParams(stop=("京 \n\nUS",)))
    assert (reason, matched) == (FinishReason.STOP, "京 \n\nUS")
    assert decode(tokenizer, ids).split("京")[0] == text
    assert count < len(ids)


def test_what_only_looked_like_a_stop_string_is_given_at_the_end(tokenizer):
    ids = encode(tokenizer, "seven USE")
    text, reason, matched, _ = answer(tokenizer, ids, SamplingParams(stop=("USER:",), max_tokens=len(ids)))
    assert (text, reason, matched) == (decode(tokenizer, ids), FinishReason.LENGTH, None)
    assert answer(tokenizer, ids, SamplingParams(stop=("USER:",)))[0] == decode(tokenizer, ids)


def test_end_and_stop_tokens(tokenizer):
    eos = sorted(special_token_ids(tokenizer))[1]
    ids = encode(tokenizer, "one two three")
    whole = decode(tokenizer, ids)
    assert answer(tokenizer, [*ids, eos, *ids], SamplingParams(), eos=[eos]) == (
        whole,
        FinishReason.STOP,
        None,
        len(ids) + 1,
    )
    at = ids.index(ids[-1])
    by_id = SamplingParams(stop_token_ids=(ids[-1],))
    assert answer(tokenizer, ids, by_id) == (decode(tokenizer, ids[:at]), FinishReason.STOP, ids[-1], at + 1)
    ignoring = SamplingParams(ignore_eos=True, stop_token_ids=(ids[0],), max_tokens=2 * len(ids) + 1)
    text, reason, _, count = answer(tokenizer, [*ids, eos, *ids], ignoring, eos=[eos])
    assert (text, reason, count) == (decode(tokenizer, [*ids, *ids]), FinishReason.LENGTH, 2 * len(ids) + 1)


def test_max_tokens_and_the_tighter_bound(tokenizer):
    ids = encode(tokenizer, "one two three four")
    assert answer(tokenizer, ids, SamplingParams(max_tokens=3))[1:] == (FinishReason.LENGTH, None, 3)
    assert answer(tokenizer, ids, SamplingParams(max_tokens=3), max_tokens=2)[1:] == (FinishReason.LENGTH, None, 2)


def test_an_incomplete_character_at_the_last_token_is_shown_as_broken():
    tokenizer = qwen_tokenizer()
    ids = encode(tokenizer, "a😀")[:-1]
    text, reason, _, _ = answer(tokenizer, ids, SamplingParams(max_tokens=len(ids)))
    assert (text, reason) == ("a" + REPLACEMENT, FinishReason.LENGTH)


def test_a_stop_string_wins_over_the_last_token(tokenizer):
    ids = encode(tokenizer, "one two")
    text, reason, matched, _ = answer(tokenizer, ids, SamplingParams(stop=("two",), max_tokens=len(ids)))
    assert (text, reason, matched) == ("one ", FinishReason.STOP, "two")
