"""From the bytes of a body to token ids and sampling parameters: everything that can be known before the first token.

Runs in a preparation process (`preparer`), so a body of any size, a template that does not end or a text that takes long to encode
never holds the event loop, and can be killed. What comes out is a `Prepared`; what is wrong is a FastLLMError that names the field.
A route of another interface (`responses`, `messages`) turns its body into that of a chat and comes through `prepare_chat` as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from ..core.errors import ContextOverflow, InvalidRequest, TemplateError, UnsupportedContent
from ..core.sampling import SamplingParams
from ..text import ChatTemplate, RenderedPrompt, Tokenizer
from ..text.output import REASONING, detect_reasoning, starts_in_reasoning
from .bodies import check_body
from .constraints import wanted_constraint
from .logprobs import check_kept
from .schemas import MAX_PROMPTS, ChatBody, CompletionBody, Sampling
from .tools import OutputSpec, RawTools, ToolUse, calls_constraint, messages_for, output_spec, tool_use

__all__ = ["Kitchen", "Prepared", "add_prompt", "chat", "encode_prompt", "prepare_chat", "prepare_completion", "render_text", "with_template"]

EFFORTS: Final[dict[str, int | None]] = {"none": 0, "minimal": 128, "low": 512, "medium": 2048, "high": 8192, "xhigh": None, "max": None}
"""reasoning_effort -> tokens of reasoning, where the model's template has no such variable."""


@dataclass
class Prepared:
    """What a route needs to start.

    prompts: token ids, i32 [n] each. params: of every prompt. per_token, progress: chunks tell times, and how far the prompt is. echo: texts that precede the answers, one a prompt. ignored: fields
    that have no effect here. warnings: what is done otherwise than asked. constraint: what each answer must look like
    (`constraints.wanted_constraint`, `tools.calls_constraint`). banned: texts that no answer may have in it. thinking: the model's markers of reasoning, whether the prompt ends inside, the
    budget, and whether the constraint begins behind it. output: how its text is read (`tools.OutputSpec` as plain data). detail: what only one
    interface needs. answer: the JSON of a route that only prepares; then there are no prompts.
    """

    prompts: list[np.ndarray] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    include_usage: bool = False
    per_token: bool = False
    progress: bool = False
    echo: list[str] | None = None
    salt: str = ""
    skip_special: bool = True
    include_stop: bool = False
    ignored: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    constraint: dict[str, Any] | None = None
    banned: list[str] = field(default_factory=list)
    thinking: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    answer: bytes | None = None


