"""Chat templates: from messages to the prompt a model was trained on, with the origin of every character.

`ChatTemplate.render` gives the text and the parts of it: what the template wrote (markers in it are special tokens) and what
came from a client (text, whatever it spells). `Tokenizer.encode_parts` takes the parts. The template runs in the sandbox of
`sandbox.py` under a budget of 2 s, 10^6 steps, 16 characters per context token and 256 MiB; whatever goes wrong is one
TemplateError that never shows the source. Called by `LLM`, `fastllm run` and the server's preparation processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateAssertionError, TemplateSyntaxError, UndefinedError

from fastllm.core.errors import InvalidRequest, TemplateError

from .marked import Budget, LimitReached, Marked, concat, from_template
from .sandbox import ChatEnvironment, TemplateRefusal

__all__ = ["ChatTemplate", "RenderedPrompt", "check_messages"]

MAX_SOURCE_CHARS: Final = 512 << 10
MAX_DEPTH: Final = 64
MIN_OUTPUT: Final = 1 << 20

# Roles are words of the protocol: a template may build its markers from them (`'<|' + role + '|>'`). Others stay client text.
_ROLES: Final = frozenset("system developer user assistant tool function ipython model observation environment".split())
_RESERVED: Final = frozenset(
    "messages tools tokenize chat_template add_generation_prompt continue_final_message documents return_dict return_tensors "
    "bos_token eos_token unk_token pad_token raise_exception strftime_now range dict namespace cycler joiner self loop".split()
)


@dataclass(frozen=True)
class RenderedPrompt:
    """A rendered prompt. parts: (text, trusted) in order; trusted text was written by the template, the rest by a client."""

    text: str
    parts: tuple[tuple[str, bool], ...]


class ChatTemplate:
    """A compiled chat template; safe to share between threads.

    literals: the texts written in the template, for `Tokenizer.protect`. variables: names it reads besides its own.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        n_ctx: int = 8192,
        time_s: float = 2.0,
        max_steps: int = 1_000_000,
        memory_bytes: int = 256 << 20,
    ):
        """Compile. special_tokens: further variables such as unk_token; n_ctx: context in tokens, which bounds the output.

        Raises TemplateError for a source that does not parse, is too long, or is no text.
        """
        self._limits = {"seconds": time_s, "steps": max_steps, "memory_bytes": memory_bytes}
        self._chars = max(MIN_OUTPUT, 16 * n_ctx)
        tokens = {"bos_token": bos_token, "eos_token": eos_token, **(special_tokens or {})}
        self._tokens = {name: from_template(text) for name, text in tokens.items() if text is not None}
        self._compile(source)

    def _compile(self, source: str) -> None:
        if not isinstance(source, str):
            raise TemplateError(f"the chat template is {type(source).__name__}, not text.", who="chat template", fix=_FIX)
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source):,} characters; at most {MAX_SOURCE_CHARS:,} are read.", who="chat template", fix=_FIX
            )
        self._environment = ChatEnvironment()
        try:
            with self._budget().running():
                tree = self._environment.parse(source)
                self.variables = frozenset(meta.find_undeclared_variables(tree)) - frozenset(self._environment.globals)
                self.literals = tuple(_literals(tree))
                self._names = frozenset(node.attr for node in tree.find_all(nodes.Getattr)) | frozenset(self.literals)
                self._template = self._environment.from_string(source)
        except Exception as error:
            raise _explain(error) from None

    @property
    def supports_tools(self) -> bool:
        """Whether the template reads `tools`."""
        return "tools" in self.variables

    def with_source(self, source: str) -> ChatTemplate:
        """Another template for the same model, under the same limits. Raises TemplateError."""
        made = ChatTemplate.__new__(ChatTemplate)
        made._limits, made._chars, made._tokens = self._limits, self._chars, self._tokens
        made._compile(source)
        return made

    def reads(self, name: str) -> bool:
        """Whether the template may look at this key of a message: it names it somewhere."""
        return name in self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> RenderedPrompt:
        """Render messages: dicts of role and content (text, None, or a list of text parts, joined by newlines).

        tools: function descriptions, as the template expects them; kwargs: further variables the template reads
        (`enable_thinking=False`). Raises InvalidRequest for messages or variables of the wrong shape, TemplateError where the
        template refuses the messages, fails, or exceeds its budget.
        """
        checked = check_messages(messages)
        for name in kwargs:
            if name in _RESERVED or name not in self.variables:
                known = ", ".join(sorted(self.variables - _RESERVED)) or "none"
                raise InvalidRequest(
                    f"the chat template does not read {name[:80]!r}; it reads: {known}.", who="chat_template_kwargs", fix="leave it out"
                )
        variables = {name: _plain(value, name) for name, value in kwargs.items()}
        if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, (str, bytes))):
            raise InvalidRequest(f"tools is {type(tools).__name__}; it must be a list of objects.", who="tools")
        variables["tools"] = _plain(list(tools), "tools") if tools else None
        # `content: null` is a missing key, as in transformers; templates that add it to a text unasked get an empty one.
        attempts = [[{k: v for k, v in message.items() if v is not None} for message in checked]]
        if any(message.get("content") is None for message in checked):
            attempts.append([{**message, "content": message.get("content", "")} for message in attempts[0]])
        for number, attempt in enumerate(attempts, 1):
            try:
                return self._run({**variables, "messages": attempt, "add_generation_prompt": bool(add_generation_prompt)})
            except (TemplateRefusal, LimitReached) as error:
                raise _explain(error) from None
            except Exception as error:
                if number == len(attempts):
                    raise _explain(error) from None
        raise AssertionError("unreachable")

    def _budget(self) -> Budget:
        return Budget(chars=self._chars, **self._limits)  # type: ignore[arg-type]

    def _run(self, variables: dict[str, Any]) -> RenderedPrompt:
        with self._budget().running() as budget:
            for value in variables.values():
                _register(value, budget)
            pieces: list[str] = []
            total = 0
            for piece in self._template.root_render_func(self._template.new_context({**self._tokens, **variables})):
                total += len(piece)
                budget.fits(total)
                budget.tick()
                pieces.append(piece)
            text = concat(pieces)
            return RenderedPrompt(str.__str__(_bare(text)), _parts(text))


