"""Loading: from a model's name to an engine that answers.

    resolve (formats) → open_model → build (models) → select and open backends (plugins) → plan → load → Engine

`LLM`, the command line and the server all come through `load_model`; `plan_model` stops before anything is loaded. Memory is
planned first: a context that does not fit is refused with the sum, never reduced unasked.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .core.backend import plain_bytes
from .core.cgroup import address_space, available_memory
from .core.errors import (
    BackendBroken,
    BackendDisabled,
    BackendNotFound,
    BackendUnavailable,
    InvalidRequest,
    ModelFileError,
    OutOfMemory,
    TokenizerError,
    UnsupportedError,
    UsageError,
)
from .core.graph import KVSpec, SlotSpec, with_kv_dtype
from .core.placement import Placement
from .core.planner import Plan, StepLimits, make_plan
from .load_options import LoadOptions, say_choice, say_note
from .opening import open_checked, open_helper
from .packed import Unpacker, repacked_note

if TYPE_CHECKING:
    from .core.backend import Backend
    from .core.engine import Engine
    from .core.graph import Graph
    from .core.model import ModelDef
    from .core.plugins import BackendRegistry, Selection
    from .core.sampling import SamplingParams
    from .formats import ModelFiles
    from .text import ChatTemplate, Tokenizer

__all__ = ["DEFAULT_MODEL", "LoadOptions", "LoadedModel", "ModelPlan", "close_all", "load_model", "open_files", "open_text", "plan_model", "resolved", "say_note"]

DEFAULT_MODEL = "smollm2"
MEMORY_SHARE = 0.8  # of what is available may be planned
RESERVE_BYTES = 64 << 20  # left for what Python, threads and requests take after planning (SmolLM2 with eight full streams: under 30 MB)
RESERVE_ENTRY_BYTES = 768  # and for each entry of the vocabulary, for tables (of SmolLM2's tokenizer 430; of grammars, with the first one, 650)
HELPER_BYTES = 64 << 20  # for each process that a server has beside it (one that reads requests of SmolLM2: 60 MB)
HELPER_ENTRY_BYTES = 256  # and for each entry of the vocabulary (one that reads grammars: 78 MB for SmolLM2, 123 for Gemma 3)
ADDRESS_BYTES = 128 << 20  # of address space under a limit, for the tokenizer, stacks and heaps of threads
SNAPSHOT_BYTES = 256 << 20  # for snapshots of recurrent state; few large ones are kept also where they take more
SNAPSHOTS = (4, 64)  # the fewest and the most that are kept
MIN_CONTEXT = 512  # tokens; less is refused when the default is chosen by memory


@dataclass
class ModelPlan:
    """A model that is planned but not loaded. Close it, or hand it on to `load_model`'s result, which does."""

    name: str
    files: ModelFiles
    definition: ModelDef
    registry: BackendRegistry
    selection: Selection
    backends: dict[str, Backend]
    plan: Plan
    context: int
    options: LoadOptions
    available_bytes: int | None
    unpacker: Unpacker | None = None
    closed: bool = False

    def close(self) -> None:
        """Closes backends and files, the rest also if one fails; may be called twice."""
        if not self.closed:
            self.closed = True
            close_all(*(() if self.unpacker is None else (self.unpacker.close,)), *(backend.close for backend in self.backends.values()), self.files.close)


@dataclass
class LoadedModel:
    """A model that answers: its engine, text side and how it came to be. `close` returns all of its memory."""

    planned: ModelPlan
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingParams
    load_s: float

    @property
    def name(self) -> str:
        """The model's name as the user gave it."""
        return self.planned.name

    @property
    def context(self) -> int:
        """Longest sequence in tokens."""
        return self.planned.context

    @property
    def backend(self) -> str:
        """Name of the backend that runs it."""
        return self.planned.selection.name

    @property
    def threads(self) -> int:
        """Threads that the backend computes with."""
        return self.planned.backends[self.backend].threads

    def close(self) -> None:
        """Stops the engine, then frees memory and files; may be called twice."""
        close_all(self.engine.close, self.planned.close)


def close_all(*calls: Callable[[], None]) -> None:
    """Calls each in order, the later ones also if one raises."""
    with contextlib.ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call)


