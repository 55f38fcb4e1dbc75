"""The chat on a pseudo-terminal, and from a pipe."""

from __future__ import annotations

import os
import signal
import stat
import sys

import pexpect
import pytest

GREETING = "/help lists commands"
STEP = r"(?: |\x08\x1b\[2C)"  # a blank, or a step to the right in its place
PROMPT = rf"\x1b\[\?2004h[^…>]*>{STEP}"  # switched to raw input and drawn: an old prompt that is drawn again does not count
MORE = rf"\x1b\[\?2004h[^…>]*…{STEP}"


@pytest.fixture
def chat(tiny_model, tmp_path):
    """chat(*args) -> a started chat on a terminal of 100 columns, at its first prompt."""
    open_chats = []

    def start(*args: object, model=tiny_model, **environment: str) -> pexpect.spawn:
        arguments = ["-m", "fastllm", "run", str(model), "--backend", "ref", "-n", "4", "--temperature", "0", *map(str, args)]
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
        child = pexpect.spawn(sys.executable, arguments, env=env, encoding="utf-8", codec_errors="replace", timeout=30, dimensions=(40, 100))
        open_chats.append(child)
        child.expect(GREETING)
        child.expect(f"> {STEP}?" if environment.get("TERM") == "dumb" else PROMPT)
        return child

    yield start
    for child in open_chats:
        child.close(force=True)


def ask(child: pexpect.spawn, line: str, answer: str) -> None:
    """Types a line and waits for what must come, and for the next prompt."""
    child.send(line + "\r")
    child.expect(answer)
    child.expect(PROMPT)


def leaves(child: pexpect.spawn) -> int:
    """The exit code, or minus the signal, of a chat that ends."""
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus if child.exitstatus is not None else -child.signalstatus


STATS = r"prompt \d+ tok.*ctx \d+/64"


def test_it_answers_and_ctrl_d_leaves_with_0(chat):
    child = chat("--ignore-eos")
    ask(child, "hello", STATS)
    child.sendeof()
    assert leaves(child) == 0


def test_the_history_is_kept_for_its_owner_only(chat, tmp_path):
    child = chat()
    ask(child, "remember me", STATS)
    child.send("/exit\r")
    assert leaves(child) == 0
    file = tmp_path / "state" / "fastllm" / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "remember me" in file.read_text()
    again = chat()
    again.send("\x1b[A\x1b[A")  # two lines back
    again.expect("remember me")


def test_no_history_writes_none(chat, tmp_path):
    child = chat("--no-history")
    ask(child, "secret", STATS)
    child.sendeof()
    assert leaves(child) == 0
    assert not (tmp_path / "state").exists()


