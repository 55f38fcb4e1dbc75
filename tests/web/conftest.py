"""A real browser without a window, and a server made of the page's files and scripted answers."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastllm.server.page import PATHS, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
WAIT_MS = 60_000
CONTEXT = 4096


class Fake:
    """Answers like the server does, from scripts. `answers`: one list of steps for each request to come; the last one stays.

    A step is a text; {"reasoning": …}, {"call": (name, arguments)}, {"finish": …} or {"error": …}; an Event to wait for; or "CUT", which
    drops the connection. seen: bodies of the requests. key: asked for, if set. refuse: a status instead of an answer.
    """

    def __init__(self) -> None:
        self.answers: list[list[Any]] = [["Hello!"]]
        self.seen: list[dict[str, Any]] = []
        self.key = ""
        self.refuse: list[tuple[int, str, str]] = []
        self.template = ""
        self.prefix = ""  # under which a proxy shows the server
        self.gone = threading.Event()  # a client has closed its stream
        self.page = Page()
        self.connections: set[socket.socket] = set()
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        """The page."""
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Listens; again on the same port."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Nobody listens any more, and what was open is cut."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            for connection in tuple(self.connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            fake.connections.add(self.connection)

        def finish(self) -> None:
            fake.connections.discard(self.connection)
            with contextlib.suppress(OSError):
                super().finish()

        def log_message(self, *args: Any) -> None:
            """Silent."""

        def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            self.send(status, {"content-type": "application/json", **(headers or {})}, json.dumps(body).encode())

        def refused(self) -> bool:
            if fake.key and self.headers.get("authorization") != f"Bearer {fake.key}":
                self.json(401, {"error": {"message": "this server asks for an API key"}})
                return True
            return False

        def do_GET(self) -> None:
            path, _, query = self.path.removeprefix(fake.prefix).partition("?")
            path = path or "/"
            if path in PATHS:
                headers = {name.lower(): value for name, value in self.headers.items()}
                self.send(*fake.page.answer(path, headers, query.removeprefix("v=")))
            elif path == "/health":
                self.json(200, {"status": "ok"})
            elif self.refused():
                pass
            elif path == "/v1/models":
                self.json(200, {"data": [{"id": "fake-1b"}]})
            elif path == "/props":
                settings = {"n_ctx": CONTEXT, "params": {"temperature": 0.7, "top_p": 0.9}}
                self.json(200, {"default_generation_settings": settings, "chat_template": fake.template})
            else:
                self.json(404, {"error": {"message": "there is no such route"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.refused():
                return
            assert self.path == f"{fake.prefix}/v1/chat/completions"
            fake.seen.append(body)
            if fake.refuse:
                status, message, code = fake.refuse.pop(0)
                self.json(status, {"error": {"message": message, "code": code}}, {"retry-after": "1"})
                return
            steps = fake.answers.pop(0) if len(fake.answers) > 1 else fake.answers[0]
            self.close_connection = True
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("connection", "close")
            self.end_headers()
            try:
                self.stream(steps)
            except OSError:
                fake.gone.set()

        def stream(self, steps: list[Any]) -> None:
            count, finish, calls = 0, "stop", 0
            for step in steps:
                if isinstance(step, threading.Event):
                    while not step.wait(0.05):
                        self.wfile.write(b": ping\n\n")
                        self.wfile.flush()
                    continue
                if step == "CUT":
                    return
                if isinstance(step, str):
                    delta: dict[str, Any] = {"content": step}
                elif "reasoning" in step:
                    delta = {"reasoning_content": step["reasoning"]}
                elif "call" in step:
                    name, arguments = step["call"]
                    function = {"name": name, "arguments": arguments}
                    delta = {"tool_calls": [{"index": calls, "id": f"call_{calls}", "type": "function", "function": function}]}
                    calls, finish = calls + 1, "tool_calls"
                elif "finish" in step:
                    finish = step["finish"]
                    continue
                else:
                    self.frame(step)
                    return
                count += 1
                self.frame({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None})
            self.frame({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "usage": None})
            usage = {"prompt_tokens": 100, "completion_tokens": count}
            self.frame({"choices": [], "usage": usage, "timings": {"predicted_per_second": 12.5, "prompt_ms": 80.0, "cache_n": 0}})
            self.wfile.write(b"data: [DONE]\n\n")

        def frame(self, data: Any) -> None:
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()

    return Handler


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium. One per module: while Playwright runs, no other test of this thread could have an event loop."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def fake() -> Iterator[Fake]:
    """A scripted server."""
    made = Fake()
    yield made
    made.stop()


class Tab:
    """A page that is open, what went wrong in it, and short names for what tests do."""

    def __init__(self, context: Any, url: str):
        self.context = context
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.errors: list[str] = []
        self.asked: list[str] = []  # addresses that the page has asked for
        self.page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        self.page.on("console", lambda line: self._heard(line))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("#composer")

    def _heard(self, line: Any) -> None:
        if line.type in ("error", "warning") and "Failed to load resource" not in line.text:
            self.errors.append(f"{line.type}: {line.text}")

    def reload(self) -> None:
        """The same address again."""
        self.page.reload()
        self.page.wait_for_selector("#composer")

    def ask(self, text: str) -> None:
        """Writes a question and sends it."""
        self.page.fill("#composer", text)
        self.page.press("#composer", "Enter")

    def answered(self, text: str, index: int = -1) -> Any:
        """Waits until the answer shows a text and has ended; gives the answer."""
        answer = self.page.locator(".message.assistant").filter(has_text=text)
        answer = answer.last if index == -1 else answer.nth(index)
        answer.wait_for()
        self.page.locator("button[aria-label='Send'], button[aria-label='发送']").wait_for()
        return answer

    def count(self, selector: str, number: int) -> None:
        """Waits until there are so many of something. (Not by a script: the policy lets no text become one.)"""
        from playwright.sync_api import expect

        expect(self.page.locator(selector)).to_have_count(number, timeout=WAIT_MS)

    def button(self, name: str) -> Any:
        """A button by its name."""
        return self.page.get_by_role("button", name=name, exact=True)


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """open_tab(url, **options of the context) -> a tab with storage of its own. before: a script that runs first. At the end: no error, and no violation of the policy."""
    made: list[Tab] = []

    def open_(url: str, context: Any = None, before: str = "", **options: Any) -> Tab:
        if context is None:
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, "locale": "en-US", **options})
        context.add_init_script("window.violations = []; addEventListener('securitypolicyviolation', e => violations.push(e.violatedDirective + ' ' + e.blockedURI))")
        if before:
            context.add_init_script(before)
        made.append(Tab(context, url))
        return made[-1]

    yield open_
    for tab in made:
        assert tab.page.evaluate("window.violations") == []
        assert tab.errors == []
    for context in {tab.context for tab in made}:
        context.close()


@pytest.fixture
def tab(open_tab: Callable[..., Tab], fake: Fake) -> Tab:
    """The page of the scripted server."""
    return open_tab(fake.url)


@pytest.fixture(scope="session")
def axe() -> Path | None:
    """axe-core, if the page's libraries are installed."""
    path = Path(__file__).parents[2] / "build" / "web" / "node_modules" / "axe-core" / "axe.min.js"
    return path if path.exists() else None
