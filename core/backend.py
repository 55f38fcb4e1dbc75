"""The operator interface: what the engine asks of a backend, and what a backend may rely on.

A vendor's package has one module per backend with pluggy hooks (`BackendHooks`); the loader calls `open_backend` and gets a
`Backend`: one open device. Everything hot is a method or a plain function. `fastllm.api` re-exports this module for vendors.

    OpFn(*inputs, out, stream, ws, **attrs)      inputs: Tensors in catalogue order, None where absent; out: Tensor or tuple

An op allocates nothing, and may return before it is done (order holds within a stream).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np

from .errors import OutOfMemory, UnsupportedError
from .graph import Graph, KVSpec, Node, SlotSpec
from .quant import FORMATS
from .weights import HostTensor, PackedLayout

__all__ = [
    "API_VERSION",
    "Backend",
    "BackendSpec",
    "Buffer",
    "CompileEnv",
    "DeviceInfo",
    "Event",
    "Limits",
    "MemoryInfo",
    "No",
    "OpFn",
    "OpQuery",
    "Option",
    "PackedLayout",
    "Program",
    "Ready",
    "StepDims",
    "Stream",
    "Tensor",
    "Unavailable",
    "Yes",
    "check_alloc",
    "plain_bytes",
]

API_VERSION: Final = (1, 2)
"""(major, minor) of this interface. Frozen: within a major there are additions only, each of which raises the minor; `docs/api-frozen.txt`
is what was frozen, and a test compares."""


# what a plug-in says about itself ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One `--backend-opt key=value`: type (int, float, bool, str), default, allowed values, help."""

    type: type
    default: Any
    choices: tuple[Any, ...] = ()
    help: str = ""


@dataclass(frozen=True)
class BackendSpec:
    """Plain data about a backend; name, api_version and opset never move. priority: 0…100, highest Ready wins `auto`; below 0:
    never chosen by `auto`."""

    name: str
    api_version: tuple[int, int]
    opset: int
    vendor: str = ""
    summary: str = ""
    priority: int = 50
    options: Mapping[str, Option] = field(default_factory=dict)
    homepage: str = ""


@dataclass(frozen=True)
class DeviceInfo:
    """One device that a probe found. memory_bytes: total, 0 if unknown. kind: device, cpu (the host computes) or emulated (nobody's
    hardware: its speed says nothing); reports name it."""

    id: str
    name: str
    memory_bytes: int = 0
    detail: str = ""
    kind: str = "device"


@dataclass(frozen=True)
class Ready:
    """Probe result: these devices can be opened."""

    devices: tuple[DeviceInfo, ...]


@dataclass(frozen=True)
class Unavailable:
    """Probe result: nothing to open, why, and what the user can do."""

    reason: str
    hint: str = ""


# support ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpQuery:
    """A question at plan time. dtypes: of the inputs (None where absent; "any" never occurs: weights carry their format); shapes,
    with symbols; specs: KVSpec or SlotSpec of those that are state; dims: closed ranges of symbols and sizes, for example
    {"T": (0, 512), "ctx": (0, 8192)}; attrs: those that differ from the catalogue's defaults, and those without one; strides: in
    elements, of inputs that are windows on a value and not contiguous, None for all others."""

    op: str
    dtypes: tuple[str | None, ...]
    shapes: tuple[tuple[int | str, ...] | None, ...] = ()
    dims: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    specs: tuple[KVSpec | SlotSpec | None, ...] = ()
    strides: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True)
class Yes:
    """Supported for every value of every range. impl: name in `Backend.ops()`. acc, act, weight, prob, angle: the numerics
    that results are judged by (act: how activations are rounded first, e.g. "q8_g32"). workspace: bytes that a call needs as `ws`,
    which all nodes of a device share. varies: ("rows",) admits that batch mates change results."""

    impl: str
    acc: str = "f32"
    act: str | None = None
    weight: str | None = None
    prob: str | None = None
    angle: str | None = None
    workspace: int = 0
    varies: tuple[str, ...] = ()


@dataclass(frozen=True)
class No:
    """Not supported, with the reason that `fastllm plan` prints. holds: sub-ranges of dims that would be."""

    reason: str
    holds: Mapping[str, tuple[int, int]] | None = None


# memory -----------------------------------------------------------------------------------------------------------------


