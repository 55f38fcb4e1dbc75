"""Short calls for the tests of `opencl_generic`: numpy arrays in, numpy arrays out, on a device that may be missing.

Run as a program it computes every op once on small shapes. `test_opencl_oclgrind.py` runs it so under Oclgrind, which checks every access.
"""

from __future__ import annotations

import sys

import numpy as np

from fastllm.api import FORMATS, HostTensor, KVSpec, SlotSpec, Tensor
from fastllm.backends.gpu.backend import GpuBackend
from fastllm.backends.gpu.layouts import BLOCK_LAYOUTS
from fastllm.backends.opencl_generic.runtime import ClRuntime, Missing, devices

DTYPES = {np.dtype("f4"): "f32", np.dtype("i4"): "i32", np.dtype("i1"): "i8", np.dtype("f2"): "f16"}
NAN = float("nan")


def missing() -> str:
    """Why there is no device, "" if there is one."""
    try:
        devices()
    except Missing as reason:
        return f"{reason.reason}: {reason.hint}"
    return ""


def open_backend(**options):
    """The first device."""
    return GpuBackend("opencl_generic", ClRuntime(next(iter(devices().values())), "opencl_generic"), **options)


def random_blocks(format, shape, seed=0):
    """Random bytes of a block format with scales near 1/100: u8 [N, bytes of a row]."""
    rng = np.random.default_rng(seed)
    block = FORMATS[format]
    count = shape[0] * (shape[1] // block.block)
    raw = rng.integers(0, 256, (count, block.block_bytes), np.uint8)
    layout = BLOCK_LAYOUTS[format]
    if format == "mxfp4":
        raw[:, 0] = rng.integers(112, 125, count)
    else:
        halves = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}.get(format, (0, 2) if layout.minimum and layout.scale != 4 else (0,))
        for at in halves:
            raw[:, at : at + 2] = rng.uniform(0.002, 0.02, count).astype(np.float16)[:, None].view(np.uint8)
    return raw.reshape(shape[0], -1)


class Bench:
    """A backend and short calls."""

    def __init__(self, **options):
        self.backend = open_backend(**options)
        self.ops, self.stream = self.backend.ops(), self.backend.new_stream()
        self.workspace = Tensor(self.backend.alloc(1 << 22, "scratch"), 0, (1 << 22,), "i8")

    def tensor(self, array, **fields):
        """A Tensor on a copy of an array, which starts one element into its buffer."""
        if isinstance(array, Tensor) or array is None:
            return array
        array = np.ascontiguousarray(array)
        buffer = self.backend.alloc(array.nbytes + array.itemsize, "scratch")
        if array.size:
            self.backend.upload(buffer, array.itemsize, memoryview(array.reshape(-1).view(np.uint8)), self.stream)
            self.stream.synchronize()
        return Tensor(buffer, array.itemsize, array.shape, DTYPES[array.dtype], **fields)

    def array(self, tensor):
        """What a tensor holds."""
        out = np.empty(tensor.shape, next(k for k, v in DTYPES.items() if v == tensor.dtype))
        if out.size:
            self.backend.download(memoryview(out.reshape(-1).view(np.uint8)), tensor.buffer, tensor.offset, self.stream)
        self.stream.synchronize()
        return out

    def run(self, op, *inputs, shape=None, dtypes=("f4",), **attrs):
        """Runs an op into new arrays filled with 0x7f bytes; shape: of the result, default the first input's; a list for several."""
        shapes = [inputs[0].shape] if shape is None else shape if isinstance(shape, list) else [shape]
        operands = [self.tensor(i) for i in inputs]
        results = [self.tensor(np.full(s, 127, np.int8) if d == "i1" else np.full(s, NAN, d)) for s, d in zip(shapes, dtypes, strict=False)]
        out = tuple(results) if len(results) != 1 else results[0]
        self.ops[op](*operands, out=out, stream=self.stream, ws=self.workspace, **attrs)
        found = [self.array(r) for r in results]
        return found[0] if len(found) == 1 else found

    def packed(self, format, data, shape):
        """A weight in this backend's layout."""
        layout = self.backend.pack_layout(shape, format, frozenset({"linear", "embed"}))
        buffer = self.backend.alloc(layout.nbytes + 64, "weights")
        self.backend.pack_weight(HostTensor("w", shape, format, data.reshape(-1).view(np.uint8)), layout, buffer, 64)
        return Tensor(buffer, 64, shape, format, packed=layout)

    def cache(self, spec, blocks, block_size):
        """A cache whose slots all hold NaN."""
        size = self.backend.kv_block_bytes(spec, block_size)
        buffer = self.backend.alloc(size * blocks, "kv")
        self.backend.upload(buffer, 0, memoryview(np.full(size * blocks, 255, np.uint8)), self.stream)
        self.stream.synchronize()
        return Tensor(buffer, 0, (), "kv", spec=spec, block_size=block_size, num_blocks=blocks, block_bytes=size)

    def state(self, spec, slots):
        """Slots of recurrent state, zeroed."""
        size = 4 * int(np.prod(spec.shape))
        return Tensor(self.backend.alloc(size * slots, "state"), 0, (), "slot", spec=spec, num_blocks=slots, block_bytes=size)

    def close(self):
        self.workspace.buffer.close()
        self.backend.close()


