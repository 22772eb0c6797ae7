"""Record the launches of TileLang kernels on a machine without CUDA.

`prepare` must run before `tilelang` is imported. A kernel compiled for an explicit target (`{"kind": "cuda", "arch":
"sm_90a"}`) then runs its real host code with the stand-in driver: argument checks, strides, launch geometry, shared
memory and tensor maps are those of a GPU launch. The PTX comes from the kernel's CUDA source through nvcc with exactly
the options that TileLang compiles it with.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch

from . import tensormap
from .capture_cute import _CLUSTER_DIMENSION, _NONPORTABLE, CudaView, _Attribute, gpu_in_the_way
from .launch import Launch, dump_if_asked, parsed, tensor_entry
from .parser import Module

# Names the stand-in where it has been loaded before everything else (`without_gpu.py`).
LOADED = "PTX_SIM_STAND_IN"
SHIM_SOURCE = Path(__file__).with_name("cuda_driver_shim.c")
_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))
_shims: list[ctypes.CDLL] = []
_names: dict[int, str] = {}
# PTX by the CUDA source that it comes from.
_texts: dict[str, str] = {}
# Functions whose attribute allows clusters of more than 8 CTAs.
_nonportable: set[int] = set()
_keep: list = []
# CUtensorMapDataType and CUtensorMapSwizzle.
_TYPES = {
    0: "u8",
    1: "u16",
    2: "u32",
    3: "s32",
    4: "u64",
    5: "s64",
    6: "f16",
    7: "f32",
    8: "f64",
    9: "bf16",
    10: "f32",
    11: "tf32",
    12: "tf32",
}
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}


def available() -> str | None:
    """None when capture can work here, else the reason why not."""
    if reason := gpu_in_the_way():
        return reason
    if torch.version.cuda and LOADED not in os.environ:
        return "torch's CUDA runtime is ahead of the stand-in: run under python -m tests.ptx_sim.without_gpu"
    for tool in ("gcc", "nvcc"):
        if shutil.which(tool) is None:
            return f"no {tool}"
    if find_spec("tilelang") is None:
        return "tilelang is not installed"
    if not _shims and "tilelang" in sys.modules:
        return "tilelang was imported before capture_tilelang.prepare() could load the stand-in driver"
    return None


def prepare() -> None:
    """Build and load the stand-in libcuda.so.1 and libcudart.so.

    Compiled kernels are kept only where `TILELANG_CACHE_DIR` names a folder for them.
    """
    if _shims:
        return
    if "tilelang" in sys.modules:
        raise RuntimeError("prepare() must run before tilelang is imported: its stubs look for libcuda.so.1 once")
    folder = Path(tempfile.mkdtemp(prefix="ptx_sim_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if "TILELANG_CACHE_DIR" not in os.environ:
        os.environ |= {"TILELANG_CACHE_DIR": str(folder / "cache"), "TILELANG_DISABLE_CACHE": "1"}
    if LOADED in os.environ:
        _shims.append(ctypes.CDLL(os.environ[LOADED]))
        return
    for name in ("libcuda.so.1", "libcudart.so"):
        build(folder / name)
        _shims.append(ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL))


def build(library: Path) -> None:
    """Compile the stand-in under a name by which it is looked for."""
    options = ["-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(SHIM_SOURCE)]
    subprocess.run([shutil.which("gcc"), *options], check=True)


@contextmanager
def _compiling_to_ptx() -> Iterator[None]:
    """Inside, TileLang's compiles end at PTX, whatever it asks for, and none is stored."""
    from tilelang.cache.cuda_binary_cache import CUDABinaryCache
    from tilelang.contrib import nvcc

    compile_cuda = nvcc.compile_cuda

    def to_ptx(code: str, _format: str, arch: object, **options: object) -> bytearray:
        _texts[code] = bytes(text := compile_cuda(code, "ptx", arch, **options)).decode()
        return text

    with (
        mock.patch.object(nvcc, "compile_cuda", to_ptx),
        mock.patch.object(CUDABinaryCache, "load", staticmethod(lambda *_: None)),
        mock.patch.object(CUDABinaryCache, "save", staticmethod(lambda *_: None)),
    ):
        yield


def without_cubin() -> AbstractContextManager[None]:
    """Inside, TileLang compiles kernels without their cubin, which no launch here loads, unless they are kept."""
    from tilelang import env

    return nullcontext() if env.is_cache_enabled() else _compiling_to_ptx()


def ptx_of(kernel: object) -> str:
    """The PTX of a compiled TileLang kernel: its CUDA source through nvcc, options as TileLang passes them."""
    from tilelang.cuda import backend

    code = kernel.get_kernel_source()
    if code not in _texts:
        with kernel.target, _compiling_to_ptx():
            backend.tilelang_callback_cuda_compile(code, kernel.target, kernel.pass_configs)
    return _texts[code]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


