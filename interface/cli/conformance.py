"""`fastllm conformance`: is a backend right, how is that known, and does the suite itself still see faults?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from ..core.errors import UsageError
from .command import Group
from .files import check_place, made_folder, write_text

__all__ = ["conformance_command"]

MOST_LINES = 20  # of what is wrong with a report


class ConformanceGroup(Group):
    """Options without a command are those of `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`fastllm conformance --backend NAME` runs the suite."""
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group("conformance", cls=ConformanceGroup)
def conformance_command() -> None:
    """Test a backend against the oracle, verify a report, test the suite itself.

    With options and without a command it is `fastllm conformance run`.
    """


_backend = (
    click.option("--backend", required=True, metavar="NAME[:DEVICE]", help="Backend to test; `fastllm backends list` shows them."),
    click.option("--backend-opt", metavar="KEY=VALUE", multiple=True, help="Option of the backend; may be repeated."),
    click.option("--plugins-file", type=click.Path(dir_okay=False, path_type=Path), help="A plugins.toml with defaults for backends."),
    click.option("--plugin", "plugin_paths", type=click.Path(dir_okay=False, path_type=Path), multiple=True, help="A backend in a Python file."),
)
_common = (
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
)


def _with(*groups: Any) -> Any:
    def decorate(command: Any) -> Any:
        for option in reversed([o for group in groups for o in group]):
            command = option(command)
        return command

    return decorate


def _target(backend: str, pairs: tuple[str, ...], plugins_file: Path | None, plugin_paths: tuple[Path, ...]) -> Any:
    from ..conformance.session import Target
    from ..core.plugins import BackendRegistry
    from .options import parse_pairs
    from .terminal import say

    files: tuple[str, ...] = ()
    if plugin_paths:
        registry = BackendRegistry(plugins_file, plugin_paths)
        files = registry.files_of(backend.partition(":")[0])  # the suite's processes run no other file's code
        for line in registry.messages:
            say(f"fastllm: {line}")
    return Target(backend, parse_pairs(pairs), None if plugins_file is None else str(plugins_file), files)


@conformance_command.command("run")
@click.option("--level", type=click.Choice(["bronze", "silver", "gold"]), default="bronze", show_default=True, help="Level to reach.")
@click.option("--quick", is_flag=True, help="One case of each kind: under a minute for a CPU, more where a driver compiles; earns no level.")
@click.option("--op", "ops", metavar="GLOB", multiple=True, help="Only cases of these ops; may be repeated.")
@click.option("--case", "cases", metavar="ID", multiple=True, help="Only this case, or those that match; may be repeated.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the data.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes at the same time.")
@click.option("--fail-fast", "-x", is_flag=True, help="Stop at the first failure.")
@click.option("--dump", type=click.Path(file_okay=False), help="Folder for operands and results of failed cases (.npz).")
@click.option("--report-dir", type=click.Path(file_okay=False, path_type=Path), help="Folder for JSON, JUnit, Markdown, HTML and the badge.")
@click.option("--expected", type=click.Path(dir_okay=False), help="A conformance.toml.  [default: the one in the vendor's package]")
@click.option("--perf", is_flag=True, help="Measure speed, too, in under three minutes. A whole run for Gold always does.")
@click.option("--compare", metavar="REPORT", type=click.Path(dir_okay=False), help="An older conformance.json: say what became slower or faster (with --perf).")
@click.option("--soak", "soak_minutes", metavar="[MINUTES]", type=click.FloatRange(0.02, 60), is_flag=False, flag_value=10.0, default=None, help="Serve for so long, too; 10 without a number, 60 at most.")
@click.option("--quiet", "-q", is_flag=True, help="No line per failed case on stderr.")
@_with(_backend, _common)
def run_command(
    backend: str, backend_opt: tuple[str, ...], plugins_file: Path | None, plugin_paths: tuple[Path, ...], level: str, quick: bool,
    ops: tuple[str, ...], cases: tuple[str, ...], seed: int, jobs: int, fail_fast: bool, dump: str | None, report_dir: Path | None,
    expected: str | None, perf: bool, compare: str | None, soak_minutes: float | None, quiet: bool, as_json: bool, debug: bool,
) -> int:  # fmt: skip
    """Run the suite on a backend and say which level it reaches.

    Exit code 0 only if the level is met; of a part (--quick, --op, --case), if nothing failed.
    """
    from ..conformance.perf import perf_text
    from ..conformance.report import compared_lines, sealed, write_reports
    from ..conformance.run import RunOptions, run_suite
    from ..conformance.runner import Selection
    from .terminal import escape_controls, say

    def progress(result: Any) -> None:
        if not quiet and result.status in ("failed", "not run"):
            say(escape_controls(f"{result.status}: {result.id}  [{result.rule}] {result.message}"))

    if compare is not None and not perf and (level != "gold" or quick or ops or cases):
        raise UsageError("--compare compares speeds, which nobody asked to measure", fix="--perf")
    for option, folder in (("--report-dir", report_dir), ("--dump", Path(dump) if dump else None)):
        if folder is not None:
            made_folder(option, folder)  # before the minutes that the run takes
    command = "fastllm conformance " + " ".join(_quoted(a) for a in _typed())
    options = RunOptions(
        _target(backend, backend_opt, plugins_file, plugin_paths), Selection(level, quick, ops, cases), seed, jobs, fail_fast, dump, expected, command,
        perf, compare, soak_minutes or 0.0,
    )  # fmt: skip
    run = run_suite(options, progress)
    files = [str(p) for p in write_reports(run.report, report_dir)] if report_dir is not None else []
    if as_json:
        click.echo(json.dumps(sealed(run.report), indent=1))
    else:
        counts = run.report["standing"]["counts"]
        click.echo(run.earned.badge())
        click.echo(f"{counts['passed']} passed / {counts['expected']} expected failures / {counts['n/a']} n/a / {counts['failed'] + counts['not run']} failed  ({run.report['time_s']} s)")
        for reason in run.earned.reasons[:5]:
            click.echo(escape_controls(reason))
        if run.report["perf"] is not None:
            for line in perf_text(run.report["perf"]):
                click.echo(escape_controls(line))
            for line in compared_lines(run.report["perf"]["compared"]) if compare is not None else ():
                click.echo(escape_controls(line))
        for file in files:
            click.echo(f"written: {file}")
    return 0 if run.met else 1


def _typed() -> list[str]:
    """The arguments behind `conformance`, as the report quotes them."""
    arguments = sys.argv[1:]
    return arguments[arguments.index("conformance") + 1 :] if "conformance" in arguments else ["run"]


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


@conformance_command.command("list")
@click.option("--level", type=click.Choice(["bronze", "silver", "gold"]), default="gold", show_default=True, help="Cases up to this level.")
@click.option("--quick", is_flag=True, help="Only those of --quick.")
@click.option("--op", "ops", metavar="GLOB", multiple=True, help="Only cases of these ops.")
@click.option("--case", "cases", metavar="ID", multiple=True, help="Only cases that match.")
@_with(_common)
def list_command(level: str, quick: bool, ops: tuple[str, ...], cases: tuple[str, ...], as_json: bool, debug: bool) -> None:
    """List the cases of the suite."""
    from ..conformance.runner import Selection, choose
    from ..conformance.suite import all_cases

    chosen = choose(Selection(level, quick, ops, cases), all_cases().values())
    if as_json:
        click.echo(json.dumps([{"id": c.id, "op": c.op, "group": c.group, "level": c.level, "required": c.required, "quick": c.quick} for c in chosen], indent=1))
        return
    for case in chosen:
        click.echo(case.id)


@conformance_command.command("verify")
@click.argument("report", type=click.Path(dir_okay=False))
@_with(_common)
def verify_command(report: str, as_json: bool, debug: bool) -> int:
    """Check that a report is consistent: counts, level, and no case dropped or added."""
    from ..conformance.verify import verify
    from .terminal import escape_controls

    wrong = verify(report)
    if as_json:
        click.echo(json.dumps({"report": report, "verified": not wrong, "wrong": wrong}, indent=1))
    else:
        for line in wrong[:MOST_LINES]:
            click.echo(escape_controls(line))
        if len(wrong) > MOST_LINES:
            click.echo(f"and {len(wrong) - MOST_LINES} more (all with --json)")
        click.echo(f"{report}: {'does not verify' if wrong else 'consistent'}")
    return 1 if wrong else 0


@conformance_command.command("publish")
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("--into", required=True, type=click.Path(file_okay=False, exists=True, path_type=Path), help="Folder of the backend's package, beside its plugin module.")
@_with(_common)
def publish_command(reports: tuple[str, ...], into: Path, as_json: bool, debug: bool) -> None:
    """Put what a backend reached into its package, where `fastllm backends list` finds it.

    Each REPORT is a conformance.json of a whole run; it is verified first. One for each device, or set of options, that is claimed.
    """
    from ..conformance.published import FILE, publish, standing_of
    from .terminal import escape_controls

    check_place("--into", into / FILE)
    found = publish(reports, into / FILE)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    native, level = standing_of(found)
    click.echo(escape_controls(f"written: {into / FILE}: {found[0]['backend']}, {len(found)} runs, native {native}, {level}"))


@conformance_command.command("self-test")
@click.option("--mutant", "mutants", metavar="GLOB", multiple=True, help="Only these mutants; may be repeated.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes at the same time.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the kill table to a JSON file.")
@_with(_common)
def self_test_command(mutants: tuple[str, ...], jobs: int, write: Path | None, as_json: bool, debug: bool) -> int:
    """Break backends on purpose and check that the suite sees it.

    Each mutant must differ from its honest base and be killed by the rule that it names. Exit code 1 if one is dead or survives.
    """
    from ..conformance.mutants import self_test
    from .terminal import escape_controls

    if write is not None:
        check_place("--write", write)
    kills = self_test(mutants, jobs)
    bad = [k for k in kills if not k.good]
    table = [{"name": k.name, "family": k.family, "what": k.what, "verdict": k.verdict, "rule": k.rule, "case": k.case, "margin": None if k.margin is None else f"{k.margin:.3g}"} for k in kills]
    if write is not None:
        write_text("--write", write, json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    if as_json:
        click.echo(json.dumps(table, indent=1))
    else:
        for kill in bad:
            click.echo(escape_controls(f"{kill.verdict}: {kill.name} ({kill.what}), rule {kill.rule}: {kill.message}  [{kill.case}]"))
        click.echo(f"{len(kills) - len(bad)} of {len(kills)} mutants killed by the rule that they name")
    return 1 if bad else 0


@conformance_command.command("calibrate")
@click.option("--backend", "backends", metavar="NAME", multiple=True, help="Honest backends to measure.  [default: ref, cpu_avx in every variant, opencl_generic, and the suite's own: blas, groups, lanes]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for one JSON file per backend.  [default: print only]")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes at the same time.")
@_with(_common)
def calibrate_command(backends: tuple[str, ...], out: Path | None, jobs: int, as_json: bool, debug: bool) -> int:
    """Measure how much of its bound honest kernels need, per op, format, data class and length of the sum.

    Exit code 1 if one needs more than 0.75, 2 if one fails a case: then the bound, or the kernel, is wrong.
    """
    from ..conformance.calibrate import calibrate, default_targets, named_target

    if out is not None:
        made_folder("--out", out)
    targets = [named_target(name) for name in backends] or default_targets()
    measured = calibrate(targets, out, jobs)
    if as_json:
        click.echo(json.dumps(measured, indent=1))
    worst = 0.0
    for name, bins in measured.items():
        top = max(bins, key=lambda b: bins[b]["margin"], default="")
        if top and not as_json:
            click.echo(f"{name:24} {len(bins)} bins, worst {bins[top]['margin']:.2f} in {top}")
        worst = max(worst, bins[top]["margin"] if top else 0.0)
    return 1 if worst > 0.75 else 0