def run_everything(kernels):
    """Every kernel once, on small shapes with tails."""
    bench, rng = Bench(kernels=kernels), np.random.default_rng(1)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    x = normal(3, 64)
    for format in ("q4_1", "q8_0", "q5_0", "mxfp4", "int4g32"):
        w = bench.packed(format, random_blocks(format, (35, 64)), (35, 64))
        bench.run("linear", x, w, normal(35), shape=(3, 35))
        bench.run("linear", x[:1], w, None, shape=(1, 35))
        bench.run("embed", np.array([0, 34], np.int32), w, shape=(2, 64))
    for format in ("q4_k", "q6_k", "q2_k"):
        bench.run("linear", normal(2, 256), bench.packed(format, random_blocks(format, (33, 256)), (33, 256)), None, shape=(2, 33))
    plain = normal(35, 70).astype(np.float16)
    bench.run("linear", normal(5, 70), bench.packed("f16", plain, plain.shape), None, shape=(5, 35))
    bench.run("linear", normal(2, 70), plain, None, shape=(2, 35))
    bench.run("embed", np.array([34, 0], np.int32), plain, shape=(2, 70))
    bench.run("matmul", normal(2, 3, 20), normal(3, 5, 20), shape=(2, 3, 5))
    bench.run("rms_norm", normal(2, 3, 37), normal(37), eps=1e-5)
    bench.run("layer_norm", normal(2, 37), normal(37), normal(37), eps=1e-5)
    bench.run("softmax", normal(2, 37))
    bench.run("softcap", normal(2, 37), cap=3.0)
    bench.run("act_mul", normal(2, 37), normal(2, 37), kind="silu")
    bench.run("add", normal(2, 37), normal(37))
    bench.run("concat", normal(2, 3, 37), normal(2, 3, 5), shape=(2, 3, 42))
    step = (np.array([0, 1, 2, 5], np.int32), np.array([0, 3, 4], np.int32), np.array([2, 0], np.int32))  # one sequence begins, one goes on
    conv = bench.state(SlotSpec((3, 70)), 3)
    bench.run("short_conv", conv, normal(4, 70), normal(70, 4), *step, shape=(4, 70), kind="silu")
    gates = (normal(4, 4), normal(4, 4), normal(4), normal(4))
    delta = bench.state(SlotSpec((4, 16, 70)), 3)
    bench.run("delta_rule", delta, normal(4, 2, 16), normal(4, 2, 16), normal(4, 4, 70), *gates, *step, shape=(4, 4, 70), eps=1e-6)
    bench.run("mul", normal(2, 3, 7), normal(2, 1))
    bench.run("quantize", normal(2, 64), shape=[(2, 64), (2, 2)], dtypes=("i1", "f4"), group=32)
    bench.run("dequantize", np.ones((2, 64), np.int8), normal(2, 2), shape=(2, 64), group=32)
    for style in ("half", "pairs"):
        bench.run("rope", normal(2, 2, 40), np.array([3, 9], np.int32), normal(18), style=style, factor=1.0)
    spec = KVSpec(2, 16, 16)
    cache = bench.cache(spec, 3, 16)
    slots = np.concatenate([np.arange(32, 48), np.arange(0, 4), [-1]]).astype(np.int32)
    bench.run("kv_write", cache, normal(21, 2, 16), normal(21, 2, 16), slots, shape=[])
    positions, starts, lengths = np.array([18, 19], np.int32), np.array([0, 2], np.int32), np.array([20], np.int32)
    operands = (normal(2, 4, 16), cache, positions, starts, lengths, np.array([[2, 0, 0]], np.int32), normal(4), None, None)
    attrs = {"scale": 0.25, "mask": "causal", "chunk": 0, "window": 7, "softcap": 5.0, "value_dim": 0}
    assert np.isfinite(bench.run("attention", *operands, shape=(2, 4, 16), **attrs)).all()
    bench.close()


if __name__ == "__main__":
    run_everything(sys.argv[1])
