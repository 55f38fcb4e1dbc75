"""Events of streams, as /openapi.json publishes them: each by its `type`, with all that it has. As of `answer_schemas`, which has whole answers."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, RootModel

from .answer_schemas import (
    AnsweredText,
    AnsweredThinking,
    AnsweredToolUse,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    MessageUsage,
    ReasoningItem,
    ReasoningPart,
    ResponseObject,
    TextPart,
)
from .chat_schemas import Answer, AnthropicError, ChatCompletionChunk, CompletionChunk, Error, TopLogprob

__all__ = ["EVENTS"]


# Responses ----------------------------------------------------------------------------------------------------------------


class Numbered(Answer):
    """What every event of a response has: the events before it."""

    sequence_number: int


class ResponseState(Numbered):
    """A response begins or ends."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"]
    response: ResponseObject


class ItemState(Numbered):
    """An item begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InItem(Numbered):
    """What every event inside of an item has."""

    item_id: str
    output_index: int


class InContent(InItem):
    """What every event inside of a message or of reasoning has."""

    content_index: Literal[0]


class PartState(InContent):
    """The text of an item begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: TextPart | ReasoningPart


class ShownLogprob(Answer):
    """A token of a piece of text."""

    token: str
    logprob: float
    top_logprobs: list[TopLogprob]


class TextDelta(InContent):
    """A piece of text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ShownLogprob]


class TextDone(InContent):
    """A whole text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ShownLogprob]


class ReasoningDelta(InContent):
    """A piece of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(InContent):
    """All of a reasoning."""

    type: Literal["response.reasoning_text.done"]
    text: str


class CallDelta(InItem):
    """A piece of a call's arguments, or what a custom tool gets."""

    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    delta: str


class FunctionCallDone(InItem):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomCallDone(InItem):
    """What a custom tool gets."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


AnyResponseEvent = (
    ResponseState | ItemState | PartState | TextDelta | TextDone | ReasoningDelta | ReasoningDone | CallDelta | FunctionCallDone | CustomCallDone
)


class ResponseEvent(RootModel[Annotated[AnyResponseEvent, Field(discriminator="type")]]):
    """An event of a response's stream."""


# Messages -----------------------------------------------------------------------------------------------------------------


class FirstUsage(Answer):
    """Tokens of the prompt; how many of them were in the cache is known at the end."""

    input_tokens: int
    output_tokens: Literal[0]


class EmptyMessage(Answer):
    """A message before its first token."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[Any], Field(max_length=0)]
    stop_reason: None
    stop_sequence: None
    usage: FirstUsage


class MessageStart(Answer):
    """A message begins."""

    type: Literal["message_start"]
    message: EmptyMessage


class BlockStart(Answer):
    """A block begins, still empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: Annotated[AnsweredText | AnsweredThinking | AnsweredToolUse, Field(discriminator="type")]


class TextPiece(Answer):
    """Of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingPiece(Answer):
    """Of reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class InputPiece(Answer):
    """Of the JSON that a tool gets."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Answer):
    """A piece of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextPiece | ThinkingPiece | InputPiece, Field(discriminator="type")]


class BlockStop(Answer):
    """A block is complete."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Answer):
    """Why a message ends."""

    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None


class MessageDelta(Answer):
    """A message is complete."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class Sign(Answer):
    """The stream has ended, or goes on after a silence."""

    type: Literal["message_stop", "ping"]


AnyMessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | Sign | AnthropicError


class MessageEvent(RootModel[Annotated[AnyMessageEvent, Field(discriminator="type")]]):
    """An event of a message's stream."""


EVENTS: Final[dict[str, tuple[type[BaseModel], ...]]] = {
    "/v1/chat/completions": (ChatCompletionChunk, Error),
    "/v1/completions": (CompletionChunk, Error),
    "/v1/responses": (ResponseEvent,),
    "/v1/messages": (MessageEvent,),
}
"""Path -> the JSON of an event of its stream, one of these."""
