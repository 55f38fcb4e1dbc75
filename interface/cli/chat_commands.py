"""The commands of the chat: each a function of the chat and of what stands behind its name, in the table at the end.

A command that cannot be followed raises a FastLLMError, which the chat shows. Nothing here reads the terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..core.errors import FastLLMError, InvalidRequest, OutOfMemory
from .terminal import say, stats_line

if TYPE_CHECKING:
    from .chat import Chat

__all__ = ["COMMANDS", "SETTABLE"]

SETTABLE: Final[dict[str, type]] = {
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
MAX_FILE_BYTES: Final = 32 << 20
FORMAT: Final = "fastllm-chat"  # the key by which a saved conversation is known
SHOWN_PIECES: Final = 200


def _help(chat: Chat, text: str) -> None:
    width = max(map(len, COMMANDS))
    _say_lines(f"{name:{width}}  {about}" for name, (about, _) in COMMANDS.items())
    say('""" on a line of its own starts and ends a message of several lines; \\ at the end of a line continues it')


def _clear(chat: Chat, text: str) -> None:
    chat.messages.clear()
    chat.attached = ""
    say("the conversation is forgotten")


def _regen(chat: Chat, text: str) -> None:
    asked = chat.messages[:-1] if chat.messages and chat.messages[-1]["role"] == "assistant" else chat.messages
    if not asked:
        raise InvalidRequest("there is nothing to answer again", fix="ask something first")
    chat.answer(asked)


def _undo(chat: Chat, text: str) -> None:
    if not chat.messages:
        raise InvalidRequest("there is nothing to take back", fix="/show tells what was said")
    while chat.messages and chat.messages.pop()["role"] != "user":
        pass
    say(f"the last question and its answer are taken back; {len(chat.messages)} messages are left")


def _system(chat: Chat, text: str) -> None:
    if text and chat.raw:
        raise InvalidRequest("without a chat template there is no place for instructions", fix="start without --raw, or /model NAME of a chat model")
    if text:
        chat.system = text
        say("set; it counts from the next message on")
    else:
        say(chat.system or "no system prompt is set")


def _set(chat: Chat, text: str) -> None:
    merged = chat.params.merged_with(chat.llm.loaded.defaults)
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
        raise InvalidRequest(f"{name} takes {'a whole number' if SETTABLE[name] is int else 'a number'}, not '{value}'", fix=f"/set {name} NUMBER, or /set {name} default") from None
    changed = replace(chat.params, **{name: number})
    changed.merged_with(chat.llm.loaded.defaults).validate(chat.llm.loaded.planned.definition.vocab_size)
    chat.params = changed
    say(f"{name} = {value}")


def _show(chat: Chat, text: str) -> None:
    loaded = chat.llm.loaded
    used = len(chat.prompt_ids(chat.messages)) if chat.messages else 0
    say(f"model {loaded.name} on {loaded.backend}, {loaded.threads} threads; context {used} of {loaded.context} tokens")
    say(f"system prompt: {chat.system or 'none'}")
    _set(chat, "")
    for message in chat.messages:
        say(f"[{message['role']}] {message['content']}")


def _save(chat: Chat, text: str) -> None:
    path = _path(text, "/save")
    data = {FORMAT: 1, "model": chat.llm.loaded.name, "system": chat.system, "messages": chat.messages}
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        if path.exists() and not _is_saved(path):
            raise InvalidRequest(f"{path} exists, and is no conversation", fix="name another file")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, ensure_ascii=False)
        part.replace(path)
    except (OSError, ValueError) as error:  # ValueError: of a name or a text that cannot be encoded
        raise FastLLMError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}", fix="/save another file") from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            part.unlink()
    say(f"{len(chat.messages)} messages are in {path}")


def _load(chat: Chat, text: str) -> None:
    path = _path(text, "/load")
    wrong = InvalidRequest(f"{path} is no conversation that /save wrote", fix="name one, or /file FILE to put a text before a message")
    try:
        data = json.loads(_read_text(path))
        json.dumps(data, ensure_ascii=False).encode()  # fails for lone surrogates, which no tokenizer takes
    except (ValueError, RecursionError):
        raise wrong from None
    if not isinstance(data, dict) or data.get(FORMAT) != 1 or not isinstance(data.get("messages"), list):
        raise wrong
    messages, system = data["messages"], data.get("system")
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] not in ("user", "assistant"):
            raise wrong
        if not isinstance(message["content"], str):
            raise wrong
    if not isinstance(system, str | None):
        raise wrong
    chat.messages, chat.system = messages, None if chat.raw else system
    if system and chat.raw:
        say("its instructions are left out: without a chat template there is no place for them")
    say(f"{len(messages)} messages are back; sampling settings stay as they are")


