"""`fastllm plan`: what a model would take and where it would run, before anything is loaded."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .command import Command, model_argument
from .options import load_options, model_options

if TYPE_CHECKING:
    from ..loading import ModelPlan

__all__ = ["plan_command"]


@click.command("plan", cls=Command)
@model_argument()
@click.option("--no-measure", is_flag=True, help="Do not measure this machine's read bandwidth (half a second).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options
def plan_command(model: str | None, **values: Any) -> None:
    """Show memory, device of each layer, ops that leave their device, and the limit of speed, for MODEL.

    The expected speed of one stream is the read bandwidth of this machine, measured now, divided by the bytes of weights that
    one token reads: a limit, not a promise.
    """
    from ..loading import DEFAULT_MODEL, plan_model
    from .terminal import Reporter

    with Reporter.of(values, silent=values["as_json"]) as reporter:
        callbacks = {"progress": reporter.progress, "message": reporter.message, "licence": reporter.licence}
        planned = plan_model(model or DEFAULT_MODEL, load_options({**values, "max_batch_size": values["max_batch_size"] or 1}, **callbacks))
        reporter.stop()
    try:
        facts = describe(planned, measure=not values["no_measure"])
    finally:
        planned.close()
    if values["as_json"]:
        click.echo(json.dumps(facts, indent=1))
        return
    for key in ("model", "backend", "threads", "context", "sequences"):
        click.echo(f"{key:22} {facts[key]}")
    for key in ("weights", "cache", "activations", "total", "available"):
        size = facts[f"{key}_bytes"]
        click.echo(f"{key:22} {'unknown' if size is None else f'{size / (1 << 20):,.1f} MiB'}")
    if facts["mapped_bytes"]:
        click.echo(f"{'used from the file':22} {facts['mapped_bytes'] / (1 << 20):,.1f} MiB")
    if facts["state_bytes"]:
        click.echo(f"{'recurrent state':22} {facts['state_bytes'] / (1 << 20):,.1f} MiB, for {facts['sequences']} sequences and {facts['state_snapshots']} snapshots")
    click.echo(f"{'cache per token':22} {facts['cache_bytes_per_token']:,} bytes{' (' + facts['kv_dtype'] + ')' if facts['kv_dtype'] else ''}")
    for line in facts["layers"]:
        click.echo(f"{'layers ' + line['layers']:22} {line['device']}")
    for layout, size in facts["weight_layouts"].items():
        click.echo(f"{'kept as ' + layout:22} {size / (1 << 20):,.1f} MiB")
    for left in facts["fallbacks"]:
        line = f"{left['op']} × {left['count']} → {left['device']}: {left['reason']}; {left['bytes_per_token']:,} bytes per token"
        click.echo(f"{'leaves its device':22} {line}")
    click.echo(f"{'copied per token':22} {facts['copy_bytes_per_token']:,} bytes")
    click.echo(f"{'weights per token':22} {facts['weight_bytes_per_token'] / (1 << 20):,.1f} MiB")
    if facts["read_bytes_per_s"]:
        click.echo(f"{'read bandwidth':22} {facts['read_bytes_per_s'] / 1e9:.1f} GB/s (measured over as many bytes)")
        click.echo(f"{'speed limit':22} {facts['tokens_per_s_limit']:.1f} tokens/s for one stream at the start of its context")


def describe(planned: ModelPlan, *, measure: bool) -> dict[str, Any]:
    """The plan as plain data, for people and for `--json`."""
    plan = planned.plan
    cache, state, mapped = (plan.total_bytes(a) for a in ("kv", "state", "mapped"))
    weights = plan.total_bytes("weights") + mapped
    activations = plan.total_bytes("scratch") + plan.total_bytes("host")
    layouts: Counter[str] = Counter()
    for place in plan.places.values():
        if place.arena in ("weights", "mapped"):
            layouts[place.layout.id if place.layout else place.dtype] += place.nbytes
    per_token = plan.bytes_per_token()
    bandwidth = _bandwidth(planned, per_token) if measure else None
    return {
        "model": planned.name,
        "architecture": planned.definition.architecture,
        "backend": planned.selection.name,
        "backend_origin": planned.selection.origin,
        "threads": _threads(planned),
        "context": planned.context,
        "sequences": plan.limits.max_sequences,
        "weights_bytes": weights,
        "mapped_bytes": mapped,
        "cache_bytes": cache,
        "state_bytes": state,
        "state_snapshots": plan.limits.num_snapshots,
        "cache_bytes_per_token": cache // (plan.limits.num_blocks * plan.limits.block_size),
        "kv_dtype": planned.options.kv_dtype,
        "activations_bytes": activations,
        "total_bytes": weights + cache + state + activations,
        "available_bytes": planned.available_bytes,
        "layers": _layers(planned),
        "weight_layouts": dict(layouts.most_common()),
        "fallbacks": [asdict(op) for op in plan.left],
        "copy_bytes_per_token": plan.copy_bytes_per_token(),
        "weight_bytes_per_token": per_token,
        "read_bytes_per_s": bandwidth,
        "tokens_per_s_limit": bandwidth / per_token if bandwidth and per_token else None,
    }


def _threads(planned: ModelPlan) -> str:
    """How many, and why."""
    count, name = planned.backends[planned.selection.name].threads, planned.selection.name
    if "threads" not in planned.selection.spec.options:
        return str(count)
    asked = planned.options.threads or planned.options.backend_options.get("threads")
    return f"{count}: asked for" if asked else planned.registry.environment_or_fault(name)[0].get("threads", str(count))


def _layers(planned: ModelPlan) -> list[dict[str, str]]:
    """Runs of layers on the same devices: [{"layers": "0–29", "device": "cpu_avx"}]."""
    devices: dict[int, set[str]] = {}
    for decision in planned.plan.decisions:
        layer = planned.plan.graph.nodes[decision.node].tags.get("layer")
        if layer is not None:
            devices.setdefault(layer, set()).add(decision.device)
    runs: list[tuple[int, int, str]] = []
    for layer in sorted(devices):
        device = " + ".join(sorted(devices[layer]))
        if runs and runs[-1][2] == device:
            runs[-1] = (runs[-1][0], layer, device)
        else:
            runs.append((layer, layer, device))
    return [{"layers": f"{first}–{last}", "device": device} for first, last, device in runs]


def _bandwidth(planned: ModelPlan, nbytes: int) -> float | None:
    """Bytes per second that the backend reads, over as many bytes as a token needs; None if it cannot tell."""
    return planned.backends[planned.selection.name].read_bandwidth(max(nbytes, 1 << 20))
