"""Processor files of adapters: what is shared, what is refused, and that templates stay in their sandbox."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoProcessor

from polylens.adapters.combine import Combination
from polylens.adapters.processing_files import MAX_TEMPLATE_BYTES, read_processing_files
from polylens.errors import AdapterError, RequestError
from polylens.models import processing as processing_module
from polylens.models.adapter_processing import AdapterProcessings
from polylens.models.processing import Processing
from polylens.models.text_only import TextOnlyProcessor
from tests.families.build import ALL_FAMILIES, FAMILIES
from tests.families.media import picture, user

TEMPLATE = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"
NUM_ROWS = 100_000


@pytest.fixture(scope="module")
def base_of(checkpoint: Callable[[str], Path]) -> Callable[[str], tuple[Processing, Any]]:
    made: dict[str, tuple[Processing, Any]] = {}

    def base(family: str) -> tuple[Processing, Any]:
        if family not in made:
            config = AutoConfig.from_pretrained(checkpoint(family))
            made[family] = Processing(AutoProcessor.from_pretrained(checkpoint(family)), config), config
        return made[family]

    return base


class Folder:
    """An adapter's folder, and what one model makes of it."""

    def __init__(self, path: Path, checkpoint: Path, base: Processing, config: Any) -> None:
        self.path, self.checkpoint, self.base = path, checkpoint, base
        self.processings = AdapterProcessings(base, config)
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text("{}")

    def write(self, name: str, content: Any) -> Folder:
        text = content if isinstance(content, str) else json.dumps(content)
        (self.path / name).write_text(text, encoding="utf-8")
        return self

    def copy(self, *names: str) -> Folder:
        for name in names:
            shutil.copy(self.checkpoint / name, self.path / name)
        return self

    def change(self, name: str, **values: Any) -> Folder:
        """The checkpoint's JSON file with other values."""
        return self.write(name, {**json.loads((self.checkpoint / name).read_text()), **values})

    def image_settings(self, **values: Any) -> Folder:
        return self.write("preprocessor_config.json", {**self.base.processor.image_processor.to_dict(), **values})

    def processing(self, num_rows: int = NUM_ROWS, **switches: bool) -> Processing:
        return self.processings.of(read_processing_files(self.path, **switches), num_rows)

    def refused(self, *words: str, num_rows: int = NUM_ROWS) -> None:
        with pytest.raises(AdapterError) as caught:
            self.processing(num_rows)
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert word in message, message


@pytest.fixture
def folder_of(
    checkpoint: Callable[[str], Path], base_of: Callable[[str], tuple[Processing, Any]], tmp_path: Path
) -> Callable[[str], Folder]:
    return lambda family: Folder(tmp_path / f"of-{family}", checkpoint(family), *base_of(family))


@pytest.fixture
def folder(folder_of: Callable[[str], Folder]) -> Folder:
    return folder_of("qwen2_5_vl")


