"""What chat and completions answer, as /openapi.json publishes it, and what all answers share. As of `answer_schemas`, which has the others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Answer", "AnthropicError", "ChatCompletion", "ChatCompletionChunk", "Completion", "CompletionChunk", "CompletionDetails", "Error", "TokenLogprob", "TopLogprob"]


class Answer(BaseModel):
    """What every answer has: no other keys."""

    model_config = ConfigDict(extra="forbid", strict=True)


# errors -------------------------------------------------------------------------------------------------------------------


class ErrorDetail(Answer):
    """What went wrong. param: the field; n_prompt_tokens, n_ctx: of a prompt that does not fit."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class Error(Answer):
    """An error."""

    error: ErrorDetail


class AnthropicErrorDetail(Answer):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(Answer):
    """An error of Messages, and of models under the header `anthropic-version`."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


# chat and completions -----------------------------------------------------------------------------------------------------


class PromptDetails(Answer):
    """Of the prompt's tokens those that were in the cache."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Of the answer's tokens those of reasoning."""

    reasoning_tokens: int


class Usage(Answer):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(Answer):
    """Tokens and times, named as llama.cpp does."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class Progress(Answer):
    """How much of a prompt has been read. index: of the prompt, where there are several."""

    index: int = 0
    total: int
    cache: int
    processed: int
    time_ms: float


class TopLogprob(Answer):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that came."""

    top_logprobs: list[TopLogprob]


class Logprobs(Answer):
    """Log-probabilities of a message's tokens."""

    content: list[TokenLogprob]


class LegacyLogprobs(Answer):
    """Log-probabilities of a text's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(Answer):
    """A function, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] = []


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason


class Head(Answer):
    """What every object and chunk of chat and completions begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    """An answer of a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class FunctionDelta(Answer):
    """A piece of a call; its name comes first."""

    name: str = ""
    arguments: str


class ToolCallDelta(Answer):
    """A piece of a call; id, type and name come with the first."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(Answer):
    """A piece of a message; empty in the last chunk of a choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str = ""
    tool_calls: Annotated[list[ToolCallDelta], Field(min_length=1)] = []


class ChunkChoice(Answer):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Head):
    """An event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChunkChoice], Field(max_length=1)]
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_progress: Progress | None = None


class CompletionChoice(Answer):
    """One text."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Head):
    """An answer of completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    timings: Timings


class CompletionChunkChoice(Answer):
    """A piece of one text."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Head):
    """An event of a completion's stream."""

    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChunkChoice], Field(max_length=1)]
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_progress: Progress | None = None
