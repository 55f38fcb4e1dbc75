"""GET /v1/models[/{id}]: the models that answer, in the shape of OpenAI or of Anthropic.

Both clients call this path; a request with the header `anthropic-version` is Anthropic's, whose list comes in pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from ..core.errors import InvalidRequest, ModelNotFound

__all__ = ["QUERY", "anthropic_entry", "anthropic_page", "entry", "ignored", "listed", "one"]

MAX_PAGE: Final = 1000
PAGE: Final = 20  # entries, where `limit` is not given
_CURSOR: Final = "an id of the list; "
QUERY: Final[dict[str, dict[str, Any]]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE, "description": "With anthropic-version: entries of a page."},
    "after_id": {"type": "string", "description": f"With anthropic-version: {_CURSOR}the page begins behind it."},
    "before_id": {"type": "string", "description": f"With anthropic-version: {_CURSOR}the page ends before it."},
    "lifecycle[]": {
        "type": "array",
        "maxItems": 3,
        "items": {"enum": ["active", "deprecated", "retired"]},
        "description": "With anthropic-version: models in these stages; all here are active.",
    },
}
"""Parameters of the list, as /openapi.json has them. Others are ignored, and listed in x-fastllm-ignored."""


def listed(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's list: all of them."""
    return {"object": "list", "data": list(entries)}


def entry(name: str, created_s: float, meta: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's entry. created_s: Unix time. meta: what llama.cpp's clients look for."""
    return {"id": name, "object": "model", "created": int(created_s), "owned_by": "fastllm", "meta": dict(meta)}


def one(name: str, names: Sequence[str]) -> str:
    """The name, if it is one of these. Raises ModelNotFound."""
    if name not in names:
        raise ModelNotFound(f"no model '{name[:80]}' here", fix=f"the models are {', '.join(names)}")
    return name


def anthropic_entry(name: str, created_s: float, context: int) -> dict[str, Any]:
    """Anthropic's entry."""
    created = datetime.fromtimestamp(int(created_s), UTC).isoformat().replace("+00:00", "Z")
    limits = {"max_input_tokens": context, "max_tokens": context}
    return {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active", **limits}


def anthropic_page(names: Sequence[str], query: Sequence[tuple[str, str]]) -> tuple[list[str], dict[str, Any]]:
    """The names of the page that a query asks for, and what the list says of it. Raises InvalidRequest, which names the parameter."""
    asked = dict(query)
    for key in ("limit", "after_id", "before_id"):
        if sum(name == key for name, _ in query) > 1:
            raise InvalidRequest(f"{key} is given more than once", who=key, fix="give it once", param=key)
    limit, stages = _limit(asked.get("limit")), [value for name, value in query if name in ("lifecycle[]", "lifecycle")]
    if unknown := [stage for stage in stages if stage not in ("active", "deprecated", "retired")]:
        raise InvalidRequest(f"lifecycle is {unknown[0]!r:.60}", who="lifecycle", fix="active, deprecated or retired", param="lifecycle")
    if stages and "active" not in stages:
        names = ()
    if "after_id" in asked and "before_id" in asked:
        raise InvalidRequest("after_id and before_id exclude each other", who="before_id", fix="give one", param="before_id")
    first, end = 0, len(names)
    if "after_id" in asked:
        first = _index(names, asked["after_id"], "after_id") + 1
    if "before_id" in asked:
        end = _index(names, asked["before_id"], "before_id")
        first = max(end - limit, 0)
        more = first > 0
    else:
        more = end - first > limit
        end = min(end, first + limit)
    page = list(names[first:end])
    return page, {"has_more": more, "first_id": page[0] if page else None, "last_id": page[-1] if page else None}


def ignored(query: Sequence[tuple[str, str]], *, pages: bool) -> list[str]:
    """Names of parameters that nobody reads. pages: Anthropic's shape; OpenAI's list is whole and takes none."""
    return [name for name in dict.fromkeys(name for name, _ in query) if not (pages and (name in QUERY or name == "lifecycle"))]


def _limit(given: str | None) -> int:
    if given is None:
        return PAGE
    if given.isascii() and given.isdecimal() and len(given) < 8 and 1 <= int(given) <= MAX_PAGE:
        return int(given)
    raise InvalidRequest(f"limit is {given!r:.60}; a page has 1 to {MAX_PAGE} entries", who="limit", fix=f"limit={PAGE}", param="limit")


def _index(names: Sequence[str], given: str, param: str) -> int:
    if given not in names:
        raise InvalidRequest(f"{param} is {given!r:.60}, which is no id of this list", who=param, fix="give first_id or last_id of a page", param=param)
    return names.index(given)
