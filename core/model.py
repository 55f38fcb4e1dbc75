"""ModelDef: what a model family hands to the engine: a graph, where its weights come from, and a few numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import Graph, Node
from .weights import WeightRef

__all__ = ["ModelDef", "experts_of_row"]


@dataclass(frozen=True)
class ModelDef:
    """One model, ready to be planned.

    graph outputs: ["logits", "ids"] values: logits [R, V] f32 and the sampled ids [R]; of a model for embedding the hidden state
    [R, C]. weights: graph weight name -> where it
    comes from. max_position: tokens the model was made for (its context limit). notes: one line each about anything that was
    left out or decided (unused towers, a rope variant fixed by the context limit); printed once at load.
    """

    architecture: str
    graph: Graph
    weights: Mapping[str, WeightRef]
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    notes: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)

    def active_parameters(self) -> tuple[int, int]:
        """(parameters that one token takes part in, all): of the experts those that a token is given to, everything else whole."""
        total = {v.name: math.prod(int(d) for d in v.shape) for v in self.graph.of_kind("weight")}
        active = dict(total)
        for node in self.graph.nodes:
            taken, count = experts_of_row(self.graph, node)
            for name in node.inputs if count > 1 else ():
                if name in total:
                    active[name] = total[name] * taken // count
        return sum(active.values()), sum(total.values())


def experts_of_row(graph: Graph, node: Node) -> tuple[int, int]:
    """How many of the matrices of a `moe` node one row takes, and how many there are; (1, 1) for other nodes."""
    if node.op != "moe":
        return 1, 1
    ids, gate = graph.values[str(node.inputs[1])], graph.values[str(node.inputs[3])]
    return int(ids.shape[1]), int(gate.shape[0])
