"""Record the launches of CuTe DSL kernels on a machine without CUDA.

`prepare` must run before `cutlass` is imported: it builds the stand-in runtime with the system compiler and points
CuTe DSL at it. Compiled functions then run their real host code (argument unpacking, tensor-map encoding, attribute
and launch calls); `Recorder` collects what reaches cudaLaunchKernelEx.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .launch import Launch, dump_if_asked, parsed, tensor_entry
from .parser import Module

SHIM_SOURCE = Path(__file__).with_name("cute_runtime_shim.c")
SHIM_NAME = "libcute_dsl_runtime.so"
_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, *([ctypes.c_uint64] * 4))
_CLUSTER_DIMENSION = 4  # cudaLaunchAttributeClusterDimension
_NONPORTABLE = 14  # cudaFuncAttributeNonPortableClusterSizeAllowed
_shim: ctypes.CDLL | None = None
_keep: list = []


def gpu_in_the_way() -> str | None:
    """Why nothing can be captured on this machine: its GPU's driver and the stand-in cannot serve one process."""
    if torch.cuda.device_count():
        return "a GPU is there, and its driver ahead of the stand-in: run under python -m tests.ptx_sim.without_gpu"
    return None


def available() -> str | None:
    """None when capture can work here, else the reason why not."""
    if reason := gpu_in_the_way():
        return reason
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        return "no C compiler for the runtime stand-in"
    from importlib.util import find_spec

    if find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed"
    if _shim is None and "cutlass" in sys.modules:
        return "cutlass was imported before capture_cute.prepare() could choose the runtime"
    return None


