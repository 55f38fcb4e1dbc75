"""Bodies of requests: from bytes to a checked object of `schemas`, and what is wrong with one in words that name the field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ValidationError

from ..core.errors import InvalidRequest, ModelFileError, ModelNotFound, UnsupportedContent
from ..formats.json_text import parse_json
from .schemas import BODIES, AllowedChoice, Body, Document, Message, NamedChoice

if TYPE_CHECKING:
    from ..text import ChatTemplate
    from .prepare import Kitchen, Prepared

__all__ = ["NEUTRAL", "REFUSED", "WITH_TEMPLATE", "check_body", "check_ignored", "explain", "parse_body"]

PART_KEYS: Final = frozenset(
    "type text id name input tool_use_id is_error content thinking signature data source refusal annotations logprobs".split()
)  # of content parts, in one interface or another: read, or refused

WITH_TEMPLATE: Final = ("chat", "template", "input_tokens")
"""Kinds of bodies that may bring a template (--allow-request-template)."""

_COMMON_REFUSED: Final = {
    "chat_template": "the template is the model's, unless the server runs with --allow-request-template",
}
_CHAT_REFUSED: Final = (
    _COMMON_REFUSED
    | {
        "audio": "",
        "web_search_options": "",
        "functions": "send tools",
        "function_call": "send tool_choice",
    }
)
_CHAT_TEMPLATE: Final = {"chat_template": "the template is the model's; chats may bring one to a server with --allow-request-template"}
_STATELESS: Final = "this server stores nothing: send the whole conversation as input"
_RESPONSES_REFUSED: Final = _CHAT_TEMPLATE | {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": "",
    "prompt": "",
    "max_tool_calls": "",
    "response_format": "send text.format",
}
_MESSAGES_REFUSED: Final = _CHAT_TEMPLATE | {
    "container": "",
    "mcp_servers": "",
    "output_format": "send output_config.format",
    "response_format": "send output_config.format",
}
REFUSED: Final[dict[str, dict[str, str]]] = {
    "chat": _CHAT_REFUSED,
    "template": _CHAT_REFUSED,
    "input_tokens": _CHAT_REFUSED,
    "completion": _COMMON_REFUSED | {"suffix": "put the text into the prompt", "tools": "send a chat, to /v1/chat/completions"},
    "responses": _RESPONSES_REFUSED,
    "responses_count": _RESPONSES_REFUSED,
    "messages": _MESSAGES_REFUSED,
    "count": _MESSAGES_REFUSED,
    "cancel": {},
    "embeddings": {},
    "rerank": {},
    "tokenize": _CHAT_TEMPLATE,
    "detokenize": {},
}
"""Kind -> {field that is refused, unless its value asks for nothing: what to do instead}."""

NEUTRAL: Final[tuple[Any, ...]] = (None, False, [], "")
"""Values that ask for nothing."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises InvalidRequest."""
    try:
        body = parse_json(raw, "the body", "")
    except ModelFileError as error:
        raise InvalidRequest(error.message, fix="send one JSON object in UTF-8") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a JSON {_kind(body)}, not an object", fix='send {"model": …}')
    return body


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def check_body(kitchen: Kitchen, kind: str, raw: bytes, ready: Prepared) -> Any:
    """The validated body of a kind (`schemas.BODIES`); fields without effect go to `ready.ignored`. Raises InvalidRequest."""
    body = parse_body(raw)
    for name, instead in REFUSED[kind].items():
        value = body.get(name)
        if any(type(value) is type(none) and value == none for none in NEUTRAL):  # 0 is not False
            if body.pop(name, None) is not None:
                ready.ignored.append(name)
        elif not (name == "chat_template" and kitchen.request_template and kind in WITH_TEMPLATE):
            raise InvalidRequest(f"{name} is not supported by this server", who=name, fix=instead or f"leave {name} out", param=name)
    modalities = body.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise UnsupportedContent("modalities must be [\"text\"]: this model writes text only", who="modalities", param="modalities")
    try:
        checked: Body = BODIES[kind].model_validate(body)
    except ValidationError as error:
        raise explain(error) from None
    ready.ignored += list(dict.fromkeys(_unknown(checked, kitchen.template)))
    check_ignored(ready.ignored, kitchen.strict)
    model = body.get("model")
    if kitchen.strict_model and model is not None and model not in kitchen.names:
        raise ModelNotFound(f"no model '{str(model)[:80]}' here; there is {', '.join(kitchen.names)}", param="model")
    return checked