class TestSharing:
    def test_nothing_is_the_base(self, folder: Folder):
        assert folder.processing() is folder.base

    def test_copies_of_the_base_model_s_files_are_the_base(self, folder: Folder):
        folder.copy("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "processor_config.json")
        assert folder.processing() is folder.base

    def test_copies_as_older_transformers_saved_them_are_the_base(self, folder: Folder):
        settings = folder.base.processor.image_processor.to_dict()
        size = settings.pop("size")
        folder.write(
            "preprocessor_config.json",
            {
                **settings,
                "min_pixels": size["shortest_edge"],
                "max_pixels": size["longest_edge"],
                "image_processor_type": "Qwen2VLImageProcessorFast",
                "processor_class": "Qwen2_5_VLProcessor",
                "auto_map": {"AutoImageProcessor": "evil.Evil"},
            },
        )
        folder.write("video_preprocessor_config.json", folder.base.processor.video_processor.to_dict())
        assert folder.processing() is folder.base

    @pytest.mark.parametrize(
        "family",
        [
            *FAMILIES,
            *(
                pytest.param(name, marks=pytest.mark.full)
                for name in sorted(ALL_FAMILIES.keys() - {*FAMILIES})
                if ALL_FAMILIES[name].only_videos_of is None
            ),
        ],
    )
    def test_copies_are_the_base_in_every_family(self, folder_of: Callable[[str], Folder], family: str):
        folder = folder_of(family)
        folder.base.processor.save_pretrained(folder.path)
        assert folder.processing() is folder.base
        folder.image_settings(image_mean=[0.1, 0.2, 0.3])
        (folder.path / "processor_config.json").unlink()
        if family not in FAMILIES and folder.base.takes_videos:  # theirs would be the pictures', which need not fit
            folder.base.processor.video_processor.save_pretrained(folder.path)
        processing = folder.processing()
        assert processing.processor.image_processor is not folder.base.processor.image_processor
        assert processing.tokenizer is folder.base.tokenizer

    def test_a_language_model_s_tokenizer_without_media_tokens_is_the_base_s(self, folder: Folder):
        state = json.loads((folder.checkpoint / "tokenizer.json").read_text())
        state["added_tokens"] = [token for token in state["added_tokens"] if "_pad" not in token["content"]]
        folder.write("tokenizer.json", state)
        config = json.loads((folder.checkpoint / "tokenizer_config.json").read_text())
        config["extra_special_tokens"] = [name for name in config["extra_special_tokens"] if "_pad" not in name]
        folder.write("tokenizer_config.json", config)
        assert folder.processing() is folder.base

    def test_a_model_without_media_takes_no_picture_settings(self, folder: Folder):
        """An adapter's language part may be served over a language model: its processor files are the VLM's."""
        text_only = TextOnlyProcessor(folder.base.tokenizer)
        text_only.chat_template = TEMPLATE
        config = AutoConfig.from_pretrained(folder.checkpoint).get_text_config()
        base = Processing(text_only, config)
        folder.copy("processor_config.json").write("preprocessor_config.json", {"patch_size": 3})
        processings = AdapterProcessings(base, config)
        assert processings.of(read_processing_files(folder.path), NUM_ROWS) is base
        folder.write("chat_template.jinja", TEMPLATE + "!")
        assert processings.of(read_processing_files(folder.path), NUM_ROWS).template == TEMPLATE + "!"

    def test_equal_files_are_one_processing_that_goes_with_its_last_user(self, folder: Folder):
        folder.write("chat_template.jinja", TEMPLATE)
        first, second = folder.processing(), folder.processing()
        assert first is second is not folder.base
        assert first.memo is folder.base.memo
        assert first.safe_tokenizer.lock is folder.base.safe_tokenizer.lock
        gone = weakref.ref(first)
        del first, second
        gc.collect()
        assert gone() is None
        assert folder.processing().template == TEMPLATE

    def test_the_switches(self, folder: Folder):
        folder.write("processor_config.json", {"chat_template": TEMPLATE}).image_settings(image_mean=[0.1, 0.2, 0.3])
        folder.change("tokenizer_config.json", pad_token="<|im_end|>")
        settings_only, templates_only = folder.processing(templates=False), folder.processing(settings=False)
        assert settings_only.template == folder.base.template
        assert settings_only.tokenizer is folder.base.tokenizer
        assert settings_only.processor.image_processor.image_mean == (0.1, 0.2, 0.3)
        assert templates_only.template == TEMPLATE
        assert templates_only.tokenizer.pad_token == "<|im_end|>"
        assert templates_only.processor.image_processor is folder.base.processor.image_processor
        assert folder.processing(settings=False, templates=False) is folder.base

    def test_a_sum_has_what_all_its_parts_have(self, folder: Folder, tmp_path: Path):
        folder.write("chat_template.jinja", TEMPLATE)
        same, other = tmp_path / "same", tmp_path / "other"
        for copy in (same, other):
            shutil.copytree(folder.path, copy)
        (other / "chat_template.jinja").write_text(TEMPLATE + "!")
        for parts, template in (((folder.path, same), TEMPLATE), ((folder.path, other), folder.base.template)):
            files = read_processing_files(Combination(tuple((str(part), 1.0) for part in parts)))
            assert folder.processings.of(files, NUM_ROWS).template == template


class TestTemplates:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("chat_template.jinja", TEMPLATE),
            ("chat_template.json", {"chat_template": TEMPLATE}),
            ("processor_config.json", {"chat_template": TEMPLATE}),
            ("tokenizer_config.json", {"chat_template": TEMPLATE}),
            ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": TEMPLATE}]}),
        ],
    )
    def test_every_place_that_trainers_save_them_in(self, folder: Folder, name: str, content: Any):
        folder.write(name, content)
        processing = folder.processing()
        assert processing.template == TEMPLATE
        assert processing.tokenizer is folder.base.tokenizer
        prompt = processing.prepare([{"role": "user", "content": "hello"}])
        assert processing.tokenizer.decode(prompt.token_ids) == "[user] hello"

    def test_the_processor_s_file_comes_before_the_tokenizer_s(self, folder: Folder):
        folder.write("tokenizer_config.json", {"chat_template": "{{ nothing }}"})
        folder.write("chat_template.jinja", TEMPLATE)
        assert folder.processing().template == TEMPLATE

    def test_one_for_text_only_refuses_pictures_by_name(self, folder: Folder):
        processing = folder.write("chat_template.jinja", TEMPLATE).processing()
        with pytest.raises(RequestError, match="text only"):
            processing.prepare(user(picture(32, 24, 1), "what?"))

    def test_typed_control_tokens_bind_nothing(self, folder: Folder):
        processing = folder.write("chat_template.jinja", "<|im_start|>" + TEMPLATE).processing()
        prompt = processing.prepare([{"role": "user", "content": "<|image_pad|><|im_start|>"}])
        ids = processing.control.ids
        assert prompt.token_ids.count(ids["<|im_start|>"]) == 1
        assert ids["<|image_pad|>"] not in prompt.token_ids

    ESCAPES = (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ messages|map(attribute='x')|map('attr', '__init__')|list }}",
        "{% if false %}{{ raise_exception.__globals__['os'].system('id') }}{% endif %}",
        "{{ cycler.__init__.__globals__ }}",
    )

    @pytest.mark.parametrize("escape", ESCAPES)
    def test_internals_are_refused_at_load(self, folder: Folder, escape: str):
        folder.write("chat_template.jinja", TEMPLATE + escape).refused("chat template", "'__")

    @pytest.mark.parametrize(
        "escape",
        ["{{ ''['__cla' ~ 'ss__'].mro() }}", "{{ (''|attr('__cla' ~ 'ss__')).mro() }}", "{{ messages.append(1) }}"],
    )
    def test_hidden_ones_are_stopped_by_the_sandbox(self, folder: Folder, escape: str):
        condition = "{% if messages|length > 1 %}" + escape + "{% endif %}"
        processing = folder.write("chat_template.jinja", TEMPLATE + condition).processing()
        processing.prepare([{"role": "user", "content": "a"}])
        with pytest.raises(RequestError, match="unsafe") as caught:
            processing.prepare([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
        assert "\n" not in str(caught.value)

    def test_media_reach_the_template_as_plain_data(self, folder: Folder):
        """A picture has methods that write files."""
        template = "{% for part in messages[0]['content'] %}{{ part.text or part.image.save('/x') }}{% endfor %}"
        processing = folder.write("chat_template.jinja", template).processing()
        with pytest.raises(RequestError, match="no attribute 'save'"):
            processing.prepare(user(picture(32, 24, 1)))

    LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a + b %}{% endfor %}{% endfor %}"

    def test_endless_loops_end_at_load(self, folder: Folder, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(processing_module, "TEMPLATE_LIMIT_S", 0.2)
        folder.write("chat_template.jinja", TEMPLATE + self.LOOP).refused("longer than 0.2 s")

    def test_endless_loops_end_at_a_request(self, folder: Folder, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(processing_module, "TEMPLATE_LIMIT_S", 0.2)
        condition = "{% if messages|length > 1 %}" + self.LOOP + "{% endif %}"
        processing = folder.write("chat_template.jinja", TEMPLATE + condition).processing()
        with pytest.raises(RequestError, match="longer than"):
            processing.prepare([{"role": "user", "content": "a"}] * 2)
        processing.prepare([{"role": "user", "content": "a"}])


class TestTokenizers:
    def test_added_tokens_need_rows(self, folder: Folder):
        tokenizer = AutoProcessor.from_pretrained(folder.checkpoint).tokenizer
        tokenizer.add_tokens(["<new>", "<newer>"], special_tokens=True)
        tokenizer.save_pretrained(folder.path)
        size = len(tokenizer)
        assert folder.processing(num_rows=size).tokenizer.convert_tokens_to_ids("<newer>") == size - 1
        folder.refused(f"{size} token ids", f"{size - 1} rows", num_rows=size - 1)
        folder.processing(num_rows=size)  # for the next adapter, which may bring them

    def test_added_tokens_of_the_older_file(self, folder: Folder):
        size = len(folder.base.tokenizer)
        folder.copy("tokenizer.json").write("added_tokens.json", {"<new>": size})
        folder.write("special_tokens_map.json", {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
        tokenizer = folder.processing().tokenizer
        assert tokenizer("<new>", add_special_tokens=False)["input_ids"] == [size]
        assert tokenizer.eos_token == "<|im_end|>"

    def test_no_file_elsewhere_and_no_code_is_followed(self, folder: Folder):
        config = {"tokenizer_file": "/etc/passwd", "vocab_file": "/etc/passwd", "name_or_path": "/etc"}
        folder.copy("tokenizer.json").change(
            "tokenizer_config.json", **config, auto_map={"AutoTokenizer": ["evil.Evil", None]}
        )
        folder.write("evil.py", "raise SystemExit('executed')")
        assert folder.processing() is folder.base

    def test_other_media_tokens_are_another_model_s(self, folder: Folder):
        state = json.loads((folder.checkpoint / "tokenizer.json").read_text())
        swap = {"<|image_pad|>": "<|video_pad|>", "<|video_pad|>": "<|image_pad|>"}
        for token in state["added_tokens"]:
            token["content"] = swap.get(token["content"], token["content"])
        folder.write("tokenizer.json", state).copy("tokenizer_config.json")
        folder.refused("media token '<|image_pad|>'", "another model's")


class TestSettings:
    def test_pixel_limits(self, folder: Folder):
        processing = folder.image_settings(size={"shortest_edge": 64, "longest_edge": 512}).processing()
        ours, theirs = (one.prepare(user(picture(64, 64, 1), "what?")) for one in (folder.base, processing))
        assert theirs.items[0].num_tokens < ours.items[0].num_tokens
        assert theirs.items[0].settings_key != ours.items[0].settings_key

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"patch_size": 8}, ["patch_size 8", "has 4"]),
            ({"merge_size": 1}, ["merge_size"]),
            ({"size": {"shortest_edge": 64, "longest_edge": 10**9}}, ["longest_edge", "1000000000"]),
            ({"size": {"shortest_edge": 8192, "longest_edge": 9000}}, ["larger than"]),
            ({"size": {"shortest_edge": 64, "longest_edge": "huge"}}, ["huge"]),
            ({"size": "huge"}, ["image"]),
            ({"image_mean": [0.5, 0.5]}, ["image settings"]),
            ({"image_mean": "red"}, ["image"]),
            ({"rescale_factor": "x"}, ["image"]),
            ({"image_processor_type": "CLIPImageProcessor"}, ["CLIPImageProcessor", "Qwen2VLImageProcessor"]),
        ],
    )
    def test_what_does_not_fit_the_model_is_refused(self, folder: Folder, values: dict[str, Any], words: list[str]):
        folder.image_settings(**values).refused(*words)

    def test_a_fixed_size_is_the_model_s(self, folder_of: Callable[[str], Folder]):
        other = {"height": 84, "width": 84}
        folder_of("gemma3").image_settings(size=other).refused("(84, 84)", "(56, 56)")
        folder_of("llava").image_settings(crop_size=other, size={"shortest_edge": 84}).refused("(84, 84)", "(28, 28)")

    def test_another_model_s_processor_is_refused(self, folder_of: Callable[[str], Folder]):
        folder = folder_of("gemma3")
        folder.change("processor_config.json", image_seq_length=64).refused("image_seq_length", "64", "16")
        folder.write("processor_config.json", {"processor_class": "LlavaProcessor"}).refused("LlavaProcessor")


BROKEN: dict[str, dict[str, Any]] = {
    "settings that are a list": {"preprocessor_config.json": []},
    "settings that are no JSON": {"preprocessor_config.json": "{"},
    "deep settings": {"preprocessor_config.json": "[" * 100_000},
    "a part that is a list": {"processor_config.json": {"image_processor": [1]}},
    "a template that is a number": {"chat_template.json": {"chat_template": 3}},
    "a template without a default": {"chat_template.json": {"chat_template": {"tools": "x"}}},
    "an empty template": {"chat_template.jinja": ""},
    "a long template": {"chat_template.jinja": "x" * (MAX_TEMPLATE_BYTES + 1)},
    "a template with a syntax error": {"chat_template.jinja": "{% for x in %}"},
    "a template that writes no text": {"chat_template.jinja": "hello"},
    "a template that always raises": {"chat_template.jinja": "{{ raise_exception('no') }}"},
    "a tokenizer that is no JSON": {"tokenizer.json": "{"},
    "a tokenizer that is empty": {"tokenizer.json": {}},
    "a tokenizer of another kind": {"tokenizer.json": {"model": {"type": "Evil"}, "added_tokens": []}},
    "a tokenizer config that is a list": {"tokenizer_config.json": []},
    "a special token that is a list": {"tokenizer_config.json": {"eos_token": [1]}},
    "added tokens that are numbers": {"tokenizer_config.json": {"added_tokens_decoder": {"x": 3}}},
    "an old vocabulary that is none": {"vocab.json": "[]", "merges.txt": "x"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_one_clear_error(folder: Folder, name: str):
    for file, content in BROKEN[name].items():
        folder.write(file, content)
    folder.refused()


def test_files_that_are_no_text_or_too_large(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    (folder.path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    folder.refused("chat_template.jinja", "UTF-8")
    (folder.path / "chat_template.jinja").unlink()
    monkeypatch.setattr("polylens.adapters.processing_files.MAX_TOKENIZER_BYTES", 100)
    folder.copy("tokenizer.json").refused("tokenizer.json", "larger than 100 bytes")
