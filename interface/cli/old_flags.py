"""What people type who come from ftllm: one table of its flags, and of the commands that it has and we have not.

Each flag has our spelling, or a note (accepted, without effect, one line says why; an error with `--strict`), or a refusal that names the
way. `Command.parse_args` rewrites a command line by it, `config_file` the keys of a configuration, and scripts/make_docs.py prints it.
A promise of speed, of placement or of content is refused and never swallowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["OLD_COMMANDS", "OLD_FLAGS", "OldFlag", "old_flag"]

ON_OFF: Final = {"true": "on", "1": "on", "yes": "on", "enable": "on", "false": "off", "0": "off", "no": "off", "disable": "off"}
UNSET: Final = {"auto": "", "-1": ""}
"""What ftllm takes for "not set"."""


@dataclass(frozen=True)
class OldFlag:
    """One row. names: as typed, with `-` for `_`; `--moe-cache-*` stands for all that begin so. kind: what happens. text: our spelling
    (`new`, `same`), why it has no effect (`note`), or the way to go (`no`). takes: values that follow; -1: one, if it is no option.
    form: how its value is written for us, `{}` stands for it; values: single values that are written otherwise, "" leaves the option out. exit_code: of a refusal,
    5 for what is not built."""

    names: tuple[str, ...]
    kind: Literal["same", "new", "note", "no"]
    text: str
    takes: int = 1
    form: str = "{}"
    values: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = 2

    def written(self, value: str) -> str:
        """The value as our option takes it."""
        return self.values.get(value.lower(), self.form.format(value))


def _same(names: str, text: str = "") -> OldFlag:
    return OldFlag(tuple(names.split()), "same", text)


def _new(names: str, text: str, **more: object) -> OldFlag:
    return OldFlag(tuple(names.split()), "new", text, **more)  # type: ignore[arg-type]


def _note(names: str, text: str, takes: int = 1) -> OldFlag:
    return OldFlag(tuple(names.split()), "note", text, takes)


def _no(names: str, text: str, takes: int = 1, exit_code: int = 2) -> OldFlag:
    return OldFlag(tuple(names.split()), "no", text, takes, exit_code=exit_code)


_ONE_DEVICE: Final = "a model runs on one device so far: choose it with --backend NAME[:DEVICE]"
_SPECULATION: Final = "several tokens per step by drafts are not built: leave it out, answers are the same without"
_NO_IMAGES: Final = "text is the only input: use a text model, and leave it out"
_PAGE: Final = "the page has no agents and talks to its own server only: open http://HOST:PORT/ of that server"

OLD_FLAGS: Final = (
    _same("-p --path", "the model, as the argument; `--prompt` has no short form"),
    _same("-t --threads"),
    _same("--dtype", "`int4` is int4g128"),
    _same("--dtype-config"),
    _same("--moe-dtype", "of the routed experts"),
    _same("--device", "cpu, cuda, opencl, or a device of --backend; several devices: exit 5"),
    _same("--cache-dir"),
    _same("--chat-template"),
    _same("--lora", "may be repeated; adapters are merged into the weights of a Hugging Face folder"),
    _same("--top-p --top-k --temperature --repeat-penalty", "of `server`: what requests get that do not say"),
    _same("--model-name", "may be repeated"),
    _same("--api-key", "may be repeated; better `--api-key-file`"),
    _same("--host --port", "the default is 127.0.0.1:8000; other addresses need a key, or `--insecure`"),
    _same("--input-tokens --output-tokens --batch --warmup", "of `bench`; one stream is always measured"),
    _new("--kv-cache-dtype", "--kv-dtype", values={"float16": "f16", "bfloat16": "bf16", "float32": "f32", "fp16": "f16", "auto": ""}),
    _new("--kv-cache-limit", "--kv-cache-size", values=UNSET),
    _new("--tokens", "--kv-cache-size", form="{}tok", values=UNSET),
    _new("--atype", "--compute-dtype", values={"float32": "f32", "fp32": "f32", "auto": ""}),
    _new("--page-size", "--block-size", values=UNSET),
    _new("--max-batch", "--max-batch-size", values=UNSET),
    _new("--chunked-prefill-size", "--prefill-chunk", values=UNSET),
    _new("--prefill-batch-tokens --max-step-tokens", "--prefill-chunk"),
    _new("--max-context-length", "--ctx"),
    _new("--prefix-cache", "--prefix-cache", values=ON_OFF),
    _new("--cache-history", "--prefix-cache", values=ON_OFF),
    _new("--enable-thinking", "--thinking", values=ON_OFF),
    _new("--tool-call-parser", "--tool-parser"),
    _new("--ori", "--tokenizer-from"),
    _new("--repetition-penalty", "--repeat-penalty"),
    _new("--dev-mode", "--dev", takes=0),
    _new("--startup-progress", "--progress", values={"ndjson": "json", "off": "auto"}),
    _new("--hf-token", "--token"),
    _note("--think", "where reasoning starts is read from the prompt that the model's template writes"),
    _note("-l --low", "files are mapped and read tensor by tensor; less memory: a smaller --ctx, --kv-dtype int8, --dtype int4, and weights of an FLM file (`fastllm convert`) are not copied", takes=0),
    _note("--enable-amx --amx", "AMX is used where it is; the variable FASTLLM_ISA limits it"),
    _note("--moe-atype", "experts are computed in what the rest is: --compute-dtype"),
    _note("--cuda-shared-expert --cuda-se", "shared experts are where the rest of the model is"),
    _note("--cache-fast --prefix-cache-snapshot-*", "the prefix cache needs no such setting"),
    _note("--prefill-max-wait-ms --fast-prefill", "prompts are mixed with running answers in every step"),
    _note("--moe-cache-*", "experts are read from memory, without a cache of their own"),
    _note("--auto --auto-* --autotune --autotune-*", "settings are chosen from the machine at every start", takes=-1),
    _note("--force-ddr-limit --triton", "there is nothing here that it could change", takes=-1),
    _note("--ngram-device --indexer-dtype", "there is nothing here that it could change"),
    _note("--hide-input", "requests are never shown without --log-prompts", takes=0),
    _note("--prompt-unit", "prompts of `bench` are random tokens"),
    _note("--tool -x --hf-username", "downloads are built in, and TLS is always verified"),
    _no("--moe-device --moe-device-layers --tp --ep", _ONE_DEVICE, exit_code=5),
    _no("--low-gpu-mem --cuda-embedding --gpu-mem-ratio --cuda-slab", f"there is no CUDA backend yet, and {_ONE_DEVICE}", -1, 5),
    _no("--moe-cpu-cache --moe-cuda-cache", f"experts cannot be moved between devices: {_ONE_DEVICE}", exit_code=5),
    _no("--moe-experts", "another number of experts is another model: change num_experts_per_tok in a copy of its config.json", exit_code=5),
    _no("--rope-scaling", "it is read from the model: change rope_scaling in a copy of its config.json", exit_code=5),
    _no("--custom", "no code of a model is ever run: build its graph in Python (docs/python.md)", exit_code=5),
    _no("--mtp --mtp-* --dspark --dspark-* --speculative-* --draft --draft-*", _SPECULATION, -1, 5),
    _no("--kvmem", "there is no memory outside of the context: use a larger --ctx", -1, 5),
    _no("--mmproj --multimodal --vision-device --image-embedding-cache", _NO_IMAGES, -1, 5),
    _no("--dataset", "only models are fetched: use the hub's own command, `hf download`", -1),
    _no("--api-base --agent-* --web-search-timeout", _PAGE, -1),
)
"""The table, in the order of the document."""

OLD_COMMANDS: Final = {
    "launch": "use `fastllm webui MODEL`, which opens the page",
    "tui": "use `fastllm run MODEL`, which is a chat on a terminal",
    "config": "use `fastllm dump-config MODEL -o FILE`, whose file is a MODEL for every command",
}
"""Commands that we have not -> the way to go."""

_BY_NAME: Final = {name: row for row in OLD_FLAGS for name in row.names}


def old_flag(name: str) -> OldFlag | None:
    """The row of a flag, written with `-`; None for one that is in no row."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((row for pattern, row in _BY_NAME.items() if pattern.endswith("*") and name.startswith(pattern[:-1])), None)
