"""The processing of requests whose adapter's folder holds a processor, or parts of one.

Each part is made by the base processor's own class from the adapter's files, as `from_pretrained` would; parts that
the folder lacks, and parts whose content is the base's, are the base's objects. Classes are never chosen by an
adapter's files, so no code comes with them. What would not fit the model (other patches, media tokens of other ids)
is refused, and so is a template that reaches for Python's internals.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylens.config import MAX_IMAGE_PIXELS, MAX_VIDEO_PIXELS
from polylens.core import MediaKind
from polylens.errors import AdapterError, AdapterFormatError, AdapterMismatchError, first_line
from polylens.models.adapter_trials import check_pictures, check_template
from polylens.models.item_processor import media_part
from polylens.models.media_settings import takes_pixels
from polylens.models.processing import Processing

if TYPE_CHECKING:
    from polylens.core import ProcessingFiles

STRUCTURE = (
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "spatial_merge_size",
    "image_seq_length",
    "num_additional_image_tokens",
    "vision_feature_select_strategy",
)
"""Settings that the model's own layers decide: where they differ, the processor is another model's."""

_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_NO_ARGUMENTS = ("processor_class", "auto_map")


class AdapterProcessings:
    """One `Processing` for each distinct content of adapters' files, as long as an adapter has it. Thread-safe.

    base: the model's own. config, generation_config: the model's.
    """

    def __init__(self, base: Processing, config: Any, generation_config: Any = None) -> None:
        self._base = base
        self._config = config
        self._generation_config = generation_config
        self._making = threading.Lock()
        self._made: weakref.WeakValueDictionary[str, Processing] = weakref.WeakValueDictionary()

    def of(self, files: ProcessingFiles, num_rows: int) -> Processing:
        """The processing that `files` describe: the base's own object where nothing differs from it.

        num_rows: rows of the token embedding, with those the adapter brings. Raises AdapterFormatError for broken
        files, AdapterMismatchError for a processor that is not for this model.
        """
        if not files.digest:
            return self._base
        with self._making:
            processing = self._made.get(files.digest)
            if processing is None:
                processing = self._make(files)
                self._made[files.digest] = processing
        if processing.tokenizer is not self._base.tokenizer and processing.num_token_ids > num_rows:
            raise AdapterMismatchError(
                f"the tokenizer in the adapter's folder has {processing.num_token_ids} token ids, the model's "
                f"embedding {num_rows} rows, and the adapter brings no more"
            )
        return processing

    def _make(self, files: ProcessingFiles) -> Processing:
        processor = _processor(self._base, files)
        if processor is self._base.processor:
            return self._base
        _check_media_tokens(self._base, processor.tokenizer)
        with _naming("the chat template (or the tokenizer)"):
            check_template(processor.chat_template)
            processing = Processing(
                processor, self._config, self._generation_config, whole=self._base.whole, beside=self._base
            )
        check_pictures(self._base, processing)
        return processing


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """One clear line for whatever transformers, tokenizers and Jinja raise on odd files."""
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:
        raise AdapterFormatError(f"{what} in the adapter's folder cannot be used: {first_line(error)}") from error


def differences(base: Processing, processing: Processing) -> tuple[str, ...]:
    """What an adapter brings of its own, in words."""
    theirs, ours = processing.processor, base.processor
    different = {
        "tokenizer": processing.tokenizer is not base.tokenizer,
        "chat template": processing.template != base.template,
        "image settings": media_part(theirs, MediaKind.IMAGE) is not media_part(ours, MediaKind.IMAGE),
        "video settings": media_part(theirs, MediaKind.VIDEO) is not media_part(ours, MediaKind.VIDEO),
        "processor settings": _own_settings(theirs) != _own_settings(ours),
    }
    return tuple(name for name, differs in different.items() if differs)


def _processor(base: Processing, files: ProcessingFiles) -> Any:
    """A processor of the base's class, or the base's own where none of its parts would differ."""
    real = base.processor
    parts = {name: getattr(real, name) for name in real.get_attributes()}
    parts["tokenizer"] = _tokenizer(base, files.tokenizer)
    for kind in MediaKind:
        name = f"{kind}_processor"
        settings = _part_settings(files.settings, kind)
        if settings is not None and parts.get(name) is not None:
            parts[name] = _made_part(parts[name], settings, name)
    own = _own_settings(real)
    if any(parts.get(f"{kind}_processor") is not None for kind in MediaKind):  # else it takes text only
        own |= _given_settings(real, files.settings)
        _check_structure(_own_settings(real), own, "processor_config.json")
    template = _template(base, files.template)
    same_parts = all(part is getattr(real, name) for name, part in parts.items())
    if same_parts and _as_saved(own) == _as_saved(_own_settings(real)) and template == base.template:
        return real
    with _naming("the processor settings"):
        processor = type(real).from_args_and_dict(list(parts.values()), own)
    processor.chat_template = template
    return processor


def _template(base: Processing, given: str | None) -> str:
    """The adapter's; what its files hold of the base tokenizer's own template is no choice of the adapter's."""
    return base.template if given is None or given == base.tokenizer.chat_template else given


# ---- tokenizer


def _tokenizer(base: Processing, files: Mapping[str, bytes]) -> Any:
    """The tokenizer of `files`, completed by the base's where they hold no vocabulary."""
    if not files:
        return base.tokenizer
    with tempfile.TemporaryDirectory(prefix="polylens-") as folder:
        if not any(name in files for name in _VOCABULARY_FILES):
            with base.safe_tokenizer.lock:
                base.tokenizer.save_pretrained(folder)
        for name, content in files.items():
            _write(Path(folder) / name, content)
        with _naming("the tokenizer files"):
            tokenizer = type(base.tokenizer).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return base.tokenizer if _says_no_more(tokenizer, base.tokenizer) else tokenizer