@dataclass
class Kitchen:
    """What preparation works with: the text side of a model, and the server's limits.

    longest_token: UTF-8 bytes of the longest piece; a text of more than n_ctx times that cannot fit, and is refused unread.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    n_ctx: int
    vocab_size: int
    names: tuple[str, ...] = ("model",)
    max_tokens: int = 8192
    max_n: int = 16
    strict: bool = False
    strict_model: bool = False
    tool_parser: str = "auto"
    reasoning_format: str = "auto"
    request_template: bool = False
    thinking: bool | None = None
    longest_token: int = 0

    def __post_init__(self) -> None:
        pieces = (self.tokenizer.id_to_piece(i) for i in range(self.tokenizer.vocab_size))
        self.longest_token = max(len(p.encode("utf-8", "replace")) for p in pieces)


def sampling_params(kitchen: Kitchen, body: Sampling, ready: Prepared, **more: Any) -> SamplingParams:
    """The request's own parameters, checked against vocabulary and limits; what is unset comes from the model's defaults later."""
    if body.n is not None and body.n > kitchen.max_n:
        raise InvalidRequest(f"n is {body.n}; this server gives at most {kitchen.max_n} answers", who="n", fix="lower n", param="n")
    if body.repetition_penalty is not None and body.repeat_penalty not in (None, body.repetition_penalty):
        raise InvalidRequest("repeat_penalty and repetition_penalty differ", who="repeat_penalty", fix="send one", param="repeat_penalty")
    bias: dict[int, float] | None = None
    if body.logit_bias is not None:
        bias = {}
        for key, value in body.logit_bias.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < kitchen.vocab_size and key == str(int(key))):
                limit = kitchen.vocab_size - 1
                raise InvalidRequest(
                    f"logit_bias has the key {key!r:.60}; keys are token ids from 0 to {limit}", who="logit_bias", param="logit_bias"
                )
            bias[int(key)] = value
    same = "seed temperature top_p top_k min_p presence_penalty frequency_penalty repeat_last_n min_tokens ignore_eos n"
    values: dict[str, Any] = {name: getattr(body, name) for name in same.split()}
    values["repetition_penalty"] = body.repeat_penalty if body.repetition_penalty is None else body.repetition_penalty
    values["stop"] = (body.stop,) if isinstance(body.stop, str) else None if body.stop is None else tuple(body.stop)
    values["stop_token_ids"] = None if body.stop_token_ids is None else tuple(body.stop_token_ids)
    asked = more.pop("max_tokens", body.max_tokens)
    params = SamplingParams(**values, logit_bias=bias, max_tokens=kitchen.max_tokens if asked is None else asked, **more)
    if asked is None and body.min_tokens is not None and body.min_tokens > kitchen.max_tokens:
        params = SamplingParams(**{**asdict(params), "max_tokens": body.min_tokens})
    params.validate(kitchen.vocab_size)
    ready.stream = bool(body.stream)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", who="stream_options", fix="leave it out", param="stream_options")
    if body.return_progress and not body.stream:
        raise InvalidRequest("return_progress needs stream: true", who="return_progress", fix="leave it out", param="return_progress")
    ready.per_token, ready.progress = bool(body.timings_per_token), bool(body.return_progress)
    ready.include_usage = bool(body.stream_options and body.stream_options.include_usage)
    ready.skip_special = body.skip_special_tokens is not False
    ready.include_stop = bool(body.include_stop_str_in_output)
    ready.salt = body.cache_salt or ""
    if body.cache_prompt is False:
        ready.salt = secrets.token_hex(32)  # nobody else has it, so nothing is found and nothing is shared
    return params


def add_prompt(kitchen: Kitchen, ready: Prepared, ids: list[int], asked: int | None, field: str = "prompt") -> None:
    """Takes a prompt's ids. field: where it comes from; asked: the client's own max_tokens; more than fits is cut, with a warning."""
    room = kitchen.n_ctx - len(ids)
    if room < (0 if ready.params.max_tokens == 0 else 1):
        raise overflow(kitchen, len(ids), field)
    if asked is not None and asked > room and not any(warning.startswith("max_tokens ") for warning in ready.warnings):
        ready.warnings.append(f"max_tokens {asked} is cut to {room}: the context has {kitchen.n_ctx} tokens, the prompt {len(ids)}")
        if kitchen.strict:
            raise InvalidRequest(f"--strict: {ready.warnings[-1]}", who="max_tokens", fix=f"max_tokens {room}", param="max_tokens")
    ready.prompts.append(np.array(ids, np.int32))


def overflow(kitchen: Kitchen, count: int, field: str, *, at_least: bool = False) -> ContextOverflow:
    """The prompt has (at least) so many tokens, and the context does not hold them."""
    least = "at least " if at_least else ""
    room = "" if count > kitchen.n_ctx else " and leaves no room for a new one"
    return ContextOverflow(
        f"the prompt has {least}{count} tokens{room}: the limit is {kitchen.n_ctx}",
        fix="shorten the prompt, or start with a larger --ctx",
        n_prompt_tokens=count,
        n_ctx=kitchen.n_ctx,
        param=field,
    )


def check_size(kitchen: Kitchen, text: str, field: str = "messages") -> None:
    """Refuses a text that cannot fit before it is encoded. Raises ContextOverflow."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    least = -(-size // kitchen.longest_token)
    if least > kitchen.n_ctx:
        raise overflow(kitchen, least, field, at_least=True)