def open_files(model: str | os.PathLike[str], options: LoadOptions) -> ModelFiles:
    """Finds (fetching it if need be) and opens a model's files. Raises ModelNotFound, DownloadError, ModelFileError."""
    from .formats import open_model
    from .formats.model_files import read_template, read_text_side

    if not isinstance(model, str | os.PathLike):
        raise UsageError(f"the model is {model!r}; it must be a name or a path", fix="name a .gguf file, a folder or a model")
    files = open_model(resolved(model, options))
    try:
        if options.tokenizer_from is not None:
            files.tokenizer, files.chat_template, files.generation_config = read_text_side(resolved(options.tokenizer_from, options))
        if options.chat_template is not None:
            files.chat_template = read_template(Path(options.chat_template))
        if options.lora:
            from .formats.lora import merge_adapters

            merge_adapters(files, [Path(folder) for folder in options.lora])
    except BaseException:
        files.close()
        raise
    return files


def resolved(model: str | os.PathLike[str], options: LoadOptions) -> Path:
    """The path of a model, which is fetched if it is not here. Raises ModelNotFound, DownloadError."""
    from .formats.sources import resolve

    return resolve(
        os.fspath(model),
        offline=options.offline,
        progress=lambda done, total, label: options.progress(f"download {label}", done, total),
        notice=lambda line: say_note(line, options, os.fspath(model)),
        waiting=options.message,
        licence=options.licence,
        cache_dir=options.cache_dir,
    )


def plan_model(model: str | os.PathLike[str], options: LoadOptions) -> ModelPlan:
    """Opens files and backends and plans; loads no weight. The caller closes the result."""
    from . import models
    from .core.plugins import BackendRegistry

    options.check()
    registry = BackendRegistry(options.plugins_file, options.plugin_paths, strict=options.strict, waiting=options.message)
    selection = registry.select(options.backend, options.backend_origin)
    say_choice(registry.messages, registry.remarks, options)
    files = open_files(model, options)
    backends: dict[str, Backend] = {}
    unpacker = Unpacker(files, backends, registry, options)
    try:
        if options.verify:
            from .verify import verify_model

            verify_model(files, options)
        definition = models.build(files.kind, files.architecture, files.config, files.tensors, context_limit=options.ctx, ready=files.ready, embedding=options.embedding)
        definition = with_dtype(definition, files, options)
        if options.kv_dtype is not None:
            definition = replace(definition, graph=with_kv_dtype(definition.graph, options.kv_dtype))
        if options.ctx is not None and options.ctx > definition.max_position:
            raise UsageError(
                f"--ctx {options.ctx:,} is more than the {definition.max_position:,} tokens this model was made for",
                who=str(files.path),
                fix=f"--ctx {definition.max_position}",
                max_position=definition.max_position,
            )
        rewritten: dict[str, Graph] = {}  # by whom

        def rewrite(chosen: Selection) -> None:
            rewritten[chosen.name] = registry.transform_graph(definition.graph, chosen)

        selection, backend = open_checked(registry, selection, lambda chosen: _backend_options(chosen, options), options, rewrite)
        backends[selection.name] = backend
        if backend.warning:
            say_note(backend.warning, options, f"backend '{selection.name}'")
        _open_helpers(registry, selection.name, backends, options)
        definition = replace(definition, graph=rewritten[selection.name])
        fallback = options.fallback or ("error" if options.strict else registry.fallback)
        plan, context, available = _fit(definition, files, backends, selection.name, fallback, options)
        _report(plan, definition, files, options)
        if note := repacked_note(files, plan):
            say_note(note, options, str(files.path))
    except BaseException:
        close_all(unpacker.close, *(backend.close for backend in backends.values()), files.close)
        raise
    return ModelPlan(os.fspath(model), files, definition, registry, selection, backends, plan, context, options, available, unpacker)


def _backend_options(selection: Selection, options: LoadOptions) -> dict[str, str]:
    """The options of the chosen backend, with the number of threads if it takes one, and `act` for the type that it computes in. Raises
    UnsupportedError for a backend that leaves no choice of that, UsageError where two options differ."""
    chosen, wanted = dict(options.backend_options), options.compute_dtype
    act = selection.spec.options.get("act")
    if wanted is not None and (act is None or wanted not in act.choices):
        raise UnsupportedError(
            f"backend '{selection.name}' leaves no choice of what it computes in",
            who=f"--compute-dtype {wanted}",
            fix="leave it out, or --backend cpu_avx",
        )
    if wanted is not None and chosen.setdefault("act", wanted) != wanted:
        raise UsageError(f"--compute-dtype {wanted} and --backend-opt act={chosen['act']} differ", fix="give one of them")
    if options.threads and "threads" in selection.spec.options:
        chosen["threads"] = str(options.threads)
    elif options.threads:
        say_note(f"--threads has no effect: backend '{selection.name}' does not take a number of threads", options, f"backend '{selection.name}'")
    return chosen