_FIX: Final = "continue text without a template (`fastllm run --raw`, `LLM.generate`), or use a model with another one"


def _bare(text: str) -> str:
    return "".join((text, ""))


def _parts(text: Marked) -> tuple[tuple[str, bool], ...]:
    bare = _bare(text)
    runs = re.finditer(rb"\x00+|\x01+", text._marks)
    return tuple((bare[run.start() : run.end()], text._marks[run.start()] == 1) for run in runs)


def _literals(tree: nodes.Template) -> list[str]:
    found = [node.data for node in tree.find_all(nodes.TemplateData)]
    return found + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]


def _register(value: Any, budget: Budget) -> int:
    """Weigh the caller's data once, so that looking at it again costs nothing."""
    if isinstance(value, str):
        return len(value) + 2
    if not isinstance(value, (list, dict)):
        return 8
    members = [*value, *value.values()] if isinstance(value, dict) else value
    total = 16 * (len(value) + 1) + sum(_register(member, budget) for member in members)
    budget.inputs[id(value)] = total
    return total


def _explain(error: Exception) -> TemplateError:
    """One TemplateError for whatever happened; never the template's source."""
    if isinstance(error, TemplateRefusal):
        return TemplateError(
            f"the chat template refuses the messages: {error}",
            who="messages",
            why="the model's template calls raise_exception for them",
            fix="change the order or the roles of the messages",
        )
    if isinstance(error, LimitReached):
        return TemplateError(f"the chat template was stopped: {error}.", who="chat template", why="its budget is exceeded", fix=_FIX)
    reason = " ".join(str(error).split())[:200]
    if isinstance(error, (TemplateSyntaxError, TemplateAssertionError)):
        return TemplateError(
            f"the chat template does not parse: line {error.lineno}: {' '.join((error.message or '').split())[:120]}",
            who="chat template",
            why="it is not the Jinja that chat templates are written in",
            fix=_FIX,
        )
    if isinstance(error, RecursionError):
        return TemplateError("the chat template nests or recurses too deeply.", who="chat template", why=reason, fix=_FIX)
    if isinstance(error, SecurityError):
        return TemplateError(f"the chat template was stopped: {reason}", who="chat template", why="the sandbox forbids it", fix=_FIX)
    kind = "a value is missing" if isinstance(error, UndefinedError) else type(error).__name__
    return TemplateError(
        f"the chat template fails on these messages ({kind}: {reason}).",
        who="messages",
        why="the template expects other roles, fields or types",
        fix="check the messages, or continue text without a template (`fastllm run --raw`)",
    )


# messages ------------------------------------------------------------------------------------------------------------------


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A plain copy of the messages: role is a text, content a text or None. Raises InvalidRequest naming the message."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequest(f"messages is {type(messages).__name__}; it must be a list of objects.", who="messages")
    if not messages:
        raise InvalidRequest("messages is empty; at least one message is needed.", who="messages")
    checked = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{where} is {type(message).__name__}; it must be an object.", who=where)
        plain = _plain(dict(message), where)
        role = plain.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"{where}.role is {role!r:.80}; it must be a text such as user.", who=f"{where}.role")
        plain["role"] = from_template(role) if role in _ROLES else role
        plain["content"] = _content(plain.get("content"), f"{where}.content")
        checked.append(plain)
    return checked


def _content(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(
            f"{where} is {type(value).__name__}; it must be a text, null, or a list of text parts.", who=where, fix="send a text"
        )
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or (kind not in ("text", "input_text", "output_text") and not isinstance(part, str)):
            found = f"of type {kind!r:.60}" if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(
                f"{where}[{index}] is {found}; only text parts are taken.", who=f"{where}[{index}]", fix='send {"type": "text", "text": …}'
            )
        texts.append(text)
    return "\n".join(texts)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """JSON data rebuilt from exact built-in types, so that a template meets nothing with methods of its own."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if depth >= MAX_DEPTH:
        raise InvalidRequest(f"{where} is nested more than {MAX_DEPTH} levels deep.", who=where)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest(f"{where} has a key that is no text.", who=where)
        return {_bare(key): _plain(member, where, depth + 1) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member, where, depth + 1) for member in value]
    raise InvalidRequest(f"{where} holds a {type(value).__name__}; JSON values are taken.", who=where)
