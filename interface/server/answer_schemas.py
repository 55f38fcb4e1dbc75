"""What each route answers, as /openapi.json publishes it; events of streams are in `event_schemas`.

Nothing is made of these models; the tests hold every answer to them. A field with a default may be left out. Used by `openapi`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, RootModel

from .chat_schemas import Answer, ChatCompletion, Completion, CompletionDetails, TokenLogprob

__all__ = ["ANSWERS", "Status"]


# Responses ----------------------------------------------------------------------------------------------------------------


class TextPart(Answer):
    """A text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[TokenLogprob]


class ReasoningPart(Answer):
    """A text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Answer):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[TextPart]


class ReasoningItem(Answer):
    """Reasoning."""

    id: str
    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[ReasoningPart]
    status: ItemStatus


class FunctionCallItem(Answer):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class CustomCallItem(Answer):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    status: ItemStatus


class CachedInput(Answer):
    """Of the input's tokens those that were in the cache."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class ResponseUsage(Answer):
    """Tokens."""

    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ResponseError(Answer):
    """What went wrong."""

    code: str
    message: str


class Incomplete(Answer):
    """Why it is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(Answer):
    """As it was asked for."""

    effort: str | None
    summary: None


class ResponseText(Answer):
    """As it was asked for."""

    format: dict[str, Any]


class ResponseObject(Answer):
    """A response; what was asked for is repeated."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem]
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    text: ResponseText
    reasoning: ResponseReasoning


class InputTokens(Answer):
    """Tokens that a conversation takes."""

    object: Literal["response.input_tokens"]
    input_tokens: int


# Messages -----------------------------------------------------------------------------------------------------------------


class AnsweredText(Answer):
    """A text."""

    type: Literal["text"]
    text: str


class AnsweredThinking(Answer):
    """Reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class AnsweredToolUse(Answer):
    """A call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """Tokens; input_tokens are those that were not in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: Literal[0]


class AnthropicMessageObject(Answer):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(Answer):
    """Tokens that a conversation takes."""

    input_tokens: int


# vectors ------------------------------------------------------------------------------------------------------------------


class VectorUsage(Answer):
    """Tokens."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    """A vector: numbers, or base64 of little-endian f32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    """Vectors in the order of the texts."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: VectorUsage


class RankedDocument(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document's place, as Jina says it."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(Answer):
    """To `documents`."""

    object: Literal["list"]
    model: str
    results: list[Ranked]
    usage: VectorUsage


class RankedText(Answer):
    """A text's place, as TEI says it."""

    index: int
    score: float
    text: str = ""


class RankedTexts(RootModel[list[RankedText]]):
    """To `texts`."""


# the rest -----------------------------------------------------------------------------------------------------------------


class TemplateText(Answer):
    """The prompt."""

    prompt: str


class TokenPiece(Answer):
    """A token. piece: its text, or its bytes where they are half a character."""

    id: int
    piece: str | list[int]


class Tokens(Answer):
    """Tokens of a text."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: Annotated[list[str], Field(default_factory=list)]


class Text(Answer):
    """The text of tokens, under both names."""

    prompt: str
    content: str


class TokenizerInfo(Answer):
    """The vocabulary."""

    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    end_token_ids: list[int]
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None


class ModelMeta(Answer):
    """Of a model. size: bytes."""

    n_ctx: int
    n_params: int
    size: int
    format: Literal["flm", "gguf", "safetensors"]


class Model(Answer):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: ModelMeta


class Models(Answer):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class AnthropicModel(Answer):
    """A model, under the header `anthropic-version`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class AnthropicModels(Answer):
    """A page of models, under the header `anthropic-version`."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Status(Answer):
    """How the server is."""

    status: Literal["ok", "ready", "loading", "draining", "stalled", "failed", "full"]


class DefaultSettings(Answer):
    """What holds where a request says nothing. params: the values that are set."""

    n_ctx: int
    params: dict[str, Any]


class Modalities(Answer):
    """Text only."""

    vision: Literal[False]
    audio: Literal[False]


class DefaultValue(Answer):
    """A default, and where it is from."""

    value: Any
    origin: str


class PlanSummary(Answer):
    """How the model runs. fallback_ops: computed by another backend."""

    backend: str
    threads: int
    weights_bytes: int
    kv_bytes: int
    fallback_ops: int


class OwnProperties(Answer):
    """What llama.cpp has no name for. tool_parser, reasoning: of a model with a template."""

    defaults: dict[str, DefaultValue]
    plan: PlanSummary
    seed: str
    tool_parser: str | None
    reasoning: str | None


class Properties(Answer):
    """In llama.cpp's shape; what is ours is in `fastllm`."""

    total_slots: int
    default_generation_settings: DefaultSettings
    chat_template: str
    model_path: str
    modalities: Modalities
    fastllm: OwnProperties


class RunningRequest(Answer):
    """A request."""

    id: str
    age_s: float
    state: Literal["queued", "running", "paused", "done"]
    prompt_tokens: int
    tokens: int
    stream: bool


class RunningRequests(Answer):
    """Requests that run."""

    object: Literal["list"]
    data: list[RunningRequest]


class CancelledRequest(Answer):
    """It was cancelled."""

    id: str
    cancelled: Literal[True]


ANSWERS: Final[dict[str, tuple[type[BaseModel], ...]]] = {
    "/v1/chat/completions": (ChatCompletion,),
    "/v1/completions": (Completion,),
    "/v1/responses": (ResponseObject,),
    "/v1/responses/input_tokens": (InputTokens,),
    "/v1/messages": (AnthropicMessageObject,),
    "/v1/messages/count_tokens": (CountedTokens,),
    "/v1/embeddings": (Embeddings,),
    "/v1/rerank": (Ranking, RankedTexts),
    "/v1/chat/completions/input_tokens": (InputTokens,),
    "/apply-template": (TemplateText,),
    "/tokenize": (Tokens,),
    "/detokenize": (Text,),
    "/tokenizer_info": (TokenizerInfo,),
    "/v1/models": (Models, AnthropicModels),
    "/v1/models/{model_id}": (Model, AnthropicModel),
    "/live": (Status,),
    "/health": (Status,),
    "/ready": (Status,),
    "/props": (Properties,),
    "/v1/requests": (RunningRequests,),
    "/v1/cancel": (CancelledRequest,),
}
"""Path -> what it answers in JSON, one of these."""