class Buffer:
    """A block of device memory. nbytes, kind (weights | kv | state | scratch | staging). `handle` is the vendor's: an address,
    an object. `close` may be called twice; use after close raises."""

    def __init__(self, nbytes: int, kind: str, handle: Any, release: Callable[[], None] | None = None):
        self.nbytes, self.kind, self._handle, self._release, self.closed = nbytes, kind, handle, release, False

    @property
    def handle(self) -> Any:
        """The vendor's handle. Raises ValueError after close."""
        if self.closed:
            raise ValueError(f"{self.kind} buffer of {self.nbytes} bytes is used after it was closed")
        return self._handle

    def close(self) -> None:
        """Returns the memory."""
        if not self.closed:
            self.closed = True
            if self._release is not None:
                self._release()
            self._handle = None


@dataclass(slots=True)
class Tensor:
    """An operand at run time: a window on a buffer.

    offset: bytes from the buffer's start. shape: integers. dtype: of FORMATS, or "kv"/"slot" for state. strides: in elements,
    None if contiguous. packed: layout of a weight that the backend packed. spec: KVSpec or SlotSpec of a state, whose buffer is
    `num_blocks` blocks of `block_bytes` (kv) or slots.
    """

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    packed: PackedLayout | None = None
    spec: KVSpec | SlotSpec | None = None
    block_size: int = 0
    num_blocks: int = 0
    block_bytes: int = 0

    def with_rows(self, rows: int) -> Tensor:
        """The same tensor with another leading dimension (a step with fewer tokens than the maximum)."""
        return replace(self, shape=(rows, *self.shape[1:]))


@dataclass(frozen=True)
class Limits:
    """alignment of buffers and offsets in bytes; max_alloc: largest single buffer or None; streams."""

    alignment: int = 64
    max_alloc: int | None = None
    streams: int = 1


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of the device: total (0 if unknown), free, and used by this backend's buffers."""

    total: int
    free: int
    used: int


class Stream:
    """Work in order. The default stream is done when a call returns."""

    def synchronize(self) -> None:
        """Waits until everything enqueued is done."""


class Event:
    """A point in a stream."""

    def record(self, stream: Stream) -> None:
        """Marks the point."""

    def synchronize(self) -> None:
        """Waits for the point."""


class OpFn(Protocol):
    """An op implementation."""

    def __call__(self, *inputs: Tensor | None, out: Any, stream: Stream, ws: Tensor | None, **attrs: Any) -> None:
        """Runs the op on a stream."""


# compiled programs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepDims:
    """Sizes of one step: T tokens, S sequences, R sampled rows."""

    T: int
    S: int
    R: int

    def resolve(self, dim: int | str) -> int:
        """The number behind a symbol."""
        if isinstance(dim, int):
            return dim
        return {"T": self.T, "S": self.S, "R": self.R, "S+1": self.S + 1, "R+1": self.R + 1}[dim]


@dataclass(frozen=True)
class CompileEnv:
    """Where everything of a segment lives, fixed for the life of the program.

    tensors: value name -> Tensor at its largest shape (step inputs, weights, constants, state, temporaries, outputs).
    largest: the biggest step. block_size: tokens per cache block; max_blocks: columns of the block table. workspace: i8 [n]."""

    graph: Graph
    tensors: Mapping[str, Tensor]
    largest: StepDims
    block_size: int
    max_blocks: int
    workspace: Tensor | None = None


class Program(Protocol):
    """A compiled segment."""

    def run(self, dims: StepDims) -> None:
        """Runs one step of these sizes on the buffers it was compiled for; may drop the GIL."""

    def close(self) -> None:
        """Frees what the program owns."""


# the backend ------------------------------------------------------------------------------------------------------------