def _open_helpers(registry: BackendRegistry, chosen: str, backends: dict[str, Backend], options: LoadOptions) -> None:
    """Opens what may take the ops that the chosen backend cannot run, in the planner's order: `cpu_avx` where it is ready, then `ref`.
    `cpu_avx` itself has every op but what only `ref` defines."""
    if chosen not in ("cpu_avx", "ref"):
        try:
            backends["cpu_avx"] = open_helper(registry, "cpu_avx", f"what '{chosen}' does not run", options)
        except (BackendBroken, BackendUnavailable) as error:
            say_note(f"{error.message}, so what '{chosen}' does not run goes to 'ref', which is slow: {error.why}", options, "cpu_avx")
        except (BackendNotFound, BackendDisabled):
            pass  # as it was asked for
    if chosen != "ref":
        backends["ref"] = registry.open(registry.select("ref"), {})


def with_dtype(definition: ModelDef, files: ModelFiles, options: LoadOptions) -> ModelDef:
    """The model with the conversions that the options ask for. Raises UsageError for rules that cannot be followed."""
    if options.dtype is None and options.dtype_config is None and options.no_quant_layer is None and options.moe_dtype is None:
        return definition
    from .convert import requantised
    from .formats.quant_rules import QuantRules, listed_rules

    listed = listed_rules(options.dtype_config, options.moe_dtype)
    rules = QuantRules(options.dtype, options.group_size, options.no_quant_layer, listed, options.allow_requantize)
    changed, notes = requantised(definition, files.stored, rules)
    for line in notes:
        say_note(line, options, str(files.path))
    return changed


