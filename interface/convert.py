"""Converting a model to an FLM file: rules → formats, then weight by weight from the source to the file.

    open files → build the graph → plan formats → [packed layouts of a backend] → write_flm(produce) → report

Large weights go through in blocks of rows, so that a limit of memory holds for a model of any size. The same input gives the same bytes,
for any number of threads. `fastllm convert` calls `convert_model`; loading with another dtype calls `requantised`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .core.errors import ModelFileError, UsageError
from .core.quant import FORMATS
from .core.weights import HostTensor, PackedLayout, TensorSource, WeightRef
from .load_options import say_choice, say_note
from .loading import close_all
from .opening import open_checked
from .packed import Unpacker

if TYPE_CHECKING:
    from .core.backend import Backend
    from .core.model import ModelDef
    from .core.plugins import Selection
    from .core.quantise import Loss
    from .formats import ModelFiles
    from .formats.flm import FlmWeight
    from .formats.quant_rules import QuantRules
    from .loading import LoadOptions

__all__ = ["ConvertReport", "convert_model", "requantised"]

DEFAULT_MEMORY_BYTES = 1 << 30


@dataclass
class ConvertReport:
    """What was written. formats: format -> bytes in the file; losses: weight -> (format, relative error, worst group), for what was
    quantised; notes: lines for the user."""

    path: Path
    size_bytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    losses: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    packed_for: str | None = None


def requantised(definition: ModelDef, sources: Mapping[str, TensorSource], rules: QuantRules) -> tuple[ModelDef, list[str]]:
    """The model with weights that are converted when they are loaded, and notes. Raises UsageError for rules that cannot be followed."""
    from .formats.quant_rules import plan_formats

    plan = plan_formats(definition.graph, definition.weights, sources, rules)
    return replace(definition, weights=plan.refs(definition.weights, rules.method)), plan.notes


def convert_model(
    files: ModelFiles,
    out: Path,
    rules: QuantRules,
    options: LoadOptions,
    *,
    backend: str | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    source_name: str = "",
) -> ConvertReport:
    """Writes `out`, a name ending in .flm. backend: whom the weights are packed for, "" for the best that is ready, None: not packed.
    memory_bytes: about what is used besides the mapped source. options: threads, strict, message, progress. Raises UsageError,
    ModelFileError; with `options.strict`, UsageError for what would be a note."""
    from . import models
    from .core.plugins import BackendRegistry

    registry = BackendRegistry(options.plugins_file, options.plugin_paths, strict=options.strict, waiting=options.message)
    selection = None if backend is None else registry.select(backend or None)
    say_choice(registry.messages, registry.remarks, options)
    definition = models.build(files.kind, files.architecture, files.config, files.tensors, ready=files.ready)
    backends: dict[str, Backend] = {}
    unpacker = Unpacker(files, backends, registry, options)

    def options_for(chosen: Selection) -> dict[str, str]:
        return {"threads": str(options.threads)} if options.threads and "threads" in chosen.spec.options else {}

    try:
        packer = None
        if selection is not None:
            selection, packer = open_checked(registry, selection, options_for, options)
            backends[selection.name] = packer
            if not packer.pack_rows:
                packer = None
                if backend:
                    raise UsageError(f"backend '{backend}' packs nothing that a file could hold", fix="--no-pack")
        return _convert(files, definition, out, rules, options, packer, memory_bytes, source_name)
    finally:
        close_all(unpacker.close, *(opened.close for opened in backends.values()))


def _convert(
    files: ModelFiles,
    definition: ModelDef,
    out: Path,
    rules: QuantRules,
    options: LoadOptions,
    backend: Backend | None,
    memory_bytes: int,
    source_name: str,
) -> ConvertReport:
    from .formats.flm import write_flm
    from .formats.flm_files import files_of
    from .formats.quant_rules import plan_formats

    if out.suffix.lower() != ".flm":
        raise UsageError(f"the output '{out.name}' must end in .flm", fix=f"-o {out.with_suffix('.flm').name}")
    plan = plan_formats(definition.graph, definition.weights, files.stored, rules)
    for line in (*files.notes, *definition.notes, *plan.notes):
        say_note(line, options, str(files.path))
    job = _Job(files.stored, definition, plan.formats, rules.method, backend, memory_bytes, options.threads)
    weights = job.weights()
    report = ConvertReport(out, notes=plan.notes, packed_for=None if backend is None else backend.name)
    total, done = sum(w.nbytes for w in weights), 0

    def produce(weight: FlmWeight) -> Iterator[np.ndarray]:
        nonlocal done
        for piece in job.produce(weight):
            yield piece
            done += piece.nbytes
            options.progress(f"convert {out.name}", done, total)

    def lost(weight: FlmWeight) -> dict[str, float]:
        report.formats[weight.format] = report.formats.get(weight.format, 0) + weight.nbytes
        if weight.name not in plan.formats:
            return {}
        loss = job.losses[weight.name]
        report.losses[weight.name] = (weight.format, loss.relative, loss.worst)
        return {"relative_error": float(f"{loss.relative:.6g}"), "worst_group": float(f"{loss.worst:.6g}")}

    try:
        json.dumps(files.config, allow_nan=False)
    except (TypeError, ValueError):
        fix = "convert the model again from its original"
        raise ModelFileError("the configuration holds something that is no finite number, text, list or table", who=str(files.path), fix=fix) from None
    used = {name for ref in definition.weights.values() for name in ref.names}
    small = {name: t for name, t in files.tensors.items() if len(t.shape) == 1 and t.data.size and (name not in used or files.ready is not None)}
    facts = {
        "flm": 1,
        "kind": files.kind,
        "architecture": files.architecture,
        "config": files.config,
        "source": Path(source_name).name if source_name and Path(source_name).exists() else source_name or files.path.name,
        "packed_for": report.packed_for,
        "dtype": rules.dtype,
        "method": rules.method,
        "source_tensors": [[t.name, t.format, list(t.shape) or [1]] for t in files.tensors.values()],
    }
    report.size_bytes = write_flm(out, weights, list(small.values()), files_of(files), facts, produce, lost)
    return report


class _Job:
    """One conversion: what each weight becomes, and its bytes."""

    def __init__(
        self,
        sources: Mapping[str, TensorSource],
        definition: ModelDef,
        formats: Mapping[str, str],
        method: str,
        backend: Backend | None,
        memory_bytes: int,
        threads: int,
    ):
        self.sources, self.definition, self.formats, self.method = sources, definition, formats, method
        self.backend, self.memory_bytes, self.threads = backend, memory_bytes, threads
        self.losses: dict[str, Loss] = {}

    def weights(self) -> list[FlmWeight]:
        """Every weight as the file will have it, in running order."""
        from .formats.flm import FlmWeight

        graph = self.definition.graph
        uses: dict[str, set[str]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                if name is not None:
                    uses.setdefault(graph.base(name).name, set()).add(node.op)
        found = []
        for value in graph.of_kind("weight"):
            if value.view is not None:
                continue
            shape = tuple(int(d) for d in value.shape)
            format = self.formats.get(value.name) or self.definition.weights[value.name].format(self.sources)
            layout = None
            if self.backend is not None and value.dtype == "any" and len(shape) >= 2:
                layout = self.backend.pack_layout(shape[-2:], format, frozenset(uses.get(value.name, ())))
                layout = layout if layout is not None and layout.format == format else None
            found.append(FlmWeight(value.name, shape, format, layout, self._bytes(shape, format, layout)))
        return found

    def _bytes(self, shape: tuple[int, ...], format: str, layout: PackedLayout | None) -> int:
        if layout is None:
            return FORMATS[format].nbytes(math.prod(shape))
        count = math.prod(shape[:-2])
        return layout.nbytes if count == 1 else count * self._matrix(layout)

    def _matrix(self, layout: PackedLayout) -> int:
        """Bytes of one matrix of a stack: each begins aligned."""
        return -(-layout.nbytes // 64) * 64

    def produce(self, weight: FlmWeight) -> Iterator[np.ndarray]:
        """The bytes of a weight in pieces."""
        from .core.quantise import Loss

        self.losses[weight.name] = Loss()
        ref = self.definition.weights[weight.name]
        if len(weight.shape) < 3:
            yield from self._rows(weight, ref, weight.shape)
            return
        for part in ref.split(weight.shape[0]):
            size = 0
            for piece in self._rows(weight, part, weight.shape[1:]):
                size += piece.nbytes
                yield piece
            if weight.layout is not None:
                yield np.zeros(self._matrix(weight.layout) - size, np.uint8)

    def _rows(self, weight: FlmWeight, ref: WeightRef, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """One matrix (or vector), by blocks of rows."""
        step = self._block_rows(ref, shape)
        if len(shape) != 2 or step >= shape[0]:
            yield self._piece(weight, ref, shape)
            return
        for start in range(0, shape[0], step):
            stop = min(shape[0], start + step)
            yield self._piece(weight, ref.block(start, stop), (stop - start, shape[1]))

    def _block_rows(self, ref: WeightRef, shape: tuple[int, ...]) -> int:
        """Rows that fit in a quarter of the memory: before, after, packed, and what threads decode. Whole strips for the backend."""
        unit = 1 if self.backend is None else self.backend.pack_rows
        if unit == 0 or ref.add or ref.parts or len(shape) < 2:
            return shape[0]
        row_bytes = 4 * shape[1]
        return max(unit, self.memory_bytes // 4 // row_bytes // unit * unit)

    def _piece(self, weight: FlmWeight, ref: WeightRef, shape: tuple[int, ...]) -> np.ndarray:
        from .core.quantise import convert

        tensor = ref.resolve(self.sources, weight.name, shape)
        if tensor.format != weight.format:
            search = self.method == "search"
            tensor = convert(tensor, weight.format, search=search, loss=self.losses[weight.name], threads=self.threads)
        return tensor.data if weight.layout is None else self._packed(tensor, weight.layout)

    def _packed(self, tensor: HostTensor, layout: PackedLayout) -> np.ndarray:
        assert self.backend is not None
        part = self.backend.pack_layout(tensor.shape, layout.format, frozenset({"linear"}))
        assert part is not None
        out = np.zeros(part.nbytes, np.uint8)
        buffer = self.backend.wrap_host(out, readonly=False)
        if buffer is None:
            raise UsageError(f"backend '{self.backend.name}' cannot pack for a file", fix="--no-pack")
        try:
            self.backend.pack_weight(tensor, part, buffer, 0)
        finally:
            buffer.close()
        return out
