"""How much a service writes."""

from __future__ import annotations

import logging

import pytest

from protos import logs


def test_a_level_comes_from_the_environment_and_another_word_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    assert logs.level() == logging.INFO
    monkeypatch.setenv(logs.VARIABLE, "Warning")
    assert logs.level() == logging.WARNING
    monkeypatch.setenv(logs.VARIABLE, "loud")
    with pytest.raises(ValueError, match="HEADRACE_LOG_LEVEL=loud: no level; use one of debug, info, warning, error"):
        logs.level()