def check_ignored(ignored: Sequence[str], strict: bool) -> None:
    """Raises InvalidRequest for a field that nobody reads, if the server is strict."""
    if strict and ignored:
        name = ignored[0]
        raise InvalidRequest(f"--strict: {name} has no effect on this server", who=name, fix=f"leave {name} out", param=name)


def _unknown(body: BaseModel, template: ChatTemplate | None, where: str = "") -> Iterator[str]:
    """Paths of the fields that nobody reads, at any depth (`tools[].function.x`). A key of a message may be the template's."""
    for name, value in (body.model_extra or {}).items():
        if value is not None and not (isinstance(body, Message) and template is not None and template.reads(name)):
            yield where + name
    for name, value in body:
        path = f"{where}{name}"
        if isinstance(value, BaseModel):
            yield from _unknown(value, template, f"{path}.")
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, BaseModel):
                    yield from _unknown(item, template, f"{path}[].")
                elif isinstance(item, dict) and name == "content":
                    yield from (f"{path}[].{key}" for key in item if key not in PART_KEYS and item[key] is not None)


def explain(error: ValidationError) -> InvalidRequest:
    """The first fault of a body, with the path of the field; where a field has several forms, that of the form which the value comes closest to."""
    faults = error.errors(include_url=False, include_context=False, include_input=True)
    first = faults[0]
    at = next((place for place, part in enumerate(first["loc"]) if _is_form(part)), None)
    while at is not None:
        forms: dict[Any, list[Any]] = {}
        for fault in faults:
            if fault["loc"][:at] == first["loc"][:at] and len(fault["loc"]) > at:
                forms.setdefault(fault["loc"][at], []).append(fault)
        value = at + 1
        faults = min(forms.values(), key=partial(_distance, depth=value))
        first = faults[0]
        at = next((place for place in range(value, len(first["loc"])) if _is_form(first["loc"][place])), None)
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _is_form(part):
            path += f".{part}" if path else part
    if first["type"] == "missing":
        return InvalidRequest(f"{path} is missing", who=path, fix=f"send {path}", param=path)
    said = first["msg"][:1].lower() + first["msg"][1:]
    given = first["input"]
    shown = f" is {given!r:.60}" if isinstance(given, (int, float, str)) else f" is {_article(_kind(given))}"
    return InvalidRequest(f"{path}{shown}: {said}", who=path, param=path)


_FORMS: Final = frozenset({"str", "int", "list", *(kind.__name__ for kind in (Document, NamedChoice, AllowedChoice))})


def _is_form(part: int | str) -> bool:
    """Whether a part of a fault's place is pydantic's name for one of several forms, and none of a field."""
    return isinstance(part, str) and (part in _FORMS or any(c in part for c in "[(-"))


def _distance(found: Sequence[Any], depth: int) -> tuple[bool, int, int, int, bool]:
    """How far a value is from a form that has these faults: another type altogether; else their number, how early the first of them comes, and whether
    that is of a type. depth: parts that lead to the value."""
    place, kind = found[0]["loc"][depth:], str(found[0]["type"])
    mismatch = not place and kind.endswith(("_type", "literal_error"))
    return mismatch, len(found), -len(place), -place[0] if place and isinstance(place[0], int) else 0, kind.endswith("_type")


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else kind if kind == "null" else f"a {kind}"
