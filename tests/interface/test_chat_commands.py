"""Commands of the chat, and what it does when its context fills, without a terminal."""

from __future__ import annotations

import json
import shutil
import stat
from types import SimpleNamespace

import pytest

from fastllm import LLM, SamplingParams
from fastllm.cli.chat import Chat
from fastllm.cli.chat_commands import COMMANDS
from fastllm.core.errors import ContextOverflow, FastLLMError, InvalidRequest, OutOfMemory


@pytest.fixture
def make(tiny_model):
    """make(model, **options of Chat) -> a chat, whose models are closed at the end."""
    made = []

    def call(model=tiny_model, max_tokens=4, **options):
        llm = LLM(model, backend="ref")
        given = {"system": None, "raw": False, "quiet": True, "history": False, **options}
        made.append(Chat(llm, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True), **given))
        return made[-1]

    yield call
    for chat in made:
        chat.llm.close()


@pytest.fixture
def chat(make):
    return make()


def typed(chat, capsys, line):
    """What a line says on stderr."""
    capsys.readouterr()
    assert chat._take(line) is (line != "/exit")
    return capsys.readouterr().err


def test_the_help_lists_every_command(chat, capsys):
    said = typed(chat, capsys, "/help")
    assert set("/help /clear /regen /undo /system /set /show /save /load /file /tokens /stats /model /exit".split()) == set(COMMANDS)
    assert all(f"{name} " in said for name in COMMANDS)


def test_undo_takes_the_last_turn_back(chat, capsys):
    with pytest.raises(InvalidRequest, match="nothing to take back"):
        chat._take("/undo")
    chat._take("a")
    first = list(chat.messages)
    chat._take("b")
    assert "2 messages are left" in typed(chat, capsys, "/undo")
    assert chat.messages == first


def test_show_and_tokens_tell_what_is_there(chat, capsys):
    chat._take("/system be brief")
    chat._take("ab")
    said = typed(chat, capsys, "/show")
    assert "system prompt: be brief" in said
    assert "[user] ab" in said
    assert "temperature = 0" in said
    used = len(chat.prompt_ids(chat.messages))
    assert f"the conversation has {used} tokens; {64 - used} of the context of 64 are left" in typed(chat, capsys, "/tokens")
    assert "2 tokens: " in typed(chat, capsys, "/tokens ab")


def test_a_conversation_is_saved_and_goes_on(make, capsys, tmp_path):
    chat, path = make(), tmp_path / "talk.json"
    chat._take("/system x")
    chat._take("a")
    assert "2 messages are in" in typed(chat, capsys, f"/save {path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    chat._take(f"/save {path}")  # a conversation may be written over
    other = make()
    other._take(f"/load {path}")
    assert (other.messages, other.system) == (chat.messages, "x")
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]
    assert set(json.loads(path.read_text())) == {"fastllm-chat", "model", "system", "messages"}
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match="is no conversation"):
        chat._take(f"/save {tmp_path / 'notes.txt'}")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(FastLLMError, match="cannot be written"):
        chat._take(f"/save {tmp_path / 'no' / 'such'}")