# chat ---------------------------------------------------------------------------------------------------------------------


def prepare_chat(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /v1/chat/completions."""
    ready = Prepared()
    body: ChatBody = check_body(kitchen, "chat", raw, ready)
    chat(with_template(kitchen, body), body, ready)
    check_kept(ready, kitchen.n_ctx, "top_logprobs" if body.top_logprobs else "logprobs", whole=not ready.stream)
    return ready


def with_template(kitchen: Kitchen, body: ChatBody) -> Kitchen:
    """The kitchen, with the template that the body brings (--allow-request-template). Raises TemplateError."""
    if body.chat_template is None:
        return kitchen
    made = copy(kitchen)
    made.template = _template(kitchen).with_source(body.chat_template)
    return made


def chat(kitchen: Kitchen, body: ChatBody, ready: Prepared, raw: RawTools | None = None, *, count: bool = False) -> tuple[str, int]:
    """Fills `ready` from a chat, which may be one of another interface in this one's words; gives its prompt, and how many tokens that is.

    raw: tools whose input is a text with a grammar. count: no answer follows, so the prompt may fill the context."""
    asked = min((m for m in (body.max_tokens, body.max_completion_tokens) if m is not None), default=None)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", who="top_logprobs", fix="send both", param="top_logprobs")
    ready.params = sampling_params(kitchen, body, ready, max_tokens=asked, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    template = _template(kitchen)
    use = tool_use(body, template, kitchen.tool_parser, raw)
    rendered = render_text(kitchen, body, use)
    _shape_answer(kitchen, body, use, rendered.text, ready)
    ids = kitchen.tokenizer.encode_parts(rendered.parts)
    if not ids:
        raise InvalidRequest("the model's template makes an empty prompt of these messages", who="messages", fix="send a text", param="messages")
    if not count:
        add_prompt(kitchen, ready, ids, asked, "messages")
    return rendered.text, len(ids)


def _shape_answer(kitchen: Kitchen, body: ChatBody, use: ToolUse, prompt: str, ready: Prepared) -> None:
    """What the answer must look like, and how it is read."""
    template = _template(kitchen)
    spec = output_spec(use, template, prompt, body.reasoning_format or kitchen.reasoning_format)
    ready.constraint = wanted = wanted_constraint(body)
    if use.tools:
        format = wanted if wanted is not None and str(wanted["param"]).startswith("response_format") else None
        if wanted is not None and format is None:
            param = str(wanted["param"])
            if use.choice == "required":
                raise InvalidRequest(f"{param} and tool_choice both say what the answer looks like", who=param, fix="send one", param=param)
            ready.warnings.append(f"the tools cannot be called: {param} says what the answer looks like")
            if spec is not None:
                spec.calls = None
        else:  # a call, or the JSON; a call that must happen leaves no place for JSON
            ready.constraint, why = calls_constraint(use, template, kitchen.tokenizer, None if use.choice == "required" else format)
            if ready.constraint is None:
                ready.warnings.append(f"tool calls are not held to their schemas: {why}")
            elif spec is not None:
                spec.held, spec.calls = True, use.format
    ready.banned = list(use.banned)
    if spec is not None and (spec.calls or spec.reasoning):
        spec.form = ready.constraint is not None and ready.constraint["kind"] != "calls"
        ready.output = spec.as_dict()
    _shape_reasoning(kitchen, body, spec, prompt, ready)


def _shape_reasoning(kitchen: Kitchen, body: ChatBody, spec: OutputSpec | None, prompt: str, ready: Prepared) -> None:
    """Where reasoning ends, which is where a form begins; and how long it may be."""
    name = detect_reasoning("\0".join(_template(kitchen).literals))
    budget = body.thinking_budget
    if budget is None and body.reasoning_effort is not None and "reasoning_effort" not in _template(kitchen).variables:
        budget = EFFORTS[body.reasoning_effort]
    if name is None:
        if body.thinking_budget is not None:
            ready.warnings.append("thinking_budget has no effect: this model does not reason")
        return
    form = REASONING[name]
    inside = starts_in_reasoning(prompt, form)
    closed = prompt.rstrip().endswith(form.closing)
    opening = None if inside or closed else kitchen.tokenizer.piece_to_id(form.opening)
    held = ready.constraint is not None and ready.constraint["kind"] != "calls"
    ready.thinking = {"opening": form.opening, "closing": form.closing, "inside": inside, "budget": budget}
    ready.thinking["after"] = held and (inside or opening is not None)
    ready.thinking["opening_id"] = opening


def _template(kitchen: Kitchen) -> ChatTemplate:
    if kitchen.template is None:
        raise TemplateError("this model has no chat template: it continues text and cannot chat", fix="use /v1/completions", param="messages")
    return kitchen.template


def render_text(kitchen: Kitchen, body: ChatBody, use: ToolUse | None = None, raw: RawTools | None = None) -> RenderedPrompt:
    """The conversation as the model's template writes it. raw: as of `chat`. Raises TemplateError, InvalidRequest, ContextOverflow."""
    template = _template(kitchen)
    use = use or tool_use(body, template, kitchen.tool_parser, raw)
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", who="continue_final_message", param="continue_final_message"
        )
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if name not in template.variables or name in ("messages", "tools", "add_generation_prompt", "chat_template"):
            raise InvalidRequest(
                f"chat_template_kwargs has {name!r:.80}, which this model's template does not take from there",
                who="chat_template_kwargs",
                fix="leave it out",
                param="chat_template_kwargs",
            )
    if body.reasoning_effort is not None:
        _set_effort(template, body.reasoning_effort, kwargs)
    if kitchen.thinking is not None and "enable_thinking" in template.variables:
        kwargs.setdefault("enable_thinking", kitchen.thinking)
    if body.thinking_budget is not None and "thinking_budget" in template.variables:
        kwargs.setdefault("thinking_budget", body.thinking_budget)
    messages = [_message(kitchen, m.model_dump(), i) for i, m in enumerate(body.messages)]
    check_size(kitchen, "".join(m["content"] for m in messages if isinstance(m["content"], str)))
    generate = body.add_generation_prompt is not False and not continues
    tools = use.tools if use.native else None
    rendered = template.render(messages_for(messages, use, template), tools=tools, add_generation_prompt=generate, **kwargs)
    if continues:
        rendered = _cut_after(rendered, messages[-1])
    check_size(kitchen, rendered.text)
    return rendered


