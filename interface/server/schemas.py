"""The request bodies that clients may send, field by field: checked by pydantic, and published as they are in /openapi.json.

A field that is here works. `bodies.REFUSED` names those that clients know from elsewhere and that would change the answer: they are a 400.
Every other key is ignored, and listed in the header `x-fastllm-ignored` (with --strict: a 400). Used by `prepare`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "BODIES",
    "MAX_PROMPTS",
    "MAX_TEXTS",
    "AllowedChoice",
    "AnthropicTool",
    "Body",
    "ChatBody",
    "CompletionBody",
    "CountBody",
    "DetokenizeBody",
    "Document",
    "EmbeddingsBody",
    "Message",
    "MessagesBody",
    "NamedChoice",
    "RerankBody",
    "ResponsesBody",
    "ResponsesCountBody",
    "Sampling",
    "TokenizeBody",
]

MAX_PROMPTS: Final = 128
MAX_TEXTS: Final = 2048  # of one call that embeds

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Salt = Annotated[str, Field(max_length=128, pattern=r"^[!-~]*$")]
RESPONSE_FORMAT: Final[dict[str, Any]] = {
    "required": ["type"],
    "if": {"properties": {"type": {"const": "json_schema"}}},
    "then": {"properties": {"json_schema": {"type": "object", "required": ["schema"], "properties": {"schema": {"type": ["object", "boolean"]}}}}},
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {"description": "Of json_schema."},
        "schema": {"type": ["object", "boolean", "null"], "description": "Of json_object, as llama.cpp takes it."},
    },
}
"""As /openapi.json has it; `constraints` checks it, whose words say more."""


class Body(BaseModel):
    """What every body has: types are strict (`"1"` is no number), other keys are kept to be listed."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = Field(None, description="One more chunk with the usage before the end.")


class StructuredOutputs(Body):
    """`structured_outputs`: one of these; another key would be an answer without a form."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: dict[str, Any] | bool | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="Lark, or GBNF.")


class Sampling(Body):
    """Fields of chat and completions alike."""

    model: str | None = Field(None, description="Answered by the one model there is, unless --strict-model.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="Most new tokens; more than the context holds is cut to it.")
    n: int | None = Field(None, ge=1, le=16, description="Answers per prompt.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(None, description="Texts that end the answer.")
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="Same seed, same answer.")
    temperature: float | None = Field(None, ge=0, le=5)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    repeat_penalty: float | None = Field(None, ge=0.01, le=10, description="Another name of repetition_penalty.")
    repeat_last_n: int | None = Field(None, ge=-1, le=2**31 - 1, description="Tokens that the penalty sees; -1: all.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=4096, description="Decimal token id -> bias; -100 bans."
    )
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="No end before so many tokens.")
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    timings_per_token: bool | None = Field(None, description="Each chunk has the times so far.")
    return_progress: bool | None = Field(None, description="A stream tells how much of the prompt has been read.")
    cache_prompt: bool | None = Field(None, description="False: neither read nor share cached prompts.")
    cache_salt: Salt | None = Field(None, description="Prompts share the cache only under an equal salt.")
    structured_outputs: StructuredOutputs | None = Field(None, description="What the answer must look like.")
    guided_json: dict[str, Any] | bool | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="As structured_outputs.grammar.")
    json_schema: dict[str, Any] | bool | None = Field(None, description="As structured_outputs.json.")
    grammar: str | None = Field(None, description="As structured_outputs.grammar.")
    response_format: Annotated[dict[str, Any], Field(json_schema_extra=RESPONSE_FORMAT)] | None = Field(None, description="What the answer must look like.")


class Message(Body):
    """One message of a conversation; what the model's template accepts is accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = Field(None, description="A text, or text parts that are joined by a newline.")
    name: str | None = None
    tool_calls: Any = Field(None, description="Calls of an earlier answer, as it gave them.")
    tool_call_id: str | None = Field(None, description="The call whose result this is.")
    reasoning_content: str | None = Field(None, description="Reasoning of an earlier answer.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = None


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """Its name."""

    name: str


class NamedChoice(Body):
    """The one function to call."""

    type: Literal["function"]
    function: ChosenFunction


class Allowed(Body):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=128)]


