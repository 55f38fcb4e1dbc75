"""The interface as text: nothing of `fastllm.api` changes without a line of docs/api.txt that says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("make_api_text", ROOT / "scripts" / "make_api_text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_interface_is_what_the_committed_text_says():
    assert load_script().text() == (ROOT / "docs" / "api.txt").read_text(encoding="utf-8"), "run: python scripts/make_api_text.py"


def test_a_changed_signature_changes_the_text(monkeypatch):
    from fastllm import api

    script = load_script()
    before = script.text()

    def close(self, force):
        """More than before."""

    monkeypatch.setattr(api.Backend, "close", close)
    assert script.text() != before