@pytest.mark.parametrize("text", ["", "[]", '{"fastllm-chat": 1}', '{"fastllm-chat": 1, "messages": [{"role": "boss", "content": "x"}]}', '{"fastllm-chat": 1, "messages": [{"role": "user", "content": 1}]}', '{"fastllm-chat": 1, "messages": [], "system": 3}', '{"fastllm-chat": 1, "messages": [{"role": "user", "content": "\\ud800"}]}'])
def test_what_is_no_conversation_is_not_loaded(chat, tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    chat._take("a")
    before = list(chat.messages)
    with pytest.raises(InvalidRequest, match="no conversation that /save wrote"):
        chat._take(f"/load {tmp_path / 'x.json'}")
    assert chat.messages == before


def test_a_file_goes_before_the_next_message_once(chat, capsys, tmp_path):
    (tmp_path / "n.txt").write_text("text")
    assert "n.txt (4 tokens) goes before your next message" in typed(chat, capsys, f"/file {tmp_path / 'n.txt'}")
    chat._take("b")
    assert chat.messages[0]["content"] == "n.txt:\ntext\n\nb"
    chat._take(f"/file {tmp_path / 'n.txt'}")
    chat._take("/clear")
    chat._take("c")
    assert chat.messages[0]["content"] == "c"
    (tmp_path / "bad").write_bytes(b"\xff")
    for line, what in (("/file", "takes the name"), (f"/file {tmp_path / 'absent'}", "no file"), (f"/file {tmp_path / 'bad'}", "UTF-8"), (f"/file {tmp_path}", "no file")):
        with pytest.raises(InvalidRequest, match=what):
            chat._take(line)


@pytest.mark.parametrize("command", ["/save", "/load", "/file", "/model"])
def test_a_name_that_cannot_be_opened_leaves_the_chat_as_it_was(make, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTLLM_OFFLINE", "1")
    (tmp_path / "README.md").write_text("mine")
    chat = make(load=lambda name: LLM(name, backend="ref"))
    chat._take("a")
    before = list(chat.messages)
    for name in ("~no-such-user/x", "N" * 300, "README.md/x", "x\0y", "/", "."):
        with pytest.raises(FastLLMError):
            chat._take(f"{command} {name}")
    assert chat.messages == before
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize("command", ["/save", "/load", "/file", "/model"])
def test_a_folder_that_may_not_be_read_leaves_the_chat_as_it_was(make, monkeypatch, command):
    def refused(*given):
        raise PermissionError(13, "Permission denied")

    chat = make(load=refused)
    for name in ("exists", "is_file"):  # for root no folder is closed
        monkeypatch.setattr(f"fastllm.cli.chat_commands.Path.{name}", refused)
    with pytest.raises(FastLLMError, match="Permission denied"):
        chat._take(f"{command} /x/y")


def test_another_model_goes_on_with_the_conversation(make, tiny_model, tmp_path, capsys):
    other = shutil.copytree(tiny_model, tmp_path / "other")
    chat = make(load=lambda name: LLM(name, backend="ref"))
    assert str(tiny_model) in typed(chat, capsys, "/model")
    chat._take("a")
    before, first = list(chat.messages), chat.llm
    assert "the conversation goes on" in typed(chat, capsys, f"/model {other}")
    assert chat.messages == before
    assert chat.llm.loaded.name == str(other)
    with pytest.raises(FastLLMError):
        first.stream("x").result()  # its memory is back
    with pytest.raises(FastLLMError):
        chat._take("/model /no/such")
    chat._take("b")
    assert len(chat.messages) == 4

    def full(name):
        raise OutOfMemory("no room", requested=1, free=0, kind="plan")

    chat.load = full
    with pytest.raises(OutOfMemory, match="no room") as raised:
        chat._take("/model x")
    assert "fastllm run x" in raised.value.fix
    with pytest.raises(InvalidRequest, match="one model only"):
        make()._take("/model x")


# a full context ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(make, monkeypatch):
    """asked(answer, **options) -> a chat on something like a terminal that answers each question so, with two turns of 20 and the questions."""

    def call(answer, turns=("aaaa", "bbbb"), **options):
        chat = make(**options)
        for text in turns:
            chat._take(text)
        chat.questions = []
        chat._session = object()
        monkeypatch.setattr(chat, "_read_line", lambda prompt: chat.questions.append(prompt) or answer)
        return chat

    return call


LONG = "c" * 30


def test_a_full_context_is_said_before_and_nothing_is_dropped_unasked(asked, capsys):
    chat = asked("")
    before = list(chat.messages)
    said = typed(chat, capsys, LONG)
    assert "the context is full: this conversation takes" in said
    assert "nothing is sent" in said
    assert chat.messages == before
    assert chat.questions == ["d: drop the oldest turns, s: summarise them, Enter: stop > "]


def test_the_oldest_turns_are_dropped_on_demand(asked, capsys):
    chat = asked("d", turns=("a", "b"), max_tokens=2)
    last = "c" * 12
    said = typed(chat, capsys, last)
    assert "messages are dropped" in said
    assert {"role": "user", "content": last} in chat.messages
    assert {"role": "user", "content": "a"} not in chat.messages
    assert chat.messages[0]["role"] == "user"


def test_turns_are_summarised_on_demand(asked, capsys, monkeypatch, tiny_model, tmp_path):
    from fastllm.cli import chat_context

    folder = shutil.copytree(tiny_model, tmp_path / "longer")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    monkeypatch.setattr(chat_context, "RECALL", "r")
    chat = asked("s", turns=("a" * 60,), model=folder)
    chat.params = SamplingParams(temperature=0)
    calls, stream = [], chat.llm.stream

    def summary_first(ids, params):
        calls.append(params.max_tokens)
        written = SimpleNamespace(text=" they spoke of a\n")
        return SimpleNamespace(result=lambda: written) if len(calls) == 1 else stream(ids, params)

    monkeypatch.setattr(chat.llm, "stream", summary_first)
    said = typed(chat, capsys, "d" * 130)
    assert "summary: they spoke of a" in said
    assert calls == [32, None]  # the summary, then the answer
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "user", "assistant"]
    assert chat.messages[0]["content"] == "r"
    assert chat.messages[1]["content"] == "they spoke of a"
    assert chat.messages[2]["content"] == "d" * 130


def test_a_message_that_alone_is_too_long_is_refused(asked):
    chat = asked("d", turns=())
    with pytest.raises(ContextOverflow, match=r"the message has \d+ tokens"):
        chat._take("x" * 80)
    assert chat.questions == []


def test_from_a_pipe_nobody_is_asked(make, capsys):
    chat = make()
    chat._take("aaaa")
    with pytest.raises(ContextOverflow):
        chat._take("x" * 60)
    assert len(chat.messages) == 2
