"""The chat of `fastllm run`: a prompt-toolkit session with history, multi-line input and commands.

Ctrl-C while the model answers stops the answer only (what it said stays in the conversation, and in the cache); at an empty prompt it
asks once and leaves the second time. Ctrl-D leaves. Nothing is dropped from a conversation unasked: a full context is said before
it happens.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import ContextOverflow, FastLLMError, InvalidRequest
from .terminal import stats_line, write_answer

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
            self._say("this model has no chat template: what you type is continued as it is")
        self.messages: list[dict[str, str]] = []
        self.last: Timings | None = None
        self._session = self._open_session(history)
        self._commands: dict[str, tuple[str, Callable[[list[str]], bool | None]]] = {
            "/help": ("this list", self._help),
            "/clear": ("forget the conversation", self._clear),
            "/system": ("/system TEXT sets the instructions; without TEXT shows them", self._system),
            "/set": ("/set NAME VALUE changes a sampling setting; without a name shows all", self._set),
            "/regen": ("answer the last question again", self._regen),
            "/stats": ("speed and size of the last answer", self._stats),
            "/exit": ("leave (also Ctrl-D)", self._exit),
        }

    # input ------------------------------------------------------------------------------------------------------------

    def _open_session(self, history: bool) -> PromptSession[str] | None:
        """prompt-toolkit on a terminal; None where input is a pipe (lines are then read as they come)."""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return None
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        store: Any = InMemoryHistory()
        path = _history_file() if history else None
        if path is not None:
            store = FileHistory(str(path))
        words = WordCompleter([*self._names(), *SETTABLE], sentence=True)
        return PromptSession(history=store, completer=words, complete_while_typing=False)

    @staticmethod
    def _names() -> list[str]:
        return ["/help", "/clear", "/system", "/set", "/regen", "/stats", "/exit"]

    def _read_line(self, prompt: str) -> str:
        if self._session is not None:
            return self._session.prompt(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

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
            self._say(f"{self.llm.loaded.name} · context {self.llm.loaded.context} · /help lists commands, Ctrl-D leaves")
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
            except KeyboardInterrupt:
                if asked_to_leave or self._session is None:
                    return 130
                asked_to_leave = True
                self._say("Ctrl-C again, or Ctrl-D, leaves")
            except FastLLMError as error:
                click.echo(error.render(), err=True)
            text = None

    def _take(self, text: str) -> bool:
        """A command or a message; False to leave."""
        if text.startswith("/"):
            name, _, rest = text.partition(" ")
            if name in self._commands:
                return self._commands[name][1]([rest.strip()] if rest.strip() else []) is not False
            self._say(f"no command {name}; /help lists them")
            return True
        if text.strip():
            self.messages.append({"role": "user", "content": text})
            self._answer()
        return True

    # answers ----------------------------------------------------------------------------------------------------------

    def _prompt_ids(self) -> list[int]:
        if self.raw:
            return self.llm.encode("".join(m["content"] for m in self.messages), parse_special=False)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.llm.render([*system, *self.messages])

    def _answer(self) -> None:
        """Answers the last message; an error or a stop before the first token takes the message back."""
        try:
            answer = self.llm.stream(self._prompt_ids(), self.params)
        except ContextOverflow as error:
            self.messages.pop()
            raise ContextOverflow(error.message, fix="/clear starts afresh; or shorten the message, or start with a larger --ctx") from error
        except FastLLMError:
            self.messages.pop()
            raise
        parts: list[str] = []
        pieces = iter(answer)
        try:
            for piece in pieces:
                parts.append(piece.text)
                write_answer(piece.text)
        except KeyboardInterrupt:
            pieces.close()  # type: ignore[attr-defined]
            self._say("\n(stopped)")
        write_answer("\n")
        done = answer.completion
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        if done is None:
            return
        self.last = done.timings
        used = done.timings.prompt_tokens + done.timings.decode_tokens
        if not self.quiet:
            self._say(stats_line(done.timings, self.llm.loaded.context))
        if used >= NEARLY_FULL * self.llm.loaded.context:
            self._say(f"the context is nearly full ({used} of {self.llm.loaded.context} tokens): /clear starts afresh")

    @staticmethod
    def _say(text: str) -> None:
        click.echo(text, err=True)

    # commands ---------------------------------------------------------------------------------------------------------

    def _help(self, args: list[str]) -> None:
        width = max(map(len, self._commands))
        self._lines(f"{name:{width}}  {text}" for name, (text, _) in self._commands.items())
        self._say('""" on a line of its own starts and ends a message of several lines; \\ at the end of a line continues it')

    def _lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._say(line)

    def _clear(self, args: list[str]) -> None:
        self.messages.clear()
        self._say("the conversation is forgotten")

    def _system(self, args: list[str]) -> None:
        if args:
            self.system = args[0]
            self._say("set; it counts from the next message on")
        else:
            self._say(self.system or "no system prompt is set")

    def _set(self, args: list[str]) -> None:
        words = shlex.split(args[0]) if args else []
        if not words:
            merged = self.params.merged_with(self.llm.loaded.defaults)
            self._lines(f"{f.name} = {getattr(merged, f.name)}" for f in fields(merged) if f.name in SETTABLE)
            return
        name, value = words[0].replace("-", "_"), words[1:] and words[1]
        if name not in SETTABLE or not value:
            raise InvalidRequest(f"/set takes NAME VALUE; names: {', '.join(SETTABLE)}")
        try:
            changed = replace(self.params, **{name: SETTABLE[name](value)})
        except ValueError:
            raise InvalidRequest(f"{name} takes {'a whole number' if SETTABLE[name] is int else 'a number'}, not {value!r}") from None
        changed.merged_with(self.llm.loaded.defaults).validate(self.llm.loaded.planned.definition.vocab_size)
        self.params = changed
        self._say(f"{name} = {value}")

    def _regen(self, args: list[str]) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise InvalidRequest("there is nothing to answer again")
        self._answer()

    def _stats(self, args: list[str]) -> None:
        self._say(stats_line(self.last, self.llm.loaded.context) if self.last else "no answer yet")

    def _exit(self, args: list[str]) -> bool:
        return False


def _history_file() -> Path | None:
    """The history, readable by its owner only; None where no folder can be written."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    path = Path(base) / "fastllm" / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return None
    return path
