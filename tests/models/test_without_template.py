"""Models without a chat template: the form of their documentation, or a template from the caller; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from polylens import LLM, SamplingParams
from polylens.config import EngineConfig
from polylens.errors import MediaError, ModelLoadError, RequestError
from polylens.models.loading import load_model
from polylens.models.processing import Processing
from tests.families.media import picture, user, video
from tests.models.test_media import write_video

CheckpointOf = Callable[[str], Path]
QUESTION = user(picture(32, 24, 1), "what is it?")


@pytest.fixture(scope="module")
def processing_of(checkpoint: CheckpointOf) -> Callable[[str], Processing]:
    return lambda family: load_model(checkpoint(family), EngineConfig()).processing


def test_a_template_from_the_caller(checkpoint: CheckpointOf) -> None:
    """It takes the place of none, as of the model's own."""
    template = (
        "{% for part in messages[0].content if part.type == 'text' %}Question: {{ part.text }} Answer:{% endfor %}"
    )
    loaded = load_model(checkpoint("blip-2"), EngineConfig(), template)
    ids = loaded.processing.prepare(QUESTION).token_ids
    assert "Question: what is it? Answer:" in loaded.processing.tokenizer.decode(ids)
    with LLM(checkpoint("git"), chat_template=template) as llm:
        assert llm.chat(QUESTION, sampling=SamplingParams(max_tokens=1, ignore_eos=True)).token_ids


def test_a_template_with_a_mistake_is_one_line(checkpoint: CheckpointOf) -> None:
    with pytest.raises(ModelLoadError, match=r"the chat template of .* cannot be used"):
        load_model(checkpoint("blip-2"), EngineConfig(), "{% for")


def test_a_picture_without_text(processing_of: Callable[[str], Processing]) -> None:
    """Captioning: nothing but the picture's tokens and those that begin a text."""
    prompt = processing_of("blip-2").prepare(user(picture(32, 24, 1)))
    assert len(prompt.token_ids) == prompt.items[0].num_tokens + 1


@pytest.mark.parametrize("family", ["blip-2", "git"])
def test_several_pictures_where_one_is_taken(family: str, processing_of: Callable[[str], Processing]) -> None:
    with pytest.raises(RequestError, match="takes one picture in a request, got 2"):
        processing_of(family).prepare(user(picture(8, 8), picture(8, 8, 1), "which?"))


def test_what_a_picture_says_depends_on_the_question(processing_of: Callable[[str], Processing]) -> None:
    """InstructBLIP's queries read it: features of one question are not those of another."""
    prepare = processing_of("instructblip").prepare
    one, other, again = (
        prepare(user(picture(32, 24, 1), text)).items[0] for text in ("a gauge?", "a dial?", "a gauge?")
    )
    assert one.settings_key == again.settings_key != other.settings_key


def test_the_question_reaches_the_queries_as_typed(
    processing_of: Callable[[str], Processing], checkpoint: CheckpointOf
) -> None:
    item = processing_of("instructblip").prepare(user(picture(32, 24, 1), "is <image> </s> here?")).items[0]
    expected = AutoProcessor.from_pretrained(checkpoint("instructblip")).qformer_tokenizer("is <image> </s> here?")
    assert item.tensors["qformer_input_ids"][0].tolist() == expected["input_ids"]


def test_idefics_fetches_nothing(processing_of: Callable[[str], Processing]) -> None:
    """Its processor would take a text that is an address for a picture, and get it."""
    template = "{{ messages[0].content[0].text }}<image>"
    processing = processing_of("idefics")
    own = Processing.__new__(Processing)
    own.__dict__.update(processing.__dict__, template=template)
    with pytest.raises(RequestError, match="only an address"):
        own.prepare(user("http://localhost/secret", picture(8, 8)))


def test_a_formula_takes_no_text(processing_of: Callable[[str], Processing]) -> None:
    with pytest.raises(RequestError, match="takes no text"):
        processing_of("pp_formulanet").prepare(QUESTION)
    with pytest.raises(RequestError, match="send one"):
        processing_of("pp_formulanet").prepare(user(""))


def test_typed_tags_of_other_models_stay_text(processing_of: Callable[[str], Processing]) -> None:
    """KOSMOS-2's own tags are tokens; a typed `</s>` is none."""
    processing = processing_of("kosmos-2")
    tokens: Any = processing.tokenizer.convert_ids_to_tokens(
        processing.prepare(user(picture(32, 24, 1), "<grounding></s> a")).token_ids
    )
    assert "<grounding>" in tokens
    assert "</s>" not in tokens


@pytest.mark.parametrize("typed", ["|SPEAKER|", "a |NEWLINE||SPEAKER| b", "<s>", "<0x04> yes", "|SPEAKER||SPEAKER"])
def test_typed_pieces_that_mean_structure_stay_text(typed: str, processing_of: Callable[[str], Processing]) -> None:
    """Fuyu's tokenizer itself would take them for patches, and for the begin of the answer."""
    processing = processing_of("fuyu")
    asked = processing.prepare(user(picture(32, 24, 1), typed))
    plain = processing.prepare(user(picture(32, 24, 1), "a"))
    marks = set(processing.control.ids.values())
    assert {"|SPEAKER|", "|NEWLINE|", "<s>", "<0x04>"} <= {*processing.control.ids}
    assert [one for one in asked.token_ids if one in marks] == [one for one in plain.token_ids if one in marks]
    assert asked.slots == plain.slots
    assert typed.replace(" ", "") in processing.tokenizer.decode(asked.token_ids).replace(" ", "")
    for prompt in (processing.prepare(user(typed)), processing.prepare_text(typed)):
        assert not marks.intersection(prompt.token_ids)


def test_fuyu_text_without_marks_is_the_processors_own(
    processing_of: Callable[[str], Processing], checkpoint: CheckpointOf
) -> None:
    text = "a |SPEAKE <box>1, 2, 3, 4</box> R| < s>"
    own = AutoProcessor.from_pretrained(checkpoint("fuyu"))(images=picture(32, 24, 1), text=text, return_tensors="pt")
    assert processing_of("fuyu").prepare(user(picture(32, 24, 1), text)).token_ids == own["input_ids"][0].tolist()


def test_four_frames_and_nothing_else(processing_of: Callable[[str], Processing], checkpoint: CheckpointOf) -> None:
    prepare = processing_of("instructblipvideo").prepare
    asked = user(video(4, 24, 32, 1), "what is <video> here?")
    assert prepare(asked).items[0].num_tokens == 4 * 6  # queries of each frame
    for num_frames in (1, 3, 8):
        with pytest.raises(MediaError, match=f"takes 4 frames of a video, got {num_frames}"):
            prepare(user(video(num_frames, 24, 32, 1), "what?"))
    with pytest.raises(MediaError, match="leave fps and num_frames out"):
        prepare(asked, mm_processor_kwargs={"num_frames": 8})
    with pytest.raises(RequestError, match="takes one video in a request, got 2"):
        prepare(user(video(4, 24, 32, 1), video(4, 24, 32, 2), "which?"))
    with pytest.raises(RequestError, match="takes videos only, no pictures"):
        prepare(QUESTION)


def test_four_frames_of_a_file(processing_of: Callable[[str], Processing], tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 30)
    asked = [{"role": "user", "content": [{"type": "video", "video": str(file)}]}]
    pixels = processing_of("instructblipvideo").prepare(asked).items[0].tensors["pixel_values"]
    assert pixels.shape[:2] == (1, 4)
