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
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ContextOverflow, FastLLMError, InvalidRequest, UsageError
from . import signals
from .terminal import say, stats_line, write_answer

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from ..core.request import Timings
    from ..core.sampling import SamplingParams
    from ..llm import LLM

__all__ = ["Chat"]

SETTABLE = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
}
NEARLY_FULL = 0.9  # of the context: from here on every turn says so


class Chat:
    """One conversation. `run` reads until the user leaves and returns the exit code."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, raw: bool, quiet: bool, history: bool):
        self.llm, self.params, self.system, self.quiet = llm, params, system, quiet
        self.raw = raw or llm.loaded.template is None
        if self.raw and not raw:
            say("this model has no chat template: what you type is continued as it is")
        self.messages: list[dict[str, str]] = []
        self.last: Timings | None = None
        self._commands: dict[str, tuple[str, Callable[[str], bool | None]]] = {
            "/help": ("this list", self._help),
            "/clear": ("forget the conversation", self._clear),
            "/system": ("/system TEXT sets the instructions; without TEXT shows them", self._system),
            "/set": ("/set NAME VALUE changes a sampling setting; without a name shows all", self._set),
            "/regen": ("answer the last question again", self._regen),
            "/stats": ("speed and size of the last answer", self._stats),
            "/exit": ("leave (also Ctrl-D)", self._exit),
        }
        self._session = self._open_session(history)

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
        words = WordCompleter([*self._commands, *(f"/set {name}" for name in SETTABLE)], sentence=True)
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
            raise UsageError(f"a line of the input is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None

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
            if name in self._commands:
                return self._commands[name][1](rest.strip()) is not False
            say(f"no command {name}; /help lists them")
            return True
        if text.strip():
            self._answer([*self.messages, {"role": "user", "content": text}])
        return True

    # answers ----------------------------------------------------------------------------------------------------------

    def _prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        if self.raw:
            return self.llm.encode("".join(m["content"] for m in messages), parse_special=False)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.llm.render([*system, *messages])

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Answers the last of `messages`, which become the conversation; an error, or a stop before any text, leaves it as it was."""
        try:
            answer = self.llm.stream(self._prompt_ids(messages), self.params)
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
        if used >= NEARLY_FULL * self.llm.loaded.context:
            say(f"the context is nearly full ({used} of {self.llm.loaded.context} tokens): /clear starts afresh")

    # commands ---------------------------------------------------------------------------------------------------------

    def _help(self, text: str) -> None:
        width = max(map(len, self._commands))
        _say_lines(f"{name:{width}}  {about}" for name, (about, _) in self._commands.items())
        say('""" on a line of its own starts and ends a message of several lines; \\ at the end of a line continues it')

    def _clear(self, text: str) -> None:
        self.messages.clear()
        say("the conversation is forgotten")

    def _system(self, text: str) -> None:
        if text and self.raw:
            raise InvalidRequest("without a chat template there is no place for instructions: --raw, or a model without one")
        if text:
            self.system = text
            say("set; it counts from the next message on")
        else:
            say(self.system or "no system prompt is set")

    def _set(self, text: str) -> None:
        merged = self.params.merged_with(self.llm.loaded.defaults)
        if not text:
            _say_lines(f"{f.name} = {getattr(merged, f.name)}" for f in fields(merged) if f.name in SETTABLE)
            return
        name, _, value = text.replace("=", " ").partition(" ")
        name, value = name.replace("-", "_").replace("repeat_penalty", "repetition_penalty"), value.strip()
        if name not in SETTABLE:
            raise InvalidRequest(f"there is no setting '{name}'", fix=f"names: {', '.join(SETTABLE)}")
        if not value:
            raise InvalidRequest("/set takes NAME VALUE", fix=f"names: {', '.join(SETTABLE)}; the value `default` takes a change back")
        try:
            number = None if value == "default" else SETTABLE[name](value)
        except ValueError:
            raise InvalidRequest(f"{name} takes {'a whole number' if SETTABLE[name] is int else 'a number'}, not '{value}'") from None
        changed = replace(self.params, **{name: number})
        changed.merged_with(self.llm.loaded.defaults).validate(self.llm.loaded.planned.definition.vocab_size)
        self.params = changed
        say(f"{name} = {value}")

    def _regen(self, text: str) -> None:
        asked = self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else self.messages
        if not asked:
            raise InvalidRequest("there is nothing to answer again")
        self._answer(asked)

    def _stats(self, text: str) -> None:
        say(stats_line(self.last, self.llm.loaded.context) if self.last else "no answer yet")

    def _exit(self, text: str) -> bool:
        return False


def _say_lines(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


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
