"""The demo's data: complete, small, readable, and the held-out digits really held out."""

import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from polylens.demo import ADAPTERS, DOMAINS, adapter_paths, heldout, model_path, score

DATA = model_path().parent
TOOLS = Path(__file__).resolve().parents[2] / "tools"
MAX_DATA_BYTES = 12_000_000
MIN_HELD_OUT = 100


def test_data_is_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < MAX_DATA_BYTES


@pytest.mark.parametrize("domain", DOMAINS)
def test_heldout_pictures_are_readable_and_labelled(domain: str) -> None:
    pictures = heldout(domain)
    assert len(pictures) >= MIN_HELD_OUT
    for picture, label in pictures:
        assert picture.mode == "RGB"
        assert min(picture.size) >= 56
        assert str(int(label)) == label
        assert 0 <= int(label) <= 999
    # The encoder's batches are ragged only if sizes differ.
    assert len({picture.size for picture, _ in pictures}) > 10


def test_unknown_domain_is_refused() -> None:
    with pytest.raises(ValueError, match="no domain 'cursive'"):
        heldout("cursive")


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_changes_the_parts_it_names(name: str) -> None:
    with safe_open(adapter_paths()[name] / "adapter_model.safetensors", "pt") as file:
        keys = list(file.keys())
        assert {str(file.get_tensor(key).dtype) for key in keys} == {"torch.float16"}
    touched = {
        "tower": any(".visual.blocks." in key for key in keys),
        "connector": any(".visual.merger." in key for key in keys),
        "language": any(".language_model." in key for key in keys),
    }
    only = {"json": "language", "handwritten-language": "language", "handwritten-connector": "connector"}
    assert {part for part, is_touched in touched.items() if is_touched} == (
        {only[name]} if name in only else {"tower", "connector", "language"}
    )


def test_no_file_names_a_folder_of_the_training_machine() -> None:
    for path in DATA.rglob("*.json"):
        text = path.read_text()
        assert "/tmp/" not in text, path
        assert "/root/" not in text, path
        assert "/work/" not in text, path


def test_licences_are_shipped() -> None:
    assert (DATA / "LICENCES.md").is_file()
    assert (TOOLS / "fonts" / "LICENSE_DEJAVU").is_file()


def test_chat_template_gives_one_slot_per_visual_token() -> None:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model_path())
    picture, _ = heldout("clean")[0]
    message = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Read."}]}
    inputs = processor.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    slots = int((inputs["input_ids"] == processor.image_token_id).sum())
    assert slots == int(inputs["image_grid_thw"].prod()) // 4
    assert inputs["pixel_values"].shape == (slots * 4, 3 * 2 * 14 * 14)


@pytest.mark.parametrize(
    ("answer", "adapter", "right"),
    [
        ("42", None, True),
        ("42", "thermal", True),
        ("042", None, False),
        ("", None, False),
        ('{"value": 42}', "json", True),
        ('{"value": 43}', "json", False),
        ('{"value": "42"}', "json", False),
        ("42", "json", False),
        ("[42]", "json", False),
        ('{"value": 4', "json", False),
    ],
)
def test_score(answer: str, adapter: str | None, right: bool) -> None:
    assert score(answer, "42", adapter) is right


def test_training_and_held_out_digits_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    monkeypatch.syspath_prepend(str(TOOLS))
    try:
        import pictures
    finally:
        sys.modules.pop("pictures", None)
    pools = [
        [digit.tobytes() for digits in pictures.load_handwriting(held_out).by_digit.values() for digit in digits]
        for held_out in (False, True)
    ]
    assert not set(pools[0]) & set(pools[1])
    assert sum(map(len, pools)) == len(datasets.load_digits().target)


def test_labels_cover_one_to_three_digits() -> None:
    for domain in DOMAINS:
        lengths = {len(label) for _, label in heldout(domain)}
        assert lengths == {1, 2, 3}, json.dumps(sorted(lengths))