def _fit(
    definition: ModelDef, files: ModelFiles, backends: Mapping[str, Backend], device: str, fallback: str, options: LoadOptions
) -> tuple[Plan, int, int | None]:
    """The plan with as much context and cache as asked, or as fits: (plan, context in tokens, bytes available)."""
    size, sequences = options.block_size, options.max_batch_size
    chunk = max(options.prefill_chunk, sequences)
    limits = StepLimits(chunk, sequences, max(sequences, min(chunk, 64)), size, size, 1, _num_snapshots(definition) if options.prefix_cache else 0)
    placement = Placement.on(device)

    def planned(context: int, num_blocks: int) -> Plan:
        full = replace(limits, context=context, num_blocks=num_blocks)
        return make_plan(definition.graph, definition.weights, files.stored, backends, placement, full, fallback=fallback)

    wanted = options.ctx or definition.max_position
    per_sequence = -(-wanted // size)
    hoped = max(1, -(-options.kv_cache_tokens // size) if options.kv_cache_tokens else per_sequence * sequences)
    trial = planned(wanted, hoped)  # what is asked for, which mostly fits: then it is the plan
    block_bytes = sum(p.block_bytes for (_, name), p in trial.places.items() if isinstance(trial.graph.values[name].spec, KVSpec))
    fixed = sum(sum(sizes) for (_, arena), sizes in trial.arenas.items() if arena != "kv")
    available = available_memory()
    mapped = trial.total_bytes("mapped")
    room = _room(available, address_space(), mapped, reserve_bytes(definition.vocab_size, options.helpers))
    if room is not None:
        fixed -= room.taken
    weights = trial.total_bytes("weights") + mapped - (room.taken if room is not None else 0)
    most = None if room is None or not block_bytes else (room.nbytes - fixed - room.reserve) // block_bytes  # blocks that fit

    context = wanted
    if room is not None and most is not None and -(-wanted // size) > most:
        context = max(0, most) * size
        if options.ctx is not None or context < MIN_CONTEXT:
            raise OutOfMemory(
                f"{definition.architecture} model with a context of {wanted:,} tokens does not fit in memory",
                why=f"weights {_mib(weights)} + activations {_mib(fixed - weights)} + cache "
                f"{_mib(-(-wanted // size) * block_bytes)} + reserve {_mib(room.reserve)} > {room.text}",
                fix=f"--ctx {context}" if context >= MIN_CONTEXT else f"{room.more}, or use a smaller model or quantisation",
                requested=fixed + -(-wanted // size) * block_bytes,
                free=available,
                kind="plan",
                weights_fit=weights + room.reserve < room.nbytes,
            )
        line = f"context {context:,} of the model's {wanted:,} tokens: that is what {room.text} hold"
        say_note(line, options, str(files.path), f"--ctx {context}")
    per_sequence = -(-context // size)
    blocks = -(-options.kv_cache_tokens // size) if options.kv_cache_tokens else per_sequence * sequences
    if options.kv_cache_bytes and block_bytes:
        blocks = options.kv_cache_bytes // block_bytes
    if blocks < per_sequence:
        fix = f"--kv-cache-size {per_sequence * size}tok" + (f", or --ctx {blocks * size}" if blocks else "")
        raise UsageError(f"a cache of {blocks * size:,} tokens does not hold one context of {context:,}", who="--kv-cache-size", fix=fix)
    if room is not None and most is not None and blocks > most:
        if options.kv_cache_tokens or options.kv_cache_bytes:
            raise OutOfMemory(
                f"a cache of {blocks * size:,} tokens does not fit in memory",
                who="--kv-cache-size",
                why=f"weights and activations {_mib(fixed)} + cache {_mib(blocks * block_bytes)} + reserve {_mib(room.reserve)} > {room.text}",
                fix=f"--kv-cache-size {most * size}tok, or less",
                requested=fixed + blocks * block_bytes,
                free=available,
                kind="cache",
                weights_fit=weights + room.reserve < room.nbytes,
            )
        blocks = max(per_sequence, most)
    return (trial if (context, blocks) == (wanted, hoped) else planned(context, blocks)), context, available


@dataclass(frozen=True)
class _Room:
    """Memory that may be planned. reserve: what is left of it for everything else; text: what it is, and more: how to have more of it, for people;
    taken: bytes of the plan that are taken off already, so that they need no room."""

    nbytes: int
    reserve: int
    text: str
    more: str
    taken: int = 0


def reserve_bytes(vocab_size: int, helpers: int = 0) -> int:
    """Memory that is left free for what no plan has: objects and tables, for a vocabulary of so many entries, of this process and of its helpers."""
    return RESERVE_BYTES + RESERVE_ENTRY_BYTES * vocab_size + helpers * (HELPER_BYTES + HELPER_ENTRY_BYTES * vocab_size)


def _room(available: int | None, addresses: int | None, mapped: int, reserve: int) -> _Room | None:
    """The tighter one of the memory that is free and of the address space that a limit leaves; None where neither is known. mapped: bytes of weights
    that are used from the file: they have their addresses since it was opened, and come into memory only when they are read. reserve: of memory."""
    rooms = []
    if available is not None:
        rooms.append(_Room(int(available * MEMORY_SHARE), reserve, f"{MEMORY_SHARE:.0%} of {_mib(available)} available", "free memory, raise the limit of the container"))
    if addresses is not None:
        rooms.append(_Room(addresses, ADDRESS_BYTES, f"{_mib(addresses)} that the limit of this process leaves (ulimit -v or -d)", "raise that limit", mapped))
    return min(rooms, key=lambda room: room.nbytes - room.reserve + room.taken, default=None)


def _num_snapshots(definition: ModelDef) -> int:
    """How many snapshots of a sequence's recurrent state are kept; 0 for a model without."""
    specs = (value.spec for value in definition.graph.of_kind("state"))
    nbytes = sum(plain_bytes(spec.shape, spec.dtype) for spec in specs if isinstance(spec, SlotSpec))
    fewest, most = SNAPSHOTS
    return min(max(SNAPSHOT_BYTES // nbytes, fewest), most) if nbytes else 0


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def _report(plan: Plan, definition: ModelDef, files: ModelFiles, options: LoadOptions) -> None:
    """The lines that must be visible: notes of the files and the family, ops whose rows depend on each other."""
    for line in (*files.notes, *definition.notes):
        say_note(line, options, str(files.path))
    varying = sorted({f"{plan.graph.nodes[d.node].op} of '{d.device}'" for d in plan.decisions if d.varies})
    if varying:
        say_note(f"what shares the batch may change results: {', '.join(varying)} declare{'s' * (len(varying) == 1)} it", options, "the rule of rows")


def _report_left(planned: ModelPlan, options: LoadOptions) -> None:
    """The ops that leave their device, for who loads a model; `fastllm plan` shows them itself."""
    plan = planned.plan
    left, copied = plan.left, f"{plan.copy_bytes_per_token():,} bytes copied per token"
    if not left:
        return
    if options.verbose:
        for op in left:
            options.message(f"{op.op} (× {op.count}) runs on {op.device}: {op.reason}; {op.bytes_per_token:,} bytes per token")
        options.message(copied)
        return
    count = sum(op.count for op in left)
    line = f"{count} of {len(plan.decisions)} ops run elsewhere than on {planned.selection.name}, {copied}"
    if (options.fallback or planned.registry.fallback) != "allow":
        devices = {device: ", ".join(dict.fromkeys(op.op for op in left if op.device == device)) for device in dict.fromkeys(op.device for op in left)}
        line += f": {'; '.join(f'{names} on {device}' for device, names in devices.items())} (`fastllm plan` or --verbose says why)"
    options.message(line)


@contextlib.contextmanager
def _typed_memory_errors() -> Iterator[None]:
    """Memory that the host does not give, wherever a reader or the tokenizer asks for it."""
    try:
        yield
    except MemoryError:
        why = "an allocation failed while the model was opened"
        raise OutOfMemory("the host has no memory left for this model", why=why, fix="free memory, or use a smaller model", kind="host") from None


@_typed_memory_errors()
def load_model(model: str | os.PathLike[str] = DEFAULT_MODEL, options: LoadOptions | None = None) -> LoadedModel:
    """Loads a model. Raises a FastLLMError that names what is wrong; nothing stays allocated then."""
    from .core import _kernels
    from .core.embedding import EmbeddingRunner
    from .core.engine import Engine
    from .core.executor import Executor

    options = options or LoadOptions()
    start = time.perf_counter()
    planned = plan_model(model, options)
    files = planned.files
    try:
        _report_left(planned, options)
        tokenizer, template = open_text(files, planned.context)
        if tokenizer.vocab_size > planned.definition.vocab_size:
            raise TokenizerError(
                f"the tokenizer has {tokenizer.vocab_size:,} entries, the model's embedding {planned.definition.vocab_size:,} rows",
                who=str(files.path),
                fix="tokenizer and weights do not belong together; download the model again",
            )
        files.drop_vocabulary()
        _kernels.trim()  # what a large vocabulary took for a moment is gone before the weights come
        defaults = _generation_defaults(files)
        files.check_unchanged()
        report: Callable[[int, int, str], None] = lambda done, total, name: options.progress("load", done, total)  # noqa: E731
        executor = Executor(planned.plan, planned.definition.weights, files.stored, planned.backends, report)
    except BaseException:
        planned.close()
        raise
    try:
        files.check_unchanged()  # what was read while somebody wrote is not the model
        stateful = any(isinstance(value.spec, SlotSpec) for value in planned.plan.graph.values.values())
        engine = Engine(
            EmbeddingRunner(executor, planned.definition.vocab_size) if options.embedding else executor,
            policy=options.schedule,
            max_queue=options.max_queue,
            prefix_cache=options.prefix_cache,
            max_context=planned.context,
            stateful=stateful,
        )
    except BaseException:
        close_all(executor.close, planned.close)
        raise
    return LoadedModel(planned, engine, tokenizer, template, defaults, time.perf_counter() - start)


def open_text(files: ModelFiles, context: int) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template of a model's files."""
    from .text import ChatTemplate, Tokenizer

    source = files.tokenizer
    if source is None:
        fix = "add tokenizer.json to the folder" if files.kind == "huggingface" else "convert the model again, with its tokenizer"
        raise TokenizerError("the model has no tokenizer", who=str(files.path), fix=fix)
    if source.kind == "gguf":
        tokenizer = Tokenizer.from_gguf(source.gguf)
    elif source.kind == "tokenizer.json":
        special, generation = source.special_tokens, files.generation_config
        tokenizer = Tokenizer.from_tokenizer_json(source.read(), source.config, special_tokens_map=special, generation_config=generation)
    else:
        tokenizer = Tokenizer.from_sentencepiece(source.read(), source.config)
    if files.chat_template is None:
        return tokenizer, None
    pieces = {f"{n}_token": tokenizer.id_to_piece(i) for n in ("bos", "eos", "unk") if (i := getattr(tokenizer, f"{n}_id")) is not None}
    bos, eos = pieces.pop("bos_token", None), pieces.pop("eos_token", None)
    template = ChatTemplate(files.chat_template, bos_token=bos, eos_token=eos, special_tokens=pieces, n_ctx=context)
    tokenizer.protect(template.literals)
    return tokenizer, template


def _generation_defaults(files: ModelFiles) -> SamplingParams:
    """Built-in defaults, then the model's generation_config. Raises ModelFileError for a value out of its range."""
    from .core.sampling import BUILT_IN, SamplingParams

    config = files.generation_config
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: config[name] for name in known if config.get(name) is not None}
    if isinstance(values.get("top_k"), float) and values["top_k"].is_integer():
        values["top_k"] = int(values["top_k"])
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    defaults = SamplingParams(**values).merged_with(BUILT_IN)
    try:
        defaults.validate(1)
    except InvalidRequest as error:
        raise ModelFileError(f"generation_config.json: {error.message}", who=str(files.path), fix="correct or remove that key") from None
    return defaults
