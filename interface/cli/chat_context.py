"""What a chat does when its context fills: says so before it happens, and asks. Nothing of a conversation is dropped unasked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ..core.errors import ContextOverflow
from .terminal import say

if TYPE_CHECKING:
    from .chat import Chat

__all__ = ["make_room"]

LEAST_ROOM: Final = 256  # tokens that an answer should have, at most an eighth of the context
SUMMARY: Final = "Summarise the conversation so far in a few sentences, with every fact that may be needed later."
RECALL: Final = "What did we talk about so far?"

Messages = list[dict[str, str]]


def make_room(chat: Chat, messages: Messages) -> Messages | None:
    """The messages to answer: as they are while there is room, else what the user chooses; None: nothing is to be answered.

    Raises ContextOverflow where nobody can be asked, or where the last message alone is too long.
    """
    context = chat.llm.loaded.context
    least = min(LEAST_ROOM, context // 8, chat.params.max_tokens or context)
    room = context - len(chat.prompt_ids(messages))
    if room >= max(least, 1) or not chat.interactive:
        return messages  # from a pipe: what does not fit is refused by the engine's own check
    say(f"the context is full: this conversation takes {context - room:,} of {context:,} tokens, so {max(room, 0)} are left for the answer")
    if len(messages) < 2:
        raise ContextOverflow(
            f"the message has {context - room:,} tokens; the context is {context:,}", fix="shorten it, or start with a larger --ctx", n_prompt_tokens=context - room, n_ctx=context
        )
    choices = {"d": "drop the oldest turns", **({} if chat.raw else {"s": "summarise them"}), **({"g": "go on as it is"} if room > 0 else {})}
    answer = chat.ask(", ".join(f"{key}: {text}" for key, text in choices.items()) + ", Enter: stop > ").strip().lower()[:1]
    if answer not in choices:
        say("nothing is sent; /clear starts afresh, /save keeps the conversation")
        return None
    if answer == "g":
        return messages
    return _dropped(chat, messages, max(least, context // 4)) if answer == "d" else _summarised(chat, messages, least)


def _dropped(chat: Chat, messages: Messages, room: int) -> Messages:
    """Without as many of the oldest turns as it takes to leave so many tokens."""
    context, kept = chat.llm.loaded.context, messages
    while len(kept) > 1 and context - len(chat.prompt_ids(kept)) < room:
        at = next((i for i, m in enumerate(kept[1:], 1) if m["role"] == "user"), len(kept) - 1)
        kept = kept[at:]
    if len(kept) < len(messages):
        say(f"{len(messages) - len(kept)} messages are dropped")
    return kept


def _summarised(chat: Chat, messages: Messages, least: int) -> Messages:
    """The last message behind a summary of those before it, which the model writes."""
    context, last = chat.llm.loaded.context, messages[-1]
    size = max(16, context // 8)
    asked = [*messages[:-1], {"role": "user", "content": SUMMARY}]
    while len(asked) > 1 and context - len(chat.prompt_ids(asked)) < size:
        at = next((i for i, m in enumerate(asked[1:], 1) if m["role"] == "user"), len(asked) - 1)
        asked = asked[at:]
    if len(asked) < 2:
        say("what was said is too long to be summarised")
        return _dropped(chat, messages, least)
    if len(asked) <= len(messages) - 1:
        say(f"{len(messages) - len(asked)} messages were too many to be summarised, and are dropped")
    text = chat.llm.stream(chat.prompt_ids(asked), replace(chat.params, max_tokens=size)).result().text.strip()
    say(f"summary: {text}")
    return _dropped(chat, [{"role": "user", "content": RECALL}, {"role": "assistant", "content": text}, last], least)
