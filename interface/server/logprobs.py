"""Log-probabilities as the two OpenAI routes write them. All numbers are finite: −9999 stands for minus infinity."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any, Final

from ..core.errors import InvalidRequest
from ..core.request import TokenLogprobs
from ..text import Tokenizer

if TYPE_CHECKING:
    from .answer import Due
    from .prepare import Prepared

__all__ = ["MAX_KEPT", "LegacyLogprobs", "chat_entry", "check_kept"]

LEAST: Final = -9999.0
MAX_KEPT: Final = 1 << 19
"""Log-probabilities of one answer that leaves as a whole: each takes 390 bytes, and as much again while the answer is written."""


def check_kept(ready: Prepared, n_ctx: int, field: str, *, whole: bool, cap: str = "max_tokens") -> None:
    """Refuses what would take too much memory. whole: all that is generated is kept to the end, and not only what was echoed; cap: the field that limits
    that. Raises InvalidRequest that names the field."""
    params, n = ready.params, ready.params.n or 1
    if params.logprobs is None:
        return
    most = sum(min(params.max_tokens or 0, n_ctx - len(p)) for p in ready.prompts) if whole else 0
    echoed = sum(len(p) for p in ready.prompts) if params.prompt_logprobs else 0
    count = (most + echoed) * n * (1 + params.logprobs)
    if count > MAX_KEPT:
        tokens, top = (most + echoed) * n, f" and {params.logprobs} others" if params.logprobs else ""
        said = f"{field} asks for log-probabilities of up to {tokens:,} tokens{top} at each, which are {count:,}; one answer has at most {MAX_KEPT:,}"
        ways = [*([cap] if most else []), *(["n"] if n > 1 else []), *([field] if params.logprobs else [])]
        fix = " or ".join([*([f"lower {', '.join(ways)}"] if ways else []), *(["send fewer prompts"] if len(ready.prompts) > 1 else [])])
        raise InvalidRequest(said, who=field, fix=fix or f"leave {field} out", param=field)


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Of a token, markers spelled out; nothing for rows of the embedding that have no piece."""
    return tokenizer.decode_bytes(token_id, skip_special=False) if token_id < tokenizer.vocab_size else b""


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = _bytes(tokenizer, token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(raw)}


def chat_entry(tokenizer: Tokenizer, due: Due) -> dict[str, Any]:
    """One element of `logprobs.content`: of the token those bytes that are in the answer."""
    entry, raw = due.logprobs, due.raw[due.part]
    made = {**_token(tokenizer, entry.token_id, entry.logprob), "bytes": list(raw)}
    if entry.token_id not in tokenizer.special_ids:  # one that is skipped has a name, and no bytes
        made["token"] = raw.decode("utf-8", "replace")
    return {**made, "top_logprobs": [_token(tokenizer, i, p) for i, p in entry.top]}


class LegacyLogprobs:
    """The `logprobs` object of completions, entry by entry; `take` gives what came since the last time.

    text_offset: characters before a token, in the text as it is answered. A key of top_logprobs is the token's text, `bytes:\\xNN` for
    half characters; where two are equal the likelier id keeps it, the other is `token_id:N`.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0):
        self._tokenizer, self._offset = tokenizer, offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._fresh()

    def _fresh(self) -> None:
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def _name(self, token_id: int) -> str:
        raw = _bytes(self._tokenizer, token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def add(self, token_id: int, entry: TokenLogprobs | None) -> None:
        """Takes a token; entry: None for the first of a prompt, which nothing precedes."""
        self._tokens.append(self._name(token_id))
        self._offsets.append(self._offset)
        self._offset += len(self._utf8.decode(_bytes(self._tokenizer, token_id)))
        self._values.append(None if entry is None else max(entry.logprob, LEAST))
        if entry is None:
            self._top.append(None)
            return
        top: dict[str, float] = {}
        for other, value in (*entry.top, (entry.token_id, entry.logprob)):
            name = self._name(other)
            if name in top and other != entry.token_id:
                name = f"token_id:{other}"
            top.setdefault(name, max(value, LEAST))
        self._top.append(top)

    def take(self) -> dict[str, Any] | None:
        """What was added since the last call; None: nothing."""
        if not self._tokens:
            return None
        taken = {"tokens": self._tokens, "token_logprobs": self._values, "top_logprobs": self._top, "text_offset": self._offsets}
        self._fresh()
        return taken
