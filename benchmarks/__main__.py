"""`python -m benchmarks COMMAND`: measures fastllm, the machine and other engines. See docs/performance.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fastllm.core.errors import FastLLMError

from . import results
from .environments import RECIPES, Unavailable

CELLS_HELP = "Comma-separated cells: prefill:N, decode:CONTEXT, batch:STREAMS"


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """--threads --repeat --json."""
    command = click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Merge the rows into this file.")(command)
    command = click.option("--repeat", type=click.IntRange(1), default=5, show_default=True, help="Measurements of each cell.")(command)
    return click.option("--threads", "-t", type=click.IntRange(0), default=0, help="0: as many as the engine would take.")(command)


class Sink:
    """Prints rows as they come, and merges each into the file at once, so that an interrupted run keeps what it has."""

    def __init__(self, out: Path | None):
        self.out, self.records = out, list[dict[str, Any]]()
        self.clock = results.OthersClock()
        if out is not None:
            results.load(out)  # says now what is wrong with it

    def add(self, record: dict[str, Any]) -> None:
        """One record."""
        record["others"] = self.clock.share()
        self.records.append(record)
        value = f"{results.spread(record['value'])} {record['unit']}" if record["value"] else f"– {record['reason']}"
        ratio = ""
        if record["ratio"]:
            ratio = f"{record['ratio']['median']:.2f} ×" if record["ours"] else results.spread(record["ratio"], percent=True)
        click.echo(f"{record['engine']:14} {results.cell_name(record):44} {value:34} {ratio}")
        if record["others"] > 0.1:
            click.echo(f"  other programs took {record['others']:.1f} cores meanwhile: measure this again", err=True)
        if self.out is not None:
            document = results.load(self.out)
            results.merge(document, [record])
            self.out.parent.mkdir(parents=True, exist_ok=True)
            results.save(document, self.out)


def found_threads(threads: int) -> int:
    """What the engine takes for 0."""
    from fastllm.backends.cpu_avx.threads import choose_threads

    return choose_threads(threads).count


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Measure fastllm beside the limits of the machine and other engines."""


@cli.command()
@common
def limits(threads: int, repeat: int, out: Path | None) -> None:
    """Read bandwidth by size, and the peak of every multiply instruction."""
    from .limits import limit_rows

    sink = Sink(out)
    for count, row in limit_rows(found_threads(threads), repeat):
        sink.add(results.record("limits", "", "fastllm", {"threads": count}, row))


@cli.command()
@click.argument("names", nargs=-1, required=True)
def models(names: tuple[str, ...]) -> None:
    """Make models with random weights: SHAPE-TYPE, for example llama1b-q4_0."""
    from .models import model_path

    for name in names:
        click.echo(model_path(name))


@cli.command()
@click.option("--model", default="llama1b-q4_0", show_default=True, help="SHAPE-TYPE, a file, or a name that fastllm knows.")
@click.option("--cells", help=CELLS_HELP + ", attention:N (its share of a prompt), mixed, overhead, sampling, first-token, load, resident (memory by stage), import, idle.  [default: all]")
@click.option("--isa", help="Instruction set of cpu_avx.")
@click.option("--kv-dtype", help="How keys and values are kept.")
@click.option("--opt", multiple=True, metavar="KEY=VALUE", help="Option of the backend; `backend` and `dtype` are those of the command line.")
@common
def engine(
    model: str, cells: str | None, isa: str | None, kv_dtype: str | None, opt: tuple[str, ...], threads: int, repeat: int, out: Path | None
) -> None:
    """Our engine: speed as ratios to the machine's limits, start, memory, overheads."""
    from .engine import DEFAULT_CELLS, engine_rows
    from .models import model_path

    options = chosen(isa, kv_dtype, opt)
    sink = Sink(out)
    recorded = {"threads": found_threads(threads), **options}
    for row in engine_rows(str(model_path(model)), options, threads, cells.split(",") if cells else DEFAULT_CELLS, repeat):
        sink.add(results.record("engine", Path(model).name, "fastllm", recorded, row))