def test_a_history_that_cannot_be_written_is_no_obstacle(chat, tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    child = chat()
    ask(child, "hello", STATS)
    child.sendeof()
    assert leaves(child) == 0


def test_commands(chat):
    child = chat("--ctx", "64")
    ask(child, "/help", "/regen .*answer the last question again")
    ask(child, "/stats", "no answer yet")
    ask(child, "/regen", "nothing to answer again")
    ask(child, "/system", "no system prompt")
    ask(child, "/system be brief", "it counts from the next message on")
    ask(child, "/system", "be brief")
    ask(child, "/set", "temperature = 0")
    ask(child, "/set top_k 3", "top_k = 3")
    ask(child, "/set temperature 9", "temperature is 9.0; it must be a number from 0 to 5")
    ask(child, "/set temperature warm", "temperature takes a number, not 'warm'")
    ask(child, "/set colour blue", "fix: names: max_tokens, temperature")
    ask(child, "/set seed 'x", "seed takes a whole number")
    ask(child, "/set temperature default", "temperature = default")
    ask(child, "/set", r"temperature = 0\.5")
    ask(child, "/exti", "no command /exti; /help lists them")
    ask(child, "hi", STATS)
    ask(child, "/regen", STATS)
    ask(child, "/stats", STATS)
    ask(child, "/clear", "the conversation is forgotten")
    ask(child, "/regen", "nothing to answer again")
    child.send("/exit\r")
    assert leaves(child) == 0


def test_several_lines_are_one_message(chat):
    child = chat()
    child.send('"""\r')
    child.expect(MORE)
    child.send("/one\r")
    child.expect(MORE)
    child.send('two"""\r')
    child.expect(r"ctx (\d+)/64")
    several = child.match.group(1)
    child.expect(PROMPT)
    ask(child, "/clear", "forgotten")
    child.send("/one\\\r")
    child.expect(MORE)
    child.send("two\r")
    child.expect(r"ctx (\d+)/64")
    assert child.match.group(1) == several  # the same message


def test_pasted_lines_are_one_message(chat):
    child = chat()
    child.send("\x1b[200~/one\rtwo\x1b[201~")
    child.expect("two")
    child.send("\r")
    child.expect(r"ctx (\d+)/64")
    assert int(child.match.group(1)) > 20  # one message, not a command
    child.expect(PROMPT)
    ask(child, "/undo", "0 messages are left")


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(chat, tiny_model):
    child = chat("-n", "1000000", "--ignore-eos", "--backend", "ref", model=slow_model(tiny_model))
    child.send("go\r")
    child.expect(r"[^\x1b]{200}")  # text of an answer: the terminal is no longer that of the prompt
    child.sendintr()
    child.expect(r"\(stopped\)")
    child.expect(PROMPT)
    ask(child, "/set max_tokens 2", "max_tokens = 2")
    ask(child, "again", r"prompt \d+ tok")
    child.sendeof()
    assert leaves(child) == 0


def slow_model(tiny_model):
    """The tiny model with room for more tokens than can be made while a test waits."""
    import json

    folder = tiny_model.parent / "long"
    if not folder.exists():
        folder.mkdir()
        for file in tiny_model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65536}))
    return folder


def test_ctrl_c_twice_at_an_empty_prompt_leaves_with_130(chat):
    child = chat()
    child.send("half a question")
    child.expect("half a question")
    child.sendintr()  # takes the line back, and counts for nothing
    child.expect(PROMPT)
    child.sendintr()
    child.expect("Ctrl-C again, or Ctrl-D, leaves")
    child.expect(PROMPT)
    ask(child, "/stats", "no answer yet")  # anything else, and it counts anew
    child.sendintr()
    child.expect("Ctrl-C again, or Ctrl-D, leaves")
    child.expect(PROMPT)
    child.sendintr()
    assert leaves(child) == 130


