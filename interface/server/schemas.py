"""The request bodies that clients may send, field by field: checked by pydantic, and published as they are in /openapi.json.

A field that is here works. `REFUSED` names those that clients know from elsewhere and that would change the answer: they are a 400.
Every other key is ignored, and listed in the header `x-fastllm-ignored` (with --strict: a 400). Used by `prepare`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["BODIES", "MAX_PROMPTS", "REFUSED", "Body", "ChatBody", "CompletionBody"]

MAX_PROMPTS: Final = 128

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Salt = Annotated[str, Field(max_length=128, pattern=r"^[!-~]*$")]


class Body(BaseModel):
    """What every body has: types are strict (`"1"` is no number), other keys are kept to be listed."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = Field(None, description="One more chunk with the usage before the end.")


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
    cache_prompt: bool | None = Field(None, description="False: neither read nor share cached prompts.")
    cache_salt: Salt | None = Field(None, description="Prompts share the cache only under an equal salt.")


class Message(Body):
    """One message of a conversation; what the model's template accepts is accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = Field(None, description="A text, or text parts that are joined by a newline.")


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=65536)
    max_completion_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="As max_tokens; the smaller one wins.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="Go on inside of the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables that the model's template reads.")
    response_format: dict[str, Any] | None = Field(None, description='Only {"type": "text"}.')
    reasoning_effort: str | None = Field(None, description="Only where the model's template reads it.")
    tools: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="Only an empty list.")
    tool_choice: Literal["none", "auto"] | None = None


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


BODIES: Final[dict[str, type[Body]]] = {"chat": ChatBody, "completion": CompletionBody}
"""Kind of a body -> its model."""

_COMMON_REFUSED: Final = {
    "structured_outputs": "",
    "guided_json": "",
    "guided_regex": "",
    "guided_choice": "",
    "guided_grammar": "",
    "json_schema": "",
    "grammar": "",
    "timings_per_token": "the timings are in the last chunk (stream_options.include_usage)",
    "return_progress": "",
    "chat_template": "the template is the model's",
}
REFUSED: Final[dict[str, dict[str, str]]] = {
    "chat": _COMMON_REFUSED
    | {
        "audio": "",
        "web_search_options": "",
        "functions": "",
        "function_call": "",
        "thinking_budget": "",
    },
    "completion": _COMMON_REFUSED | {"suffix": "put the text into the prompt"},
}
"""Kind -> {field that is refused unless it is null: what to do instead}."""