def _set_effort(template: ChatTemplate, effort: str, kwargs: dict[str, Any]) -> None:
    """A variable of the template, or a budget of tokens (`_shape_reasoning`). Raises InvalidRequest for a model that does not reason."""
    if "reasoning_effort" in template.variables:
        kwargs.setdefault("reasoning_effort", effort)
        return
    param = "reasoning_effort"
    reasons = detect_reasoning("\0".join(template.literals)) is not None
    if not reasons and effort == "none":
        return
    if not reasons:
        raise InvalidRequest(f"{param} has no effect on this model", who=param, fix="leave it out", param=param)
    if effort not in EFFORTS:
        raise InvalidRequest(f"{param} is {effort!r:.60}", who=param, fix=f"one of {', '.join(EFFORTS)}", param=param)
    if effort == "none" and "enable_thinking" in template.variables:
        kwargs.setdefault("enable_thinking", False)


def _message(kitchen: Kitchen, message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it."""
    content, where = message["content"], f"messages[{index}]"
    if isinstance(content, list):
        texts = []
        for number, part in enumerate(content):
            kind, text = part.get("type", "text"), part.get("text")
            if kind not in ("text", "input_text", "output_text"):
                raise UnsupportedContent(
                    f"{where}.content[{number}] is of type {kind!r:.60}; this model takes text only", who=where, param=f"{where}.content"
                )
            if not isinstance(text, str):
                raise InvalidRequest(f"{where}.content[{number}] has no text", who=where, param=f"{where}.content")
            texts.append(text)
        message["content"] = "\n".join(texts)
    reasoning = message.pop("reasoning", None)
    if message.get("reasoning_content") is None:
        message["reasoning_content"] = reasoning
    if message["role"] == "developer" and kitchen.template and not any("developer" in text for text in kitchen.template.literals):
        message["role"] = "system"
    return message


def _cut_after(rendered: RenderedPrompt, last: Mapping[str, Any]) -> RenderedPrompt:
    """The rendered prompt up to the end of the last message's own text, so that the answer goes on there. It is looked for where a client's text is: what the
    template writes behind it may have the same characters in it ("<", "end"). White space at its ends may be the template's to take."""
    if last.get("tool_calls"):
        raise InvalidRequest("the last message calls tools, so no answer can go on in its text", who="messages", fix="leave continue_final_message out", param="messages")
    text = (last.get("content") or "").strip()
    end, parts = -1, list(rendered.parts)
    while text and parts and end < 0:
        piece, trusted = parts.pop()
        end = -1 if trusted else piece.rfind(text)
    if end < 0:
        raise TemplateError(
            "the template does not write the last message's text, so no answer can go on there", fix="end the conversation with a text", param="messages"
        )
    parts.append((piece[: end + len(text)], False))
    return RenderedPrompt("".join(piece for piece, _ in parts), tuple(parts))


# completions --------------------------------------------------------------------------------------------------------------


def prepare_completion(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /v1/completions."""
    ready = Prepared()
    body: CompletionBody = check_body(kitchen, "completion", raw, ready)
    n = body.n or 1
    if body.best_of is not None and body.best_of not in (1, n):
        raise InvalidRequest(f"best_of is {body.best_of}; it must be 1 or n ({n})", who="best_of", fix="leave it out", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0, and echo is not asked", who="max_tokens", fix="ask for at least 1", param="max_tokens")
    ready.constraint = wanted_constraint(body)
    ready.params = sampling_params(
        kitchen, body, ready, logprobs=body.logprobs, prompt_logprobs=bool(body.echo and body.logprobs is not None)
    )
    prompt = body.prompt
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    if len(prompts) * n > MAX_PROMPTS:
        said = f"{len(prompts)} prompts with n {n} are {len(prompts) * n} answers; one request has at most {MAX_PROMPTS}"
        raise InvalidRequest(said, who="n" if n > 1 else "prompt", fix="send fewer prompts, or lower n", param="n" if n > 1 else "prompt")
    echo = []
    for number, one in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
        ids = encode_prompt(kitchen, one, field)
        add_prompt(kitchen, ready, ids, body.max_tokens, field)
        if body.echo:
            echo.append(one if isinstance(one, str) else kitchen.tokenizer.decode(ids, skip_special=False))
    ready.echo = echo or None
    check_kept(ready, kitchen.n_ctx, "logprobs", whole=not ready.stream)
    return ready


def encode_prompt(kitchen: Kitchen, prompt: Any, field: str = "prompt") -> list[int]:
    """Ids of a completion's prompt. A text is the whole prompt, so markers in it are meant; ids are checked."""
    if isinstance(prompt, str):
        check_size(kitchen, prompt, field)
        ids = kitchen.tokenizer.encode(prompt, add_special=True, parse_special=True)
        if not ids:
            raise InvalidRequest(f"{field} is empty: there is no token in it", who=field, param=field)
        return ids
    if len(prompt) > kitchen.n_ctx:
        raise overflow(kitchen, len(prompt), field)
    for token in prompt:
        if token >= kitchen.tokenizer.vocab_size:
            limit = kitchen.tokenizer.vocab_size - 1
            raise InvalidRequest(f"{field} holds the token id {token}; ids run from 0 to {limit}", who=field, param=field)
    return list(prompt)