@cli.command()
@click.option("--model", default="llama1b-q4_0", show_default=True, help="SHAPE-TYPE, a file, or a name that fastllm knows.")
@click.option("--peer", "names", multiple=True, help="Which; may be repeated.  [default: all]")
@click.option("--cells", default="prefill:512,decode:0,batch:8", show_default=True, help=CELLS_HELP + ".")
@click.option("--isa", help="Instruction set of cpu_avx.")
@click.option("--kv-dtype", help="How our keys and values are kept.")
@click.option("--opt", multiple=True, metavar="KEY=VALUE", help="Option of our backend.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Folder for what the engines print.")
@common
def peers(
    model: str,
    names: tuple[str, ...],
    cells: str,
    isa: str | None,
    kv_dtype: str | None,
    opt: tuple[str, ...],
    logs: Path | None,
    threads: int,
    repeat: int,
    out: Path | None,
) -> None:
    """Other engines on the same model, in turns with ours."""
    from .peers import PEERS, peer_rows

    if unknown := [n for n in names if n not in PEERS]:
        raise click.UsageError(f"no peer '{unknown[0]}'; there are {', '.join(PEERS)}")
    options, sink = chosen(isa, kv_dtype, opt), Sink(out)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    for name, found, row, ours in peer_rows(model, names or tuple(PEERS), cells.split(","), repeat, found_threads(threads), options, logs):
        mine = {f"ours.{k}": v for k, v in options.items()}
        sink.add(results.record("peers", Path(model).name, name, {**found, **mine}, row, ours))


@cli.command()
@click.argument("names", metavar="BACKEND...", nargs=-1)
@click.option("--model", default="smollm2", show_default=True, help="SHAPE-TYPE, a file, or a name that fastllm knows.")
@click.option("--cells", default="decode:0,decode:64,prefill:64", show_default=True, help=CELLS_HELP + ".")
@common
def backends(names: tuple[str, ...], model: str, cells: str, threads: int, repeat: int, out: Path | None) -> None:
    """Other backends of ours (opencl_generic) on the same model, in turns with cpu_avx.

    Without --threads each has as many as it takes by itself, and rows say how many; with it, a backend that takes no number is refused.
    """
    from .peers import backend_rows

    sink = Sink(out)
    for name, found, row, ours in backend_rows(model, names or ("opencl_generic",), cells.split(","), repeat, threads):
        sink.add(results.record("backends", Path(model).name, name, found, row, ours))


@cli.command()
@click.option("--model", default="llama1b-q4_0", show_default=True, help="SHAPE-TYPE, a file, or a name that fastllm knows.")
@click.option("--cells", default="prefill:512,decode:0", show_default=True, help=CELLS_HELP + ".")
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True, help="Measurements of each cell.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Merge the rows into this file.")
def containers(model: str, cells: str, repeat: int, out: Path | None) -> None:
    """Our engine under CPU quotas and an affinity mask, beside every number of threads set by hand (as root)."""
    from .containers import CONTAINERS, container_rows

    sink = Sink(out)
    for found, row in container_rows(model, CONTAINERS, cells.split(","), repeat, found_threads(0)):
        sink.add(results.record("containers", Path(model).name, "fastllm", found, row))


def chosen(isa: str | None, kv_dtype: str | None, opt: tuple[str, ...]) -> dict[str, str]:
    """Options of our backend from the command line."""
    pairs = [pair.partition("=") for pair in opt]
    if bad := [key for key, equals, _ in pairs if not (key and equals)]:
        raise click.UsageError(f"--opt {bad[0]!r} is not KEY=VALUE")
    named = {"isa": isa, "kv_dtype": kv_dtype}
    return {key: value for key, _, value in pairs} | {k: v for k, v in named.items() if v}


@cli.command()
@click.argument("names", nargs=-1)
def envs(names: tuple[str, ...]) -> None:
    """Make the environments of peers and tools ahead of time."""
    from .environments import environment

    if unknown := [n for n in names if n not in RECIPES]:
        raise click.UsageError(f"no environment '{unknown[0]}'; there are {', '.join(RECIPES)}")
    for name in names or RECIPES:
        try:
            made = environment(name)
            click.echo(f"{name}: {made.folder} ({made.note})")
        except Unavailable as error:
            click.echo(f"{name}: {error}")


@cli.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def show(files: tuple[Path, ...]) -> None:
    """Print results files as tables."""
    for path in files:
        click.echo(f"{path}\n\n{results.table(results.load(path)['rows'])}\n")


@cli.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("docs/plots"), show_default=True, help="Folder for the figures.")
def plots(files: tuple[Path, ...], out: Path) -> None:
    """Draw growth curves of results files (those of benchmarks/results) as SVG."""
    from .plots import draw
    from .tables import RESULTS

    rows = [row for path in files or sorted(RESULTS.glob("*.json")) for row in results.load(path)["rows"]]
    for made in draw(rows, out):
        click.echo(made)


def main() -> None:
    """Errors of ours are one line."""
    try:
        cli(prog_name="python -m benchmarks")
    except (FastLLMError, Unavailable) as error:
        sys.exit(f"benchmarks: {error}")


if __name__ == "__main__":
    main()
