"""NativeProgram: a segment compiled to native instructions; one call a step, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence

from fastllm.api import EngineError, Node, StepDims

from . import _native
from .lower import OPCODES, Lowered

__all__ = ["NativeProgram"]

REASONS = {
    1: "the process was forked after the backend was opened; its threads exist in the parent only. Open it again in the child",
    2: "another thread runs a step on this backend; one at a time",
    3: "index {value} at place {where} is outside of its table of {limit} rows",
    4: "slot {value} of token {where} is behind the cache, which has {limit} slots",
    5: "query_start[{where}] = {value} does not divide the {limit} tokens of the step in ascending order",
    6: "context_len[{where}] = {value}, but a row of the block table holds {limit} tokens at most",
    7: "the block table of sequence {where} names block {value}; the cache has {limit}",
    8: "the step is larger than the program was compiled for",
}
"""Faults of program.h."""


class NativeProgram:
    """A compiled segment on fixed addresses."""

    def __init__(self, isa: str, pool: _native.Pool, lowered: Lowered, largest: StepDims, nodes: Sequence[Node]):
        """isa: a variant that runs here; largest: the biggest step."""
        self._ops = [node.op for node in nodes]
        sizes = (largest.T, largest.S, largest.R)
        self._program = _native.Program(isa, pool, lowered.code, lowered.checks, sizes, lowered.scratch_bytes, lowered.owned)
        self.barriers = sum(entry[1] & 1 for entry in lowered.code)
        """In steps of several rows."""
        self.barriers_of_one_row = sum(entry[1] >> 1 for entry in lowered.code)
        self.instructions = len(lowered.code)

    def run(self, dims: StepDims) -> None:
        """Runs one step. Raises EngineError, having touched nothing, if the step's indices are wrong."""
        try:
            fault = self._program.run(dims.T, dims.S, dims.R)
        except OverflowError:  # beyond 64 bits
            fault = (8, -1, 0, 0, 0)
        if fault is not None:
            status, node, where, value, limit = fault
            op = f"op '{self._ops[node]}' (node {node})" if 0 <= node < len(self._ops) else "cpu_avx"
            raise EngineError(f"{op}: {REASONS[status].format(where=where, value=value, limit=limit)}", who="cpu_avx")

    def profile(self, on: bool = True) -> dict[str, float]:
        """Switches timing on or off; returns the seconds spent since the last call, per kind of instruction, and in `wait`, at
        barriers, the end of a step left out."""
        names = list(OPCODES)
        spent: dict[str, float] = {}
        for op, _, seconds, waited in self._program.profile(on):
            spent[names[op]] = spent.get(names[op], 0.0) + seconds - waited
            spent["wait"] = spent.get("wait", 0.0) + waited
        return spent

    def close(self) -> None:
        """Frees what the program owns; may be called twice."""
        self._program.close()
