"""Every kind of body, and who prepares it: in a preparation process.

Chat and completions are in `prepare`. Here are the interfaces that are said in a chat's words (Responses, Messages), and the routes
that only prepare: their answer is made here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from pydantic import ValidationError

from ..core.errors import FastLLMError, InvalidRequest
from ..core.sampling import SamplingParams
from .bodies import check_body, explain
from .logprobs import check_kept
from .prepare import (
    Kitchen,
    Prepared,
    add_prompt,
    chat,
    encode_prompt,
    prepare_chat,
    prepare_completion,
    render_text,
    with_template,
)
from .schemas import (
    ChatBody,
    CountBody,
    DetokenizeBody,
    EmbeddingsBody,
    MessagesBody,
    RerankBody,
    ResponsesBody,
    ResponsesCountBody,
    TokenizeBody,
)
from .translate import messages_words, raw_tools, renamed, renamed_text, responses_words

__all__ = ["prepare"]

MESSAGES_NAMES: Final = {  # a chat's names -> those of Messages
    "response_format.json_schema.schema": "output_config.format.schema",
    "tools[*].function.parameters": "tools[*].input_schema",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
}
RESPONSES_NAMES: Final = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "tools[*].function": "tools[*]",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}


@contextmanager
def _named(names: Mapping[str, str], ready: Prepared) -> Iterator[None]:
    """What is wrong with a body in a chat's words, or done otherwise, is said in the words of its own interface."""
    try:
        yield
    except ValidationError as error:
        raise renamed(explain(error), names) from None
    except FastLLMError as error:
        raise renamed(error, names) from None
    ready.warnings = [renamed_text(line, names) for line in ready.warnings]
    if ready.constraint is not None:
        ready.constraint["param"] = renamed_text(ready.constraint["param"], names)


def _thinking(kitchen: Kitchen, body: CountBody, words: dict[str, Any]) -> None:
    """`thinking` as the template's variable and a budget; without it the model is told not to think, if it can be told."""
    thinking = body.thinking
    if kitchen.template is not None and "enable_thinking" in kitchen.template.variables:
        words["chat_template_kwargs"] = {"enable_thinking": thinking is not None and thinking.type != "disabled"}
    if thinking is not None and thinking.type == "enabled":
        words["thinking_budget"] = thinking.budget_tokens