class Recorder:
    """Runs TileLang kernels with the recording driver, and with `run` executes each launch at once.

    `options` are those of `Launch.run` and `Machine`: resident, policy, observer, limit, strict, ptxas.
    """

    def __init__(self, run: bool = True, **options: object) -> None:
        if not _shims:
            raise RuntimeError("call capture_tilelang.prepare() first")
        self.run = run
        self.launches: list[Launch] = []
        self.reports: list = []
        self.options = options
        self.modules: dict[str, tuple[Module, str]] = {}
        self.tensors: list = []
        self.error: BaseException | None = None
        self._hook = _HOOK(self._dispatch)

    def add_ptx(self, text: str) -> None:
        module = parsed(text)
        for name in module.kernels:
            self.modules[name] = (module, text)

    def call(self, kernel: object, tensors: dict[str, torch.Tensor], *arguments: object) -> list[Launch]:
        """Call a TileLang kernel on CPU tensors; `tensors` names all memory that it may touch."""
        import tvm_ffi

        if not getattr(kernel, "ptx_sim_text", None):
            kernel.ptx_sim_text = ptx_of(kernel)
        self.add_ptx(kernel.ptx_sim_text)
        self.tensors = [tensor_entry(name, tensor) for name, tensor in tensors.items() if tensor is not None]
        first, self.error = len(self.launches), None
        for shim in _shims:
            shim.ptx_sim_set_driver_hook(self._hook)
        _keep.append(self._hook)
        values = [tvm_ffi.from_dlpack(CudaView(a)) if isinstance(a, torch.Tensor) else a for a in arguments]
        kernel.adapter.get_exportable_executable()(*values)
        if self.error is not None:
            raise self.error
        return self.launches[first:]

    def _dispatch(self, name: bytes, arguments: object) -> int:
        try:
            getattr(self, "on_" + name.decode(), lambda _: None)(arguments)
        except BaseException as error:  # must not unwind through C; raised again in `call`
            self.error = self.error or error
        return 0

    def on_cuModuleLoadData(self, a: object) -> None:
        ctypes.c_uint64.from_address(a[0]).value = 0x1000

    on_cuModuleLoadDataEx = on_cuModuleLoadData

    def on_cuModuleGetFunction(self, a: object) -> None:
        handle = 0x2000 + len(_names)
        _names[handle] = ctypes.string_at(a[2]).decode()
        ctypes.c_uint64.from_address(a[0]).value = handle

    def on_cuFuncSetAttribute(self, a: object) -> None:
        if a[1] & 0xFFFFFFFF == _NONPORTABLE and a[2] & 0xFFFFFFFF:
            _nonportable.add(a[0])

    def on_cuDeviceGetAttribute(self, a: object) -> None:
        values = {97: 232448, 75: 9, 76: 0, 16: 132, 10: 32, 1: 1024}
        ctypes.c_int32.from_address(a[0]).value = values.get(a[1] & 0xFFFFFFFF, 0)

    on_cudaDeviceGetAttribute = on_cuDeviceGetAttribute

    def on_cuTensorMapEncodeTiled(self, a: object) -> None:
        rank = a[2] & 0xFFFFFFFF
        dims = tuple((ctypes.c_uint64 * rank).from_address(a[4]))
        strides = tuple((ctypes.c_uint64 * (rank - 1)).from_address(a[5])) if rank > 1 else ()
        box = tuple((ctypes.c_uint32 * rank).from_address(a[6]))
        if any(s != 1 for s in (ctypes.c_uint32 * rank).from_address(a[7])) or (a[8] | a[11]) & 0xFFFFFFFF:
            raise NotImplementedError("tensor map with element strides, interleaving or NaN fill")
        data = tensormap.encode(a[3], _TYPES[a[1] & 0xFFFFFFFF], dims, strides, box, _SWIZZLES[a[9] & 0xFFFFFFFF])
        ctypes.memmove(a[0], data, 128)

    def on_cuLaunchKernel(self, a: object) -> None:
        self._launch(a[0], (a[1], a[2], a[3]), (a[4], a[5], a[6]), (1, 1, 1), a[7], a[8])

    def on_cuLaunchKernelEx(self, a: object) -> None:
        config = _LaunchConfig.from_address(a[0])
        cluster = (1, 1, 1)
        for i in range(config.count):
            if config.attributes[i].id == _CLUSTER_DIMENSION:
                cluster = tuple(max(1, v) for v in config.attributes[i].value[:3])
        self._launch(a[1], tuple(config.grid), tuple(config.block), cluster, config.shared_bytes, a[2])

    def _launch(self, function: int, grid: tuple, block: tuple, cluster: tuple, shared: int, pointers: int) -> None:
        name = _names[function]
        module, text = self.modules[name]
        kernel = module.kernels[name]
        params = bytearray(kernel.param_bytes)
        array = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        for i, param in enumerate(kernel.params):
            params[param.offset : param.offset + param.size] = ctypes.string_at(array[i], param.size)
        if cluster == (1, 1, 1) and "reqnctapercluster" in kernel.attributes:
            cluster = (*kernel.attributes["reqnctapercluster"], 1, 1)[:3]
        large = function in _nonportable
        launch = Launch(text, name, grid, block, cluster, shared, bytes(params), list(self.tensors), large)
        self.launches.append(launch)
        dump_if_asked(launch)
        if self.run and self.error is None:
            self.reports.append(launch.run(**self.options))