def test_a_full_context_is_announced_and_an_overflow_leaves_the_chat_alive(chat):
    child = chat("--ignore-eos", "-n", "10")
    child.send("a" * 30 + "\r")
    child.expect(r"the context is nearly full \(\d+ of 64 tokens\): /clear starts afresh")
    child.expect(PROMPT)
    child.send("0123456789\r")
    child.expect(r"the context is full: this conversation takes \d+ of 64 tokens")
    child.expect("d: drop the oldest turns, s: summarise them, Enter: stop")
    child.send("\r")
    child.expect("nothing is sent")
    child.expect(PROMPT)
    child.send("0123456789\r")
    child.expect("Enter: stop")
    child.send("d\r")
    child.expect("2 messages are dropped")
    child.expect(STATS)
    child.expect(PROMPT)
    child.send("a" * 70 + "\r")
    child.expect("Enter: stop")
    child.send("d\r")
    child.expect(r"the prompt has \d+ tokens; the context of 64")
    child.expect("fix: /clear starts afresh")
    child.expect(PROMPT)
    ask(child, "/clear", "forgotten")
    ask(child, "0", STATS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_ends_a_chat_by_that_signal_without_a_traceback(chat, number):
    child = chat()
    child.kill(number)
    child.expect(pexpect.EOF)
    child.close()
    assert child.signalstatus == number
    assert "Traceback" not in child.before


def test_a_prompt_with_i_opens_the_chat(tiny_model, chat):
    arguments = ["-m", "fastllm", "run", str(tiny_model), "--backend", "ref", "-n", "2", "-i", "--prompt", "first", "--no-history"]
    child = pexpect.spawn(sys.executable, arguments, encoding="utf-8", codec_errors="replace", timeout=30)
    child.expect(r"prompt \d+ tok")
    child.expect(PROMPT)
    child.sendeof()
    assert leaves(child) == 0


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_plain_terminals(chat, environment):
    child = chat(**environment)
    child.send("hello\r")
    child.expect(STATS)
    child.send("/exit\r")
    assert leaves(child) == 0


def test_from_a_pipe_each_line_is_a_message(run, tiny_model):
    options = ("run", tiny_model, "-i", "--backend", "ref", "-n", 2, "--temperature", 0, "--ignore-eos")
    result = run(*options, stdin="ab\n/stats\n/nosuch\ncd\n")
    assert result.code == 0
    assert result.err.count("prompt ") == 3
    assert "no command /nosuch" in result.err
    assert "> " not in result.out
    quiet = run(*options, "--quiet", stdin="ab\n/exit\ncd\n")
    assert (quiet.code, quiet.err) == (0, "")
    assert result.out.startswith(quiet.out)
    assert quiet.out.endswith("\n")


def test_a_line_of_a_pipe_that_is_no_text_is_an_error_and_the_chat_goes_on(tiny_model):
    import subprocess

    command = [sys.executable, "-m", "fastllm", "run", str(tiny_model), "-i", "--backend", "ref", "-n", "2"]
    done = subprocess.run(command, input=b"\xff\n/stats\n", capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert b"not UTF-8" in done.stderr
    assert b"no answer yet" in done.stderr


def test_an_answer_that_fails_leaves_the_conversation_as_it_was(tiny_model, capsys, monkeypatch):
    from fastllm import LLM, SamplingParams
    from fastllm.cli.chat import Chat
    from fastllm.core.errors import EngineError

    with LLM(tiny_model, backend="ref") as llm:
        talk = Chat(llm, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), system=None, raw=False, quiet=True, history=False)
        talk._take("ab")
        before = list(talk.messages)
        assert [m["role"] for m in before] == ["user", "assistant"]
        monkeypatch.setattr(llm.loaded.engine._runner, "run", lambda batch: 1 / 0)
        for text in ("cd", "/regen"):
            with pytest.raises(EngineError):
                talk._take(text)
            assert talk.messages == before
    assert capsys.readouterr().err == ""


def test_a_model_without_a_template_continues_text_and_takes_no_system_prompt(run, tiny_model, tmp_path):
    import json

    folder = tmp_path / "plain"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    options = ("run", folder, "-i", "--backend", "ref", "-n", 2, "--temperature", 0)
    result = run(*options, stdin="ab\n/system x\n")
    assert result.code == 0
    assert "no chat template" in result.err
    assert "no place for instructions" in result.err
    assert run(*options, "--system", "x").code == 2


@pytest.mark.parametrize("columns", [1, 3])
def test_one_column_is_enough(tiny_model, tmp_path, columns):
    common = ["-m", "fastllm", "run", str(tiny_model), "--backend", "ref", "-n", "2", "--temperature", "0"]
    child = pexpect.spawn(
        sys.executable,
        [*common, "--no-history"],
        env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        encoding="utf-8",
        codec_errors="replace",
        timeout=30,
        dimensions=(20, columns),
    )
    child.expect(GREETING)
    child.expect(">")
    child.send("hi\r")
    child.expect(STATS)
    child.send("/exit\r")
    assert leaves(child) == 0
    once = pexpect.spawn(
        sys.executable, [*common, "--prompt", "x"], encoding="utf-8", codec_errors="replace", timeout=30, dimensions=(20, columns)
    )
    once.expect(STATS)
    assert leaves(once) == 0
