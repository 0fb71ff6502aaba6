"""Encodes rendered text such that its control tokens are the template's and no others; see `control_tokens`."""

from __future__ import annotations

import json
import re
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from polylens.errors import ModelLoadError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polylens.models.control_tokens import ControlTokens, Escape


@dataclass(frozen=True)
class _Renamed:
    """A tokenizer whose control tokens go by secret names, and its ids in terms of the original's."""

    backend: Tokenizer
    names: Mapping[str, str]
    original_ids: Mapping[int, int]
    break_name: str
    break_id: int


class SafeTokenizer:
    """Encodes rendered, escaped text; thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        control: ControlTokens,
        media_tokens: Sequence[str] = (),
        lock: threading.Lock | None = None,
    ) -> None:
        """`media_tokens`: the control tokens that occur in long runs, one for each feature row of an item.

        `lock`: that of another one for the same tokenizer.
        """
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelLoadError(
                f"the tokenizer {type(tokenizer).__name__} has no fast form (tokenizer.json), which polylens needs "
                "to keep typed control tokens apart"
            )
        self.tokenizer = tokenizer
        self.control = control
        self.lock = lock or threading.Lock()  # transformers sets truncation and padding on the shared backend
        self._renamed: _Renamed | None = None
        self._media_ids = frozenset(control.ids[token] for token in media_tokens)
        self._media_runs = re.compile(f"({'|'.join(map(re.escape, media_tokens)) or '(?!)'})\\1*")
        unknown = getattr(tokenizer, "unk_token_id", None)  # the model's answer to any unknown character
        self._control_ids = frozenset(control.ids.values()) - {unknown}
        self._prefix, self._suffix = self._affixes()
        self._may_normalise = any(token.normalized for token in self._control_added_tokens())

    def encode(self, text: str, escape: Escape, options: Mapping[str, Any]) -> list[int]:
        """Ids of `text` as rendered (stand-ins in place). `options` are those the processor calls its tokenizer with.

        Raises RequestError where no encoding keeps typed control tokens apart.
        """
        lengths: list[int] = []
        shortened = self._media_runs.sub(lambda run: _first_of_run(run, lengths), text)
        ids = self._encode_short(shortened, escape, options)
        return self._with_runs(ids, lengths) if lengths else ids

    def _with_runs(self, ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Media tokens repeated again: encoding thousands of equal tokens one by one would take most of the time."""
        remaining = iter(lengths)
        return [token_id for one in ids for token_id in ([one] * next(remaining) if one in self._media_ids else (one,))]

    def _encode_short(self, text: str, escape: Escape, options: Mapping[str, Any]) -> list[int]:
        plain = escape.restore(text)
        ids = self._tokenizer_ids(plain, options)
        if not escape.is_needed and not self._may_normalise:
            return ids
        wanted = self.control.find(text)
        with_affixes = options.get("add_special_tokens", True)
        if self.control.find(plain) == wanted and self._holds(ids, wanted, with_affixes):
            return ids
        for with_breaks in (False, True):
            ids = self._renamed_ids(text, wanted, escape, with_breaks)
            ids = [*self._prefix, *ids, *self._suffix] if with_affixes else ids
            if self._holds(ids, wanted, with_affixes):
                return ids
        raise RequestError("the text cannot be encoded without forming a control token; change it", param="messages")

    def _tokenizer_ids(self, text: str, options: Mapping[str, Any]) -> list[int]:
        with self.lock:
            return list(self.tokenizer([text], **{**options, "verbose": False})["input_ids"][0])

    def _holds(self, ids: Sequence[int], wanted: Sequence[tuple[int, str]], with_affixes: bool) -> bool:
        """Whether the control tokens among `ids` are those of the template and no others."""
        expected = [self.control.ids[content] for _, content in wanted]
        if with_affixes:
            expected = [*self._prefix, *expected, *self._suffix]
        expected = [token_id for token_id in expected if token_id in self._control_ids]
        return expected == [token_id for token_id in ids if token_id in self._control_ids]

    def _renamed_ids(
        self, text: str, wanted: Sequence[tuple[int, str]], escape: Escape, with_breaks: bool
    ) -> list[int]:
        if self._renamed is None:
            self._renamed = self._rename()
        renamed, pieces, position = self._renamed, [], 0
        for start, content in wanted:
            pieces += [self._user_text(escape.restore(text[position:start]), with_breaks), renamed.names[content]]
            position = start + len(content)
        pieces.append(self._user_text(escape.restore(text[position:]), with_breaks))
        ids = renamed.backend.encode("".join(pieces), add_special_tokens=False).ids
        return [renamed.original_ids.get(token_id, token_id) for token_id in ids if token_id != renamed.break_id]

    def _user_text(self, text: str, with_breaks: bool) -> str:
        """With breaks: typed control tokens are cut after their first character, for vocabularies whose plain
        model knows a control token's text as one piece."""
        if not with_breaks or self._renamed is None:
            return text
        pieces, position = [], 0
        for start, _ in self.control.find(text):
            pieces += [text[position : start + 1], self._renamed.break_name]
            position = start + 1
        return "".join([*pieces, text[position:]])

    def _affixes(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text when it adds special tokens."""
        bare = self._tokenizer_ids("a", {"add_special_tokens": False})
        full = self._tokenizer_ids("a", {"add_special_tokens": True})
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise ModelLoadError(
            f"the tokenizer {type(self.tokenizer).__name__} changes a text when it adds special tokens"
        )

    def _control_added_tokens(self) -> list[AddedToken]:
        added = self.tokenizer.added_tokens_decoder
        return [added.get(token_id) or _piece(content) for content, token_id in self.control.ids.items()]

    def _rename(self) -> _Renamed:
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = None
        originals = {token["content"]: token["id"] for token in state["added_tokens"]} | self.control.ids
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in self.control.ids]
        backend = Tokenizer.from_str(json.dumps(state))
        secret = secrets.token_hex(16)
        names = {content: f"\ufdd0{secret}{index}\ufdd1" for index, content in enumerate(self.control.ids)}
        break_name = f"\ufdd0{secret}\ufdd1"
        tokens = [_private(names[token.content], token) for token in self._control_added_tokens()]
        backend.add_tokens([*tokens, AddedToken(break_name, normalized=False)])
        vocabulary = backend.get_added_tokens_decoder()
        current = {token.content: token_id for token_id, token in vocabulary.items()}
        return _Renamed(
            backend=backend,
            names=names,
            original_ids={current[names.get(content, content)]: token_id for content, token_id in originals.items()},
            break_name=break_name,
            break_id=current[break_name],
        )


def _first_of_run(run: re.Match[str], lengths: list[int]) -> str:
    """The run's token once; notes how often it came."""
    lengths.append(len(run.group()) // len(run.group(1)))
    return run.group(1)


def _piece(content: str) -> AddedToken:
    """As if it were one: found in the normalized text, as the plain model finds its pieces."""
    return AddedToken(content, normalized=True)


def _private(name: str, token: AddedToken) -> AddedToken:
    """Not normalized: the name is put exactly where the token's text was found."""
    return AddedToken(name, single_word=False, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