class AllowedChoice(Body):
    """The tools that may be called this time."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=65536)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Most new tokens; more than the context holds is cut to it.")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="As max_tokens; the smaller one wins.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="Go on inside of the last message.")
    chat_template: str | None = Field(None, description="Only with --allow-request-template.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables that the model's template reads.")
    reasoning_effort: str | None = Field(None, description="How long the model may reason: none, minimal, low, medium, high, xhigh or max; a template may know others.")
    thinking_budget: int | None = Field(None, ge=0, le=2**31 - 1, description="Most tokens of reasoning; then its end is forced.")
    reasoning_format: Literal["none", "auto", "deepseek"] | None = Field(None, description="none: reasoning stays in the content.")
    tools: Annotated[list[Tool], Field(max_length=128)] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call.")


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description="A text, texts, token ids, or lists of token ids.")
    echo: bool | None = Field(None, description="Give the prompt back before the answer.")
    best_of: int | None = Field(None, ge=1, le=16, description="1, or equal to n.")
    logprobs: int | None = Field(None, ge=0, le=20)


Prompts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    input: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Prompts
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_TEXTS)]
    ) = Field(description="A text, texts, token ids, or lists of token ids.")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="The first so many, at most the model's width.")


class Document(Body):
    """A document to rank."""

    text: str


class RerankBody(Body):
    """POST /v1/rerank: `documents` (Jina) or `texts` (TEI)."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    texts: Prompts | None = None
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    return_text: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: one of prompt, content and messages."""

    prompt: str | None = Field(None, description="A text; BOS is added where the model wants it.")
    content: str | None = Field(None, description="A text; BOS is not added, unless add_special.")
    messages: list[Message] | None = Field(None, min_length=1, max_length=65536)
    add_special: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Another name of add_special.")
    parse_special: bool | None = Field(None, description="Read markers as tokens; true unless said otherwise.")
    with_pieces: bool | None = Field(None, description="Give each token as id and piece.")
    return_token_strs: bool | None = Field(None, description="Give the pieces as token_strs.")
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[TokenId] = Field(max_length=1 << 20)


class CancelBody(Body):
    """POST /v1/cancel."""

    id: str = Field(min_length=1, max_length=128)


class TextBlock(Body):
    """A block of text."""

    type: Literal["text"]
    text: str


class AnthropicMessage(Body):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class Thinking(Body):
    """`thinking`; a model that does not reason leaves its budget unused."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="Most tokens of reasoning; then its end is forced.")


class AnthropicTool(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")
    type: str | None = Field(None, description="custom; tools that a vendor hosts are refused.")
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(None, description="JSON schema of the input.")
    strict: bool | None = None


class AnthropicChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call.")


class AnthropicFormat(Body):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema", description="What the text must look like.")


class OutputConfig(Body):
    """`output_config`."""

    effort: str | None = Field(None, description="How long the model may reason; only of a model that reasons.")
    format: AnthropicFormat | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=65536)
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=128)] | None = None
    tool_choice: AnthropicChoice | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=5)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)


class TextFormat(Body):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="Of json_schema.")
    strict: bool | None = None


class TextOptions(Body):
    """`text`."""

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """`reasoning`."""

    effort: str | None = Field(None, description="How long the model may reason; only of a model that reasons.")


class ResponsesCountBody(Body):
    """POST /v1/responses/input_tokens: what of a Response makes its prompt."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=65536)]
    model: str | None = None
    instructions: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = Field(None, description="Functions and custom tools.")
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class ResponsesBody(ResponsesCountBody):
    """POST /v1/responses; nothing is stored."""

    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=5)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(None, description="Given back.")


BODIES: Final[dict[str, type[Body]]] = {
    "chat": ChatBody,
    "template": ChatBody,
    "input_tokens": ChatBody,
    "completion": CompletionBody,
    "responses": ResponsesBody,
    "responses_count": ResponsesCountBody,
    "messages": MessagesBody,
    "count": CountBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
    "cancel": CancelBody,
    "embeddings": EmbeddingsBody,
    "rerank": RerankBody,
}
"""Kind of a body -> its model."""