def _write(file: Path, content: bytes) -> None:
    """A config adds to the base's where that is there."""
    if file.name == "tokenizer_config.json" and file.exists():
        content = json.dumps({**json.loads(file.read_bytes()), **json.loads(content)}).encode()
    file.write_bytes(content)


def _says_no_more(tokenizer: Any, base: Any) -> bool:
    """Whether a tokenizer is the base's, or lacks added tokens of it: a language model's may have no media tokens."""
    if _tokenizer_content(tokenizer) != _tokenizer_content(base):
        return False
    added = (tokenizer.added_tokens_decoder.items(), base.added_tokens_decoder)
    named = (tokenizer.special_tokens_map.items(), base.special_tokens_map)
    return all(ours.get(key) == value for theirs, ours in (added, named) for key, value in theirs)


def _tokenizer_content(tokenizer: Any) -> Any:
    """What decides how texts become ids, and back, beside the added tokens."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("added_tokens", "truncation", "padding"):  # the latter are set and unset by every call
        del state[name]
    named = {name: getattr(tokenizer, name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    return state, named, tokenizer.split_special_tokens, list(getattr(tokenizer, "chat_control_tokens", None) or ())


def _check_media_tokens(base: Processing, tokenizer: Any) -> None:
    for token_id in base.feature_ids:
        ours, theirs = (one.convert_ids_to_tokens(token_id) for one in (base.tokenizer, tokenizer))
        if theirs != ours:
            raise AdapterMismatchError(
                f"the tokenizer in the adapter's folder has {theirs!r} where the model's has the media token {ours!r}: "
                "it is another model's"
            )


# ---- settings


def _part_settings(settings: Mapping[str, Mapping[str, Any]], kind: MediaKind) -> Mapping[str, Any] | None:
    """Those of the image or video part, from the file that transformers would take them from."""
    nested = settings.get("processor_config.json", {}).get(f"{kind}_processor")
    images, videos = settings.get("preprocessor_config.json"), settings.get("video_preprocessor_config.json")
    found = nested if nested is not None else images if kind is MediaKind.IMAGE or videos is None else videos
    if found is not None and not isinstance(found, Mapping):
        raise AdapterFormatError(f"processor_config.json: {kind}_processor must be an object")
    return found


def _made_part(part: Any, settings: Mapping[str, Any], name: str) -> Any:
    """An image or video processor with the adapter's settings: `part` itself where they are the same."""
    named = settings.get(f"{name}_type")
    if named is not None and _class_name(named) != _class_name(type(part).__name__):
        raise AdapterMismatchError(
            f"the adapter's folder has settings of a {named!s:.80}, the model has a {type(part).__name__}"
        )
    with _naming(f"the {name} settings"):
        made = type(part).from_dict({key: value for key, value in settings.items() if key not in _NO_ARGUMENTS})
    _check_structure(vars(part), vars(made), f"the {name} settings")
    _check_size(part, made, name)
    return part if _effective(made) == _effective(part) else made


def _class_name(name: Any) -> str:
    """Without the suffixes of the same processor's other implementations."""
    return str(name).removesuffix("Fast").removesuffix("Pil")


def _effective(part: Any) -> str:
    """The settings that a call reads; keys that only older files had say nothing."""
    known = type(part).valid_kwargs.__annotations__
    values = {name: value for name, value in json.loads(part.to_json_string()).items() if name in known}
    return json.dumps(values, sort_keys=True)


def _check_structure(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    for name in STRUCTURE:
        if name in ours and theirs.get(name) != ours[name]:
            raise AdapterMismatchError(
                f"{where} in the adapter's folder has {name} {theirs.get(name)!r:.80}, the model's has {ours[name]!r}: "
                "it is another model's"
            )


def _check_size(ours: Any, theirs: Any, name: str) -> None:
    """Sizes bound the memory that a request may take."""
    largest = MAX_VIDEO_PIXELS if name == "video_processor" else MAX_IMAGE_PIXELS
    side = math.isqrt(largest)
    by_pixels = takes_pixels(ours) or _sizes(ours, "size").get("longest_edge", 0) > side
    bound = largest if by_pixels else side
    for key, value in {**_sizes(theirs, "size"), **_sizes(theirs, "crop_size")}.items():
        is_size = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= bound
        if not is_size:
            raise AdapterFormatError(f"the {name} settings' {key} must be an integer from 1 to {bound}, got {value!r}")
    if by_pixels and _sizes(theirs, "size")["shortest_edge"] > _sizes(ours, "size")["longest_edge"]:
        raise AdapterMismatchError(f"the {name} settings make every picture larger than the model's own largest")


def _sizes(part: Any, name: str) -> dict[str, Any]:
    size = getattr(part, name, None)
    return {} if size is None else {key: value for key, value in dict(size).items() if value is not None}


def _own_settings(processor: Any) -> dict[str, Any]:
    """Of the processor itself, beside its parts."""
    skipped = {*processor.get_attributes(), *_NO_ARGUMENTS}
    return {name: value for name, value in processor.to_dict().items() if name not in skipped}


def _as_saved(settings: Mapping[str, Any]) -> str:
    """As files have them: Aria's processor has numbers as keys, its file their digits."""
    return json.dumps(settings, sort_keys=True, default=str)


def _given_settings(real: Any, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    given = settings.get("processor_config.json", {})
    named = given.get("processor_class")
    if named is not None and named != type(real).__name__:
        raise AdapterMismatchError(
            f"processor_config.json in the adapter's folder is of a {named!s:.80}, the model has a "
            f"{type(real).__name__}"
        )
    # Only what the processor itself saves: its class may know more, such as models to fetch.
    return {name: value for name, value in given.items() if name in _own_settings(real)}
