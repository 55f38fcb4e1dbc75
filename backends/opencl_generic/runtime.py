"""The OpenCL runtime: pyopencl behind the interface of `gpu/runtime.py`, and the devices that the drivers offer.

pyopencl is imported when a device is looked for, never before. Built kernels are kept across runs: by the driver where it does so
(PoCL, NVIDIA), else by pyopencl in the user's cache folder, by source, options, device and driver.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fastllm.api import BackendUnavailable, DeviceLost, EngineError, OutOfMemory

from ..gpu.runtime import Caps, KernelKey, kernel_source

__all__ = ["ClRuntime", "Missing", "devices", "load"]

INSTALL = "pip install 'fastllm-engine[opencl]'"
DRIVERS = "install an OpenCL driver (ICD) of the device's vendor; for the CPU: apt-get install pocl-opencl-icd"
MEMORY_ERRORS = ("MEM_OBJECT_ALLOCATION_FAILURE", "OUT_OF_HOST_MEMORY", "INVALID_BUFFER_SIZE", "OUT_OF_RESOURCES")
LOST_ERRORS = ("DEVICE_NOT_AVAILABLE", "INVALID_COMMAND_QUEUE", "INVALID_CONTEXT", "INVALID_DEVICE")
LOG_LINES = 12
TELL_S = 0.5  # of compiling what no run before has built, after which a line says what takes so long
LOG = logging.getLogger("fastllm.opencl")  # without a handler, Python writes the line to stderr


class Missing(Exception):
    """Nothing can be opened: reason, and what the user can do."""

    def __init__(self, reason: str, hint: str):
        super().__init__(reason)
        self.reason, self.hint = reason, hint


def load() -> Any:
    """The module pyopencl. Raises Missing if it is not installed or does not load."""
    try:
        import pyopencl
    except ImportError as error:
        if getattr(error, "name", None) == "pyopencl":
            raise Missing("pyopencl is not installed", INSTALL) from None
        raise Missing(f"pyopencl does not load: {error}", INSTALL) from None
    return pyopencl


def devices() -> dict[str, Any]:
    """Usable devices, "PLATFORM.DEVICE" -> pyopencl device; GPUs and accelerators are not sorted before CPUs. Raises Missing."""
    cl = load()
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise Missing(f"no OpenCL driver (ICD) is installed ({_code(error)})", DRIVERS) from None
    found = {}
    for p, platform in enumerate(platforms):
        try:
            listed = platform.get_devices()
        except cl.Error:
            continue  # a platform whose devices are gone
        for d, device in enumerate(listed):
            if device.available and device.compiler_available and device.endian_little:
                found[f"{p}.{d}"] = device
    if not found:
        names = ", ".join(p.name for p in platforms) or "none"
        raise Missing(f"no OpenCL device (platforms: {names})", DRIVERS)
    return found


def device_kind(device: Any) -> str:
    """What executes: emulated (Oclgrind), cpu or device."""
    if "oclgrind" in device.platform.name.lower():
        return "emulated"
    return "cpu" if device.type & load().device_type.CPU else "device"


def caps_of(cl: Any, device: Any) -> Caps:
    """What the shared backend needs to know of a device."""
    fp64 = "cl_khr_fp64" in device.extensions.split()
    return Caps(
        name=device.name.strip(),
        driver=f"{device.platform.name}, {device.platform.version}, driver {device.driver_version}",
        is_cpu=bool(device.type & cl.device_type.CPU),
        memory_bytes=int(device.global_mem_size),
        max_alloc_bytes=int(device.max_mem_alloc_size),
        alignment=int(device.mem_base_addr_align) // 8,
        max_lanes=int(device.max_work_group_size),
        fp64=fp64,
        units=int(device.max_compute_units),
    )


class ClRuntime:
    """One open OpenCL device with one in-order queue. Raises BackendUnavailable if it cannot be opened."""

    def __init__(self, device: Any, who: str):
        self._cl, self._who = load(), who
        self.caps = caps_of(self._cl, device)
        self._programs: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}
        self._built_s, self._told = 0.0, False
        self._enqueue = self._cl.enqueue_nd_range_kernel
        try:
            self._context = self._cl.Context([device])
            self._queue = self._cl.CommandQueue(self._context, device)
        except self._cl.Error as error:
            raise BackendUnavailable(f"{who} cannot open {self.caps.name}: {error}", who=who, fix=DRIVERS) from None
        self._options = ["-cl-std=CL1.2"]
        if device.single_fp_config & self._cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT:
            self._options.append("-cl-fp32-correctly-rounded-divide-sqrt")

    @contextmanager
    def _errors(self, what: str, nbytes: int = 0) -> Iterator[None]:
        """Errors of the driver as those of fastllm."""
        try:
            yield
        except self._cl.Error as error:
            raise self._translated(error, what, nbytes) from None

    def _translated(self, error: Exception, what: str, nbytes: int) -> Exception:
        code = _code(error)
        if code in LOST_ERRORS:
            return DeviceLost(f"{self._who}: the device is gone: {code} while {what}", who=self._who, fix="open the backend again")
        if code in MEMORY_ERRORS:
            return OutOfMemory(
                f"{self._who}: {what}: the device has not enough memory ({code})", who=self._who, requested=nbytes,
                fix="lower --ctx, or choose a smaller quantisation",
            )  # fmt: skip
        return EngineError(f"{self._who}: {code} while {what}", who=self._who)

    # memory ---------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, zeroed: bool) -> Any:
        """Memory, filled with zeros if asked for."""
        with self._errors(f"allocating {nbytes:,} bytes", nbytes):
            buffer = self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE, nbytes)
            if zeroed:
                self._cl.enqueue_fill_buffer(self._queue, buffer, np.uint8(0), 0, nbytes)
        return buffer

    def free(self, handle: Any) -> None:
        """Releases the buffer; the driver keeps it until what was enqueued is done."""
        handle.release()

    def write(self, handle: Any, offset: int, data: memoryview) -> None:
        """Host to device."""
        with self._errors(f"writing {data.nbytes:,} bytes", data.nbytes):
            source = np.frombuffer(data, np.uint8)
            self._cl.enqueue_copy(self._queue, handle, source, dst_offset=offset, is_blocking=False)

    def read(self, data: memoryview, handle: Any, offset: int) -> None:
        """Device to host."""
        with self._errors(f"reading {data.nbytes:,} bytes", data.nbytes):
            target = np.frombuffer(data, np.uint8)
            self._cl.enqueue_copy(self._queue, target, handle, src_offset=offset, is_blocking=False)

    def copy(self, dst: Any, dst_offset: int, src: Any, src_offset: int, nbytes: int) -> None:
        """Within the device."""
        with self._errors(f"copying {nbytes:,} bytes", nbytes):
            self._cl.enqueue_copy(self._queue, dst, src, byte_count=nbytes, dst_offset=dst_offset, src_offset=src_offset)

    # kernels --------------------------------------------------------------------------------------------------------

    def bind(self, key: KernelKey, args: Sequence[Any]) -> Any:
        """A kernel object of its own, with its arguments."""
        program = self._program(key)
        with self._errors(f"binding kernel '{key.entry}'"):
            kernel = self._cl.Kernel(program, key.entry)
            for index, value in enumerate(args):
                kernel.set_arg(index, value)
        return kernel

    def _program(self, key: KernelKey) -> Any:
        known = (key.source, key.defines)
        if known not in self._programs:
            options = [*self._options, *(f"-D{name}={value}" for name, value in key.defines)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a compiler may talk; what matters is whether it fails
                start = time.perf_counter()
                try:
                    program = self._cl.Program(self._context, kernel_source(key.source)).build(options, cache_dir=_cache_dir())
                except self._cl.Error as error:
                    log = " | ".join(line for line in str(error).splitlines() if "error" in line)
                    raise BackendUnavailable(
                        f"{self._who}: the driver's compiler refuses kernel '{key.entry}' of {key.source}", who=self._who,
                        why=log[:600] or str(error)[:600], fix=f"update the driver ({self.caps.driver})",
                        source=key.source, options=options,
                    ) from None  # fmt: skip
            if self._is_new(key.source, options):
                self._built_s += time.perf_counter() - start
                if self._built_s > TELL_S and not self._told:
                    self._told = True
                    LOG.warning("fastllm: %s compiles its kernels; the next start finds them compiled", self._who)
            self._programs[known] = program
        return self._programs[known]

    def _is_new(self, source: str, options: Sequence[str]) -> bool:
        """Whether no run before this one has built that. What is kept loads slowly on a loaded machine, too, and is not compiled then."""
        folder = _cache_dir()
        if folder is None:
            return True
        text = "\0".join((kernel_source(source), *options, self.caps.name, self.caps.driver))
        mark = os.path.join(folder, f"built-{hashlib.sha256(text.encode()).hexdigest()[:32]}")
        with contextlib.suppress(OSError):
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return True
        return not os.path.exists(mark)

    def set_arg(self, bound: Any, index: int, value: np.generic) -> None:
        """Changes one argument."""
        bound.set_arg(index, value)

    def launch(self, bound: Any, groups: Sequence[int], lanes: int) -> None:
        """Enqueues work-groups."""
        try:
            if len(groups) == 1:
                self._enqueue(self._queue, bound, (groups[0] * lanes,), (lanes,))
            else:
                self._enqueue(self._queue, bound, (groups[0] * lanes, groups[1]), (lanes, 1))
        except self._cl.Error as error:
            raise self._translated(error, f"running kernel '{bound.function_name}'", 0) from None

    def finish(self) -> None:
        """Waits for everything."""
        with self._errors("waiting for the device"):
            self._queue.finish()

    def close(self) -> None:
        """Gives the device back; may be called twice."""
        self._programs.clear()


def _code(error: Exception) -> str:
    """The name of an OpenCL error: MEM_OBJECT_ALLOCATION_FAILURE."""
    text = str(error)
    return text.split("failed: ", 1)[-1].split(" - ")[0].split("\n")[0].strip() or text


def _cache_dir() -> str | None:
    """Where built kernels are kept: below $XDG_CACHE_HOME/fastllm or ~/.cache/fastllm; None: where pyopencl keeps them, if
    no folder can be made there."""
    base = os.environ.get("FASTLLM_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "fastllm"
    )
    folder = os.path.join(base, "opencl-kernels")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return None
    return folder