def _file(chat: Chat, text: str) -> None:
    path = _path(text, "/file")
    content = _read_text(path)
    chat.attached += f"{path.name}:\n{content}\n\n"
    count = len(chat.llm.tokenizer.encode(content, add_special=False, parse_special=False))
    say(f"{path.name} ({count:,} tokens) goes before your next message")


def _tokens(chat: Chat, text: str) -> None:
    if not text:
        used, context = len(chat.prompt_ids(chat.messages)) if chat.messages else 0, chat.llm.loaded.context
        say(f"the conversation has {used} tokens; {context - used} of the context of {context} are left")
        return
    tokenizer = chat.llm.tokenizer
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    say(f"{len(ids)} tokens: " + " ".join(f"{i}={tokenizer.id_to_piece(i)!r}" for i in ids[:SHOWN_PIECES]) + " …" * (len(ids) > SHOWN_PIECES))


def _stats(chat: Chat, text: str) -> None:
    say(stats_line(chat.last, chat.llm.loaded.context) if chat.last else "no answer yet")


def _model(chat: Chat, text: str) -> None:
    if not text:
        say(f"{chat.llm.loaded.name} ({chat.llm.loaded.planned.files.path})")
        return
    if chat.load is None:
        raise InvalidRequest("this chat has one model only", fix="/exit, then fastllm run NAME")
    try:
        new = chat.load(text)
    except OutOfMemory as error:
        raise OutOfMemory(error.message, why=f"{error.why or 'two models do not fit'}; {chat.llm.loaded.name} stays", fix=f"/exit, then fastllm run {text}", **error.fields) from None
    except OSError as error:
        raise FastLLMError(f"{text} cannot be opened: {error.strerror or error}", fix="check the path, or /model another name") from None
    chat.take_model(new)
    say(f"{new.loaded.name}: context {new.loaded.context}; the conversation goes on")


def _exit(chat: Chat, text: str) -> bool:
    return False


def _path(text: str, command: str) -> Path:
    """The path behind a command. Raises InvalidRequest for none."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise InvalidRequest(f"{text}: there is no such user, or no home", fix="write the path in full") from None
    if not path.name:
        raise InvalidRequest(f"{command} takes the name of a file", fix=f"{command} FILE")
    return path


def _read_text(path: Path) -> str:
    """The text of a file. Raises InvalidRequest for what is none, or too large."""
    try:
        if not path.is_file():
            raise InvalidRequest(f"there is no file {path}", fix="check the path")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} has {path.stat().st_size:,} bytes; at most {MAX_FILE_BYTES:,} are read", fix="name a part of it")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is no text in UTF-8: byte {error.start}", fix="convert it first: iconv -t UTF-8") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}", fix="check the path") from None


def _is_saved(path: Path) -> bool:
    try:
        data = json.loads(_read_text(path))
    except (ValueError, RecursionError, FastLLMError):
        return False
    return isinstance(data, dict) and FORMAT in data


def _say_lines(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


COMMANDS: Final[dict[str, tuple[str, Callable[[Any, str], bool | None]]]] = {
    "/help": ("this list", _help),
    "/clear": ("forget the conversation", _clear),
    "/regen": ("answer the last question again", _regen),
    "/undo": ("take the last question and its answer back", _undo),
    "/system": ("/system TEXT sets the instructions; without TEXT shows them", _system),
    "/set": ("/set NAME VALUE changes a sampling setting; without a name shows all", _set),
    "/show": ("model, settings and the conversation", _show),
    "/save": ("/save FILE writes the conversation", _save),
    "/load": ("/load FILE goes on with a conversation that was saved", _load),
    "/file": ("/file FILE puts its text before your next message", _file),
    "/tokens": ("/tokens TEXT shows its tokens; without TEXT counts those of the conversation", _tokens),
    "/stats": ("speed and size of the last answer", _stats),
    "/model": ("/model NAME goes on with another model; without a name tells which it is", _model),
    "/exit": ("leave (also Ctrl-D)", _exit),
}
"""name -> (a line of help, what it does: False leaves the chat)."""