def prepare(arch: str = "sm_100a") -> Path:
    """Build the stand-in runtime and set CuTe DSL's environment. Returns the dump folder of this process."""
    global _shim
    if _shim is not None:
        return Path(os.environ["CUTE_DSL_DUMP_DIR"])
    if "cutlass" in sys.modules:
        raise RuntimeError("prepare() must run before cutlass is imported: it chooses the runtime library")
    folder = Path(tempfile.mkdtemp(prefix="ptx_sim_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "lib" / SHIM_NAME
    library.parent.mkdir()
    compiler = shutil.which("gcc") or shutil.which("cc")
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{SHIM_NAME}", "-o", str(library), str(SHIM_SOURCE)],
        check=True,
    )
    dump = folder / "dump"
    dump.mkdir()
    os.environ["CUTE_DSL_LIBS"] = str(library)
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["CUTE_DSL_KEEP"] = "ptx"
    os.environ["CUTE_DSL_DUMP_DIR"] = str(dump)
    _shim = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return dump


@contextmanager
def architecture(arch: str) -> Iterator[None]:
    """Compile for another architecture inside: CuTe DSL refuses to run code for any but its current one."""
    from cutlass.cutlass_dsl import CuTeDSL

    environment = CuTeDSL._get_dsl().envar
    before = environment.arch
    environment.arch = arch
    try:
        yield
    finally:
        environment.arch = before


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("pad", ctypes.c_int32), ("value", ctypes.c_uint32 * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


class CudaView:
    """A CPU tensor that says it lives on CUDA device 0, for CuTe DSL's DLPack exchange."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor, name)

    def detach(self) -> CudaView:
        return self

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA

    def __dlpack__(self, **_: object) -> object:
        capsule = self.tensor.detach().__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLManagedTensor starts with DLTensor: void *data, then DLDevice {int32 type, int32 id}.
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2
        return capsule


class Recorder:
    """Runs compiled CuTe DSL functions with the recording runtime.

    `attributes` answers cudaDeviceGetAttribute by number (97 = largest opt-in shared memory per block). `options` are
    those of `Launch.run` and `Machine`: resident, policy, observer, limit, strict, ptxas.
    """

    def __init__(self, run: bool = False, **options: object) -> None:
        if _shim is None:
            raise RuntimeError("call capture_cute.prepare() first")
        self.launches: list[Launch] = []
        self.calls: list[str] = []
        self.modules: dict[str, tuple[Module, str]] = {}
        self.attributes = {97: 232448, 16: 148, 81: 233472, 75: 10, 76: 0}
        self.error: BaseException | None = None
        self.tensors: list = []
        self.run = run
        self.reports: list = []
        self.options = options
        self._hook = _HOOK(self._dispatch)

    def add_ptx(self, text: str) -> None:
        """Make the kernels of a PTX module known (a compiled function's `__ptx__`)."""
        module = parsed(text)
        for name in module.kernels:
            self.modules[name] = (module, text)

    def call(self, function: object, tensors: dict[str, torch.Tensor], *arguments: object) -> list[Launch]:
        """Call a compiled function; `tensors` names all memory its kernels may touch. Returns its launches.

        With `run`, every launch is executed before its launch call returns, so host code may launch chains.
        """
        if getattr(function, "__ptx__", None):
            self.add_ptx(function.__ptx__)
        self.tensors = [tensor_entry(name, tensor) for name, tensor in tensors.items() if tensor is not None]
        first = len(self.launches)
        self.error = None
        _shim.ptx_sim_set_hook(self._hook)
        try:
            function(*[CudaView(a) if isinstance(a, torch.Tensor) else a for a in arguments])
        except Exception:
            if self.error is None:
                raise
        finally:
            _keep.append(self._hook)
        if self.error is not None:
            raise self.error
        return self.launches[first:]

    def _dispatch(self, name: bytes, a0: int, a1: int, a2: int, a3: int) -> int:
        try:
            return getattr(self, name.decode().replace("_cu", "on_cu", 1), self._ignore)(a0, a1, a2, a3)
        except BaseException as error:
            self.error = self.error or error
            return 0

    def _ignore(self, *_: int) -> int:
        return 0

    def on_cudaLibraryLoadData(self, library: int, *_: int) -> int:
        ctypes.c_uint64.from_address(library).value = 0x1000
        return 0

    def on_cudaLibraryGetKernel(self, kernel: int, _library: int, name: int, *_: int) -> int:
        handle = 0x2000 + len(_HANDLES)
        _HANDLES[handle] = ctypes.string_at(name).decode()
        ctypes.c_uint64.from_address(kernel).value = handle
        return 0

    def on_cudaKernelSetAttributeForDevice(self, kernel: int, attribute: int, value: int, *_: int) -> int:
        if attribute & 0xFFFFFFFF == _NONPORTABLE and value & 0xFFFFFFFF:
            _nonportable.add(kernel)
        return 0

    def on_cuKernelGetAttribute(self, value: int, *_: int) -> int:
        ctypes.c_int32.from_address(value).value = 0
        return 0

    def on_cudaDeviceGetAttribute(self, value: int, attribute: int, *_: int) -> int:
        ctypes.c_int32.from_address(value).value = self.attributes.get(attribute & 0xFFFFFFFF, 0)
        return 0

    def on_cudaGetDevice(self, device: int, *_: int) -> int:
        ctypes.c_int32.from_address(device).value = 0
        return 0

    def on_cudaGetDeviceCount(self, count: int, *_: int) -> int:
        ctypes.c_int32.from_address(count).value = 1
        return 0

    def on_cudaMemsetAsync(self, target: int, value: int, count: int, *_: int) -> int:
        ctypes.memset(target, value & 255, count)
        return 0

    def on_cudaLaunchKernelEx(self, config: int, function: int, arguments: int, *_: int) -> int:
        config = _LaunchConfig.from_address(config)
        name = _HANDLES[function]
        if name not in self.modules:
            raise KeyError(f"launch of {name!r}, whose PTX is not known")
        module, text = self.modules[name]
        kernel = module.kernels[name]
        params = bytearray(kernel.param_bytes)
        pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        for i, param in enumerate(kernel.params):
            params[param.offset : param.offset + param.size] = ctypes.string_at(pointers[i], param.size)
        cluster = (1, 1, 1)
        for i in range(config.count):
            attribute = config.attributes[i]
            if attribute.id == _CLUSTER_DIMENSION:
                cluster = tuple(max(1, v) for v in attribute.value[:3])
        launch = Launch(
            text,
            name,
            (config.grid.x, config.grid.y, config.grid.z),
            (config.block.x, config.block.y, config.block.z),
            cluster,
            config.shared_bytes,
            bytes(params),
            list(self.tensors),
            function in _nonportable,
        )
        self.launches.append(launch)
        dump_if_asked(launch)
        if self.run and self.error is None:
            self.reports.append(launch.run(**self.options))
        return 0


_HANDLES: dict[int, str] = {}
# Handles whose function attribute allows clusters of more than 8 CTAs.
_nonportable: set[int] = set()