def prepare_messages(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /v1/messages."""
    ready = Prepared()
    body: MessagesBody = check_body(kitchen, "messages", raw, ready)
    words = messages_words(body)
    _thinking(kitchen, body, words)
    with _named(MESSAGES_NAMES, ready):
        chat(kitchen, ChatBody.model_validate(words), ready)
    return ready


def prepare_count(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /v1/messages/count_tokens."""
    ready = Prepared()
    body: CountBody = check_body(kitchen, "count", raw, ready)
    words = messages_words(body)
    _thinking(kitchen, body, words)
    with _named(MESSAGES_NAMES, ready):
        _, count = chat(kitchen, ChatBody.model_validate(words), ready, count=True)
    return _told(ready, {"input_tokens": count})


def prepare_responses(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /v1/responses."""
    ready = Prepared()
    body: ResponsesBody = check_body(kitchen, "responses", raw, ready)
    words = responses_words(body)
    custom, formats = raw_tools(body)
    with _named(RESPONSES_NAMES, ready):
        chat(kitchen, ChatBody.model_validate(words), ready, formats)
        check_kept(ready, kitchen.n_ctx, "top_logprobs", whole=True, cap="max_output_tokens")  # a stream ends with the whole response
    format = body.text.format if body.text else None
    ready.detail = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "text": {"format": {"type": "text"} if format is None else format.model_dump(exclude_none=True, by_alias=True)},
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "custom": custom,
    }
    return ready


def prepare_responses_count(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /v1/responses/input_tokens."""
    ready = Prepared()
    body: ResponsesCountBody = check_body(kitchen, "responses_count", raw, ready)
    with _named(RESPONSES_NAMES, ready):
        _, count = chat(kitchen, ChatBody.model_validate(responses_words(body)), ready, raw_tools(body)[1], count=True)
    return _told(ready, {"object": "response.input_tokens", "input_tokens": count})


# vectors ------------------------------------------------------------------------------------------------------------------


def _embed_prompts(kitchen: Kitchen, ready: Prepared, prompts: list[Any], field: str) -> None:
    ready.params = SamplingParams(max_tokens=0, n=1, temperature=0.0)
    for number, prompt in enumerate(prompts):
        own = field if len(prompts) == 1 else f"{field}[{number}]"
        add_prompt(kitchen, ready, encode_prompt(kitchen, prompt, own), None, own)


def prepare_embeddings(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /v1/embeddings."""
    ready = Prepared()
    body: EmbeddingsBody = check_body(kitchen, "embeddings", raw, ready)
    single = isinstance(body.input, str) or isinstance(body.input[0], int)
    _embed_prompts(kitchen, ready, [body.input] if single else list(body.input), "input")
    ready.detail = {"base64": body.encoding_format == "base64", "dimensions": body.dimensions}
    return ready


def prepare_rerank(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /v1/rerank: the query's prompt, then one of each document."""
    ready = Prepared()
    body: RerankBody = check_body(kitchen, "rerank", raw, ready)
    if (body.documents is None) == (body.texts is None):
        raise InvalidRequest("one of documents and texts is needed", who="documents", param="documents")
    texts = list(body.texts or [d if isinstance(d, str) else d.text for d in body.documents or []])
    _embed_prompts(kitchen, ready, [body.query], "query")
    _embed_prompts(kitchen, ready, texts, "documents" if body.texts is None else "texts")
    wanted = body.return_documents or body.return_text
    ready.detail = {"tei": body.texts is not None, "top_n": body.top_n, "texts": texts if wanted else None}
    return ready


# routes that only prepare -------------------------------------------------------------------------------------------------


def _told(ready: Prepared, value: dict[str, Any]) -> Prepared:
    """The answer itself, of a route that only prepares."""
    ready.answer = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return ready


def prepare_template(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /apply-template: the exact prompt of a chat."""
    body: ChatBody = check_body(kitchen, "template", raw, ready := Prepared())
    text, _ = chat(with_template(kitchen, body), body, ready, count=True)
    return _told(ready, {"prompt": text})


def prepare_input_tokens(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /v1/chat/completions/input_tokens."""
    body: ChatBody = check_body(kitchen, "input_tokens", raw, ready := Prepared())
    _, count = chat(with_template(kitchen, body), body, ready, count=True)
    return _told(ready, {"object": "response.input_tokens", "input_tokens": count})


def prepare_tokenize(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /tokenize."""
    body: TokenizeBody = check_body(kitchen, "tokenize", raw, ready := Prepared())
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        said = " and ".join(given) or "none of them"
        raise InvalidRequest(f"one of prompt, content and messages is needed; there is {said}", who="prompt", param="prompt")
    tokenizer = kitchen.tokenizer
    if body.messages is not None:
        words = {name: getattr(body, name) for name in ("messages", "add_generation_prompt", "chat_template_kwargs")}
        ids = tokenizer.encode_parts(render_text(kitchen, ChatBody.model_validate(words)).parts)
    else:
        text = body.prompt if body.prompt is not None else body.content or ""
        special = body.add_special if body.add_special is not None else body.add_special_tokens
        add = body.prompt is not None if special is None else special
        ids = tokenizer.encode(text, add_special=add, parse_special=body.parse_special is not False)
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": kitchen.n_ctx}
    if body.with_pieces:
        answer["tokens"] = [{"id": i, "piece": _piece(tokenizer.decode_bytes(i, skip_special=False))} for i in ids]
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.id_to_piece(i) for i in ids]
    return _told(ready, answer)


def _piece(raw: bytes) -> str | list[int]:
    """Text, or its bytes where they are half a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def prepare_detokenize(kitchen: Kitchen, raw: bytes) -> Prepared:
    """POST /detokenize."""
    body: DetokenizeBody = check_body(kitchen, "detokenize", raw, ready := Prepared())
    size = kitchen.tokenizer.vocab_size
    for token in body.tokens:
        if token >= size:
            raise InvalidRequest(f"tokens holds {token}; ids run from 0 to {size - 1}", who="tokens", param="tokens")
    text = kitchen.tokenizer.decode(body.tokens, skip_special=False)
    return _told(ready, {"prompt": text, "content": text})


KINDS: Final[dict[str, Callable[[Kitchen, bytes], Prepared]]] = {
    "chat": prepare_chat,
    "completion": prepare_completion,
    "responses": prepare_responses,
    "responses_count": prepare_responses_count,
    "messages": prepare_messages,
    "count": prepare_count,
    "template": prepare_template,
    "input_tokens": prepare_input_tokens,
    "embeddings": prepare_embeddings,
    "rerank": prepare_rerank,
    "tokenize": prepare_tokenize,
    "detokenize": prepare_detokenize,
}


def prepare(kitchen: Kitchen, kind: str, raw: bytes) -> Prepared:
    """What a body of this kind asks for, or the answer itself (`Prepared.answer`). Raises a FastLLMError that names the field."""
    try:
        return KINDS[kind](kitchen, raw)
    except ValidationError as error:  # of a body in a chat's words
        raise explain(error) from None