class Backend(ABC):
    """One open device. A context manager; called by one thread at a time. The first five methods are mandatory; the rest have
    correct defaults."""

    name: str = ""
    limits: Limits = Limits()
    kv_dtypes: tuple[str, ...] = ()  # of graph.KV_DTYPES: what the spec of a cache may ask for; one that asks for nothing fits all
    threads: int = 1  # host threads that its ops run on
    warning: str = ""  # one line that the user should read after it was opened
    pack_rows: int = 0  # weights may be packed in blocks of a multiple of that many rows, which lie one after another; 0: whole only
    maps_weights: bool = False  # a packed weight in a mapped file is used where it is (`wrap_host`), without a copy

    @abstractmethod
    def supports(self, q: OpQuery) -> Yes | No:
        """Whether (and how) this op runs here over the whole of the asked ranges. Pure, no device work."""

    @abstractmethod
    def alloc(self, nbytes: int, kind: str) -> Buffer:
        """Memory; `state` is zeroed, the rest may hold anything. kind: weights | kv | state | scratch | staging. Raises OutOfMemory
        and stays usable."""

    @abstractmethod
    def upload(self, dst: Buffer, offset: int, src: memoryview, stream: Stream) -> None:
        """Host to device. src must stay as it is until the stream is synchronised."""

    @abstractmethod
    def download(self, dst: memoryview, src: Buffer, offset: int, stream: Stream) -> None:
        """Device to host; done when the stream is synchronised."""

    @abstractmethod
    def ops(self) -> Mapping[str, OpFn]:
        """Implementation name -> function; read once, at open."""

    def wrap_host(self, view: np.ndarray, readonly: bool) -> Buffer | None:
        """A buffer on host memory without a copy, or None."""
        return None

    def copy(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, nbytes: int, stream: Stream) -> None:
        """Within the device; through staging on the host by default."""
        stage = bytearray(nbytes)
        self.download(memoryview(stage), src, src_offset, stream)
        stream.synchronize()
        self.upload(dst, dst_offset, memoryview(stage), stream)
        stream.synchronize()  # the staging ends here

    def memory(self) -> MemoryInfo:
        """What the device has and what is used."""
        return MemoryInfo(0, 0, 0)

    def read_bandwidth(self, nbytes: int) -> float | None:
        """Bytes per second at which ops read a weight set of nbytes, measured now (well under a second); None: cannot tell."""
        return None

    def peak_ops(self, dtype: str) -> float | None:
        """Operations per second (a multiply-add is two) of the device's best instruction for products of int8, bf16 or f32, measured
        now (well under a second); None: cannot tell."""
        return None

    def new_stream(self) -> Stream:
        """A new stream."""
        return Stream()

    def new_event(self) -> Event:
        """A new event."""
        return Event()

    def kv_block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of one cache block of this layer; the layout inside is the backend's own."""
        return block_size * spec.num_kv_heads * (spec.key_dim + spec.value_dim) * 4

    def pack_layout(self, shape: Sequence[int], format: str, uses: frozenset[str]) -> PackedLayout | None:
        """The layout in which a weight of this shape and format would be kept, for ops `uses`; None: the engine decodes it to
        the nearest plain format that `supports` accepts. Pure: memory is planned from it before anything is loaded."""
        return None

    def pack_weight(self, weight: HostTensor, layout: PackedLayout, dst: Buffer, offset: int) -> None:
        """Writes a weight in a layout that `pack_layout` gave; done on return."""
        raise NotImplementedError(f"backend '{self.name}' gives a packed layout but has no pack_weight")

    def unpack_weight(self, data: np.ndarray, layout: PackedLayout) -> np.ndarray:
        """The bytes of `layout.format` (u8) that were packed to `data` (u8 [layout.nbytes]): undoes pack_weight. Raises
        UnsupportedError for a layout or version that this backend does not know."""
        raise UnsupportedError(f"backend '{self.name}' cannot undo the packed layout {layout.id} version {layout.version}")

    def compile(self, sub: Sequence[Node], env: CompileEnv) -> Program | None:
        """A program for these nodes, or None: the executor runs them op by op."""
        return None

    def close(self) -> None:
        """Returns everything; may be called twice. The default owns nothing."""
        return None

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_alloc(nbytes: int, kind: str, limits: Limits, free: int | None) -> None:
    """Raises OutOfMemory if an allocation cannot fit. nbytes, free: bytes."""
    if limits.max_alloc is not None and nbytes > limits.max_alloc:
        raise OutOfMemory(f"{kind} buffer of {nbytes:,} bytes; one buffer may hold {limits.max_alloc:,}", requested=nbytes, kind=kind)
    if free is not None and nbytes > free:
        raise OutOfMemory(
            f"{kind} buffer of {nbytes:,} bytes does not fit: {free:,} bytes are free",
            fix="lower --ctx, or choose a smaller quantisation",
            requested=nbytes,
            free=free,
            kind=kind,
        )


def plain_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a contiguous tensor."""
    return FORMATS[dtype].nbytes(int(np.prod(shape, dtype=np.int64))) if dtype in FORMATS else 0
