"""`fastllm webui`: the server, and a browser that shows its page."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Sequence
from typing import Any

import click

from ..core.errors import UsageError
from .command import Command, model_argument
from .options import model_options, sampling_options
from .server import run_server, server_options

__all__ = ["open_browser", "webui_command"]


def open_browser(url: str) -> bool:
    """Has a browser show a page; whether there is one. Never one that draws in this terminal, unless BROWSER names it."""
    has_desktop = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not (has_desktop or os.environ.get("BROWSER")):
        return False
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    threading.Thread(target=browser.open, args=(url,), name="browser", daemon=True).start()  # some wait until the browser ends
    return True


@click.command("webui", cls=Command)
@model_argument()
@click.option("--no-open", is_flag=True, help="Print the page's address, and open no browser.")
@server_options
@sampling_options(without=("max_tokens", "seed", "ignore_eos"))
@model_options
def webui_command(model: str | None, no_open: bool, **values: Any) -> int:
    """Serve MODEL on this machine, and open its page in the browser.

    It takes the options of `fastllm server`. Conversations are kept by the browser under the page's address: with another --port the
    list begins anew.

    \b
    fastllm webui smollm2
    fastllm webui ./model.gguf --port 8080 --no-open
    """
    from .terminal import say

    if values["no_web"] or values["uds"] or values["embedding"]:
        name = "--no-web" if values["no_web"] else "--uds" if values["uds"] else "--embedding"
        raise UsageError(f"{name} leaves no page to open", fix="leave it out, or use `fastllm server`")

    def opened(addresses: Sequence[str]) -> None:
        url = _page(addresses, values["root_path"])
        shown = not no_open and open_browser(url)
        if not values["quiet"] or not shown:
            say(f"fastllm: the page is at {url}" + ("; the browser opens it" if shown else ""))

    return run_server(model, values, opened)


def _page(addresses: Sequence[str], root_path: str) -> str:
    """The page's address for a browser on this machine: `0.0.0.0` is no address to go to."""
    address = addresses[0].replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    return f"{address}{root_path.rstrip('/')}/"
