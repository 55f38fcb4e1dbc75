"""Decomposition: extended ops that their device does not have become core ops, so that a backend written for an opset runs the
models of later ones. Called by the planner, before it asks who runs what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .errors import ShapeError
from .graph import Graph, GraphBuilder, Node, Value
from .ops import CATALOGUE

__all__ = ["decompose", "expand"]


def decompose(graph: Graph, devices: Sequence[str], has: Callable[[Node, str], bool]) -> tuple[Graph, list[str]]:
    """The graph without the extended ops that their device lacks, and the device of every node of it.

    devices: of the graph's nodes; has(node, device): the device runs the node as it is. A node's parts stay on its device and
    keep its tags. Raises ShapeError if a decomposition does not give what its op gives.
    """
    nodes: list[Node] = []
    placed: list[str] = []
    values, count = dict(graph.values), len(graph.values) + len(graph.nodes)
    for node, device in zip(graph.nodes, devices, strict=True):
        whole = CATALOGUE[node.op].decompose is None or has(node, device)
        parts = [node] if whole else expand(node, values, count)
        nodes += parts
        placed += [device] * len(parts)
    result = Graph(graph.name, values, nodes, list(graph.outputs))
    result.verify()
    return result, placed


def expand(node: Node, values: dict[str, Value], count: int) -> list[Node]:
    """The nodes that `node` is made of; what they make is added to `values` under names of its own. count: above the number of every
    node and view of the graph."""
    rule = CATALOGUE[node.op].decompose
    assert rule is not None
    builder = GraphBuilder(node.op, count)
    operands = {n: values[n] for n in node.inputs if n is not None}
    builder.graph.values = dict(operands)
    results = rule(builder, [None if n is None else values[n] for n in node.inputs], node.attrs)
    names: dict[str, str] = {}
    for result, output in zip(results, node.outputs, strict=True):
        if result.view is not None or result.kind != "temp" or result.name in operands:
            raise ShapeError(f"the decomposition of '{node.op}' gives '{result.name}', which none of its own nodes makes")
        names[result.name] = output
    for value in builder.graph.values.values():
        if value.name in operands:
            continue
        if value.kind == "temp" or value.view is not None:
            names.setdefault(value.name, f"{node.outputs[0]}/{value.name}")
        view = None if value.view is None else replace(value.view, base=names.get(value.view.base, value.view.base))
        made = replace(value, name=names.get(value.name, value.name), view=view)
        known = values.setdefault(made.name, made)
        if known != made or (made.data is not None and not np.array_equal(made.data, known.data)):  # type: ignore[arg-type]
            raise ShapeError(f"the decomposition of '{node.op}' declares '{made.name}', which the graph has as something else")
    return [
        replace(
            part,
            inputs=tuple(None if n is None else names.get(n, n) for n in part.inputs),
            outputs=tuple(names[n] for n in part.outputs),
            tags=node.tags,
        )
        for part in builder.graph.nodes
    ]
