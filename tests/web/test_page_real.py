"""The page and a real server with a real model, which is killed in the middle of an answer and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

pytestmark = pytest.mark.real_model
WAIT_S = 60


@pytest.fixture
def serve(real_model_path, tmp_path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """serve(port) -> a server that is ready, and its address."""
    model = real_model_path("smollm2")
    running: list[subprocess.Popen[str]] = []

    def start(port: str = "0", *options: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "fastllm", "server", os.fspath(model), "--port", port, "--model-name", "smollm2", "--ctx", "2048", *options]
        with (tmp_path / "log").open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "FASTLLM_OFFLINE": "1"})
        running.append(process)
        address = process.stdout.readline().strip()
        assert address, (tmp_path / "log").read_text()
        return process, address

    yield start
    for process in running:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()


def text(tab) -> str:
    """What the answer says."""
    return tab.page.locator(".message.assistant .markdown").inner_text()


def test_a_chat_with_a_real_model_outlives_a_restart_of_the_server(serve, open_tab):
    process, address = serve("0", "--api-key", "a-good-key")
    tab = open_tab(f"{address}/")
    tab.page.get_by_label("API key", exact=True).fill("a-good-key")
    tab.page.keyboard.press("Enter")
    tab.page.locator(".model", has_text="smollm2").wait_for()
    tab.page.keyboard.press("Control+,")
    tab.page.locator("#set-temperature").fill("0")
    tab.page.locator("#set-max_tokens").fill("16")
    tab.page.keyboard.press("Escape")
    tab.ask("Tell me the capital of France.")
    tab.answered("Paris")
    first = text(tab)
    assert "tokens/s" in tab.page.locator(".figures").inner_text()
    assert tab.page.locator("meter").get_attribute("max") == "2048"
    tab.button("Write again").click()
    tab.count(".versions", 1)
    tab.answered("Paris")
    assert text(tab) == first  # temperature 0: the same answer

    tab.button("New chat").click()
    tab.page.keyboard.press("Control+,")
    tab.page.locator("#set-temperature").fill("0")
    tab.page.keyboard.press("Escape")
    tab.ask("Write a long story about a dragon who lives in a castle.")
    tab.page.locator(".message.assistant .markdown").wait_for()
    process.kill()
    process.wait(WAIT_S)
    tab.page.get_by_text("The connection was lost. What had come is kept.").wait_for()
    tab.page.get_by_text("The server cannot be reached. Trying again …").wait_for()
    part = text(tab)
    serve(address.rpartition(":")[2], "--api-key", "a-good-key")
    tab.page.get_by_text("The server is back.").wait_for()
    tab.page.keyboard.press("Control+,")
    tab.page.locator("#set-max_tokens").fill("8")
    tab.page.keyboard.press("Escape")
    tab.button("Continue").click()
    tab.answered("The answer has reached the limit of tokens.")
    assert text(tab).startswith(part)
    assert len(text(tab)) > len(part)
    tab.reload()
    tab.answered("The answer has reached the limit of tokens.")
    tab.page.locator(".list li a", has_text="Tell me the capital").click()
    tab.answered("Paris")
    assert text(tab) == first
