"""The engine says what it needs: the package alone lets older libraries be installed, for vLLM's sake."""

from __future__ import annotations

import pytest

from polylens.engine import requirements
from polylens.errors import ModelLoadError


def test_what_is_installed_here_is_enough():
    requirements.check_requirements()


def test_a_library_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements, "version", lambda name: {"transformers": "5.19.0", "llguidance": "1.9.0"}[name])
    with pytest.raises(ModelLoadError, match=r"needs transformers >= 5.24, found 5.19.0"):
        requirements.check_requirements()


def test_later_versions_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements, "version", lambda name: {"transformers": "5.24.1", "llguidance": "1.10.0"}[name])
    requirements.check_requirements()
