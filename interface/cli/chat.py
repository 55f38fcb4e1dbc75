"""The chat of `fastllm run`: a prompt-toolkit session with history, multi-line input and commands.

Ctrl-C while the model answers stops the answer only (what it said stays in the conversation, and in the cache); at an empty prompt it
asks once and leaves the second time. Ctrl-D leaves. Nothing is dropped from a conversation unasked: a full context is said before
it happens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ContextOverflow, FastLLMError, UsageError
from . import signals
from .chat_commands import COMMANDS, SETTABLE
from .chat_context import make_room
from .terminal import say, stats_line, write_answer

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from ..core.request import Timings
    from ..core.sampling import SamplingParams
    from ..llm import LLM

__all__ = ["Chat"]

NEARLY_FULL = 0.9  # of the context: from here on every turn says so


class Chat:
    """One conversation. `run` reads until the user leaves and returns the exit code."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, raw: bool, quiet: bool, history: bool, switches: Mapping[str, Any] | None = None, load: Callable[[str], LLM] | None = None):
        """switches: variables of the template; load: opens another model for `/model`."""
        self.llm, self.params, self.system, self.quiet = llm, params, system, quiet
        self.switches = dict(switches or {})
        self._asked_raw = raw
        self.raw = raw or llm.loaded.template is None
        self.messages: list[dict[str, str]] = []
        self.last: Timings | None = None
        self.attached = ""  # text of files that goes before the next message
        self.load = load
        self._session = self._open_session(history)

    def take_model(self, llm: LLM) -> None:
        """Goes on with another model; the one before is closed."""
        self.llm, earlier = llm, self.llm
        earlier.close()
        self.raw = self._asked_raw or llm.loaded.template is None
        if self.raw and not self._asked_raw:
            say("this model has no chat template: what you type is continued as it is")
        if "enable_thinking" in self.switches and (llm.loaded.template is None or "enable_thinking" not in llm.loaded.template.variables):
            self.switches.clear()

    @property
    def interactive(self) -> bool:
        """Whether somebody can be asked."""
        return self._session is not None

    def ask(self, question: str) -> str:
        """What somebody types after a question; "" for Ctrl-C or the end of input."""
        try:
            return self._read_line(question)
        except EOFError:
            return ""
        except signals.Terminated:
            raise
        except KeyboardInterrupt:
            signals.forget()
            return ""

    # input ------------------------------------------------------------------------------------------------------------

    def _open_session(self, history: bool) -> PromptSession[str] | None:
        """prompt-toolkit on a terminal; None where input is a pipe (lines are then read as they come)."""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return None
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        # A signal that ends the chat can arrive in the task that loads the history; the library would log it with a traceback.
        logging.getLogger("prompt_toolkit").addHandler(logging.NullHandler())

        class SavedHistory(FileHistory):
            """A history that is no reason to end a chat: what cannot be written is kept in memory."""

            def store_string(self, string: str) -> None:
                with contextlib.suppress(OSError):
                    super().store_string(string)

        path = _history_file() if history else None
        store: Any = SavedHistory(str(path)) if path is not None else InMemoryHistory()
        words = WordCompleter([*COMMANDS, *(f"/set {name}" for name in SETTABLE)], sentence=True)
        return PromptSession(history=store, completer=words, complete_while_typing=False)

    def _read_line(self, prompt: str) -> str:
        if self._session is not None:
            return self._session.prompt(prompt)
        data = sys.stdin.buffer.readline()
        if not data:
            raise EOFError
        try:
            return data.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"a line of the input is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}", fix="convert the input first: iconv -t UTF-8") from None

    def _read(self) -> str:
        """One message: a line, or everything between two lines of triple quotes; a backslash at the end continues a line."""
        text = self._read_line("> ")
        if text.strip().startswith('"""'):
            lines = [text.strip()[3:]]
            while not lines[-1].rstrip().endswith('"""'):
                lines.append(self._read_line("… "))
            lines[-1] = lines[-1].rstrip()[:-3]
            return "\n".join(lines).strip("\n")
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._read_line("… ")
        return text

    def run(self, first: str | None = None) -> int:
        """Reads and answers until the user leaves."""
        if not self.quiet:
            say(f"{self.llm.loaded.name} · context {self.llm.loaded.context} · /help lists commands, Ctrl-D leaves")
        asked_to_leave = False
        text = first
        while True:
            try:
                if text is None:
                    text = self._read()
                asked_to_leave = False
                if not self._take(text.strip("\n")):
                    return 0
            except EOFError:
                return 0
            except signals.Terminated:
                raise
            except KeyboardInterrupt:
                if asked_to_leave or self._session is None:
                    return signals.INTERRUPTED
                signals.forget()
                if not self._session.default_buffer.text:  # else it only took back what was typed
                    asked_to_leave = True
                    say("Ctrl-C again, or Ctrl-D, leaves")
            except FastLLMError as error:
                say(error.render())
            text = None

    def _take(self, text: str) -> bool:
        """A command or a message; False to leave. A text of several lines is a message."""
        if text.startswith("/") and "\n" not in text:
            name, _, rest = text.partition(" ")
            if name in COMMANDS:
                return COMMANDS[name][1](self, rest.strip()) is not False
            say(f"no command {name}; /help lists them")
            return True
        if text.strip():
            self.answer([*self.messages, {"role": "user", "content": self.attached + text}])
            self.attached = ""
        return True

    # answers ----------------------------------------------------------------------------------------------------------

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The conversation as the model reads it."""
        if self.raw:
            return self.llm.encode("".join(m["content"] for m in messages), parse_special=False)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.llm.render([*system, *messages], **self.switches)

    def answer(self, messages: list[dict[str, str]]) -> None:
        """Answers the last of `messages`, which become the conversation; an error, or a stop before any text, leaves it as it was."""
        fitting = make_room(self, messages)
        if fitting is None:
            return
        messages = fitting
        try:
            answer = self.llm.stream(self.prompt_ids(messages), self.params)
        except ContextOverflow as error:
            fix = "/clear starts afresh; or shorten the message, or start with a larger --ctx"
            raise ContextOverflow(error.message, fix=fix, **error.fields) from error
        parts: list[str] = []
        try:
            for piece in answer:
                parts.append(piece.text)
                write_answer(piece.text)
        except signals.Terminated:
            raise
        except KeyboardInterrupt:
            answer.cancel()
            signals.forget()
            write_answer("\n")
            say("(stopped)")
        else:
            write_answer("\n")
        done = answer.completion
        if done is not None or "".join(parts):
            self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]
        if done is None:
            return
        self.last = done.timings
        used = done.timings.prompt_tokens + done.timings.decode_tokens
        if not self.quiet:
            say(stats_line(done.timings, self.llm.loaded.context))
        if done.finish_reason == "length" and used >= self.llm.loaded.context:
            say("the answer was cut: the context is full")
        elif used >= NEARLY_FULL * self.llm.loaded.context:
            say(f"the context is nearly full ({used} of {self.llm.loaded.context} tokens): /clear starts afresh")


def _history_file() -> Path | None:
    """The history, readable by its owner only; None where no folder can be written."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # the XDG rules: a relative path is invalid and ignored
        base = os.path.join(os.path.expanduser("~"), ".local", "state")
    if not os.path.isabs(base):  # no home at all
        return None
    path = Path(base) / "fastllm" / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NONBLOCK, 0o600))
        path.chmod(0o600)
    except OSError:
        return None
    return path
