"""Judge the simulator by a Hopper GPU.

`python -m tests.ptx_sim judge RESULTS.npz --device` runs every micro-kernel of `judge_cases` on the GPU and stores the
outputs (it needs numpy and libcuda only; ptxas if it is on PATH, else the driver compiles the PTX). Without `--device`
the same kernels run in the simulator, are compared with the file, and `judged_forms.json` is written.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from . import coverage, tensormap
from .judge_cases import Case, cases
from .launch import Launch, tensor_entry
from .memory import SimError
from .parser import PtxError
from .testing import ptx

RESULTS = Path(__file__).with_name("judged_h200.npz")
_TYPES = {"u16": 1, "u32": 2, "f16": 6, "f32": 7, "bf16": 9}
_SPANS = {0: 0, 32: 1, 64: 2, 128: 3}


def text_of(case: Case) -> str:
    return ptx(case.body, len(case.arrays), "sm_90a").replace(".version 8.8", ".version 8.3")


def key_of(case: Case) -> str:
    """Identifies a case's program and inputs, so that a stale result is not compared."""
    digest = hashlib.sha256(text_of(case).encode())
    for name, array in case.arrays.items():
        if name not in case.maps:
            digest.update(array.tobytes())
    return digest.hexdigest()[:16]


# On the GPU -----------------------------------------------------------------------------------------------------------


class Gpu:
    """The few driver calls that a launch needs."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.check("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.check("cuDeviceGet", ctypes.byref(device), 0)
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.check("cuCtxSetCurrent", context)

    def check(self, name: str, *arguments: object) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {status} {text.value}")

    def upload(self, array: np.ndarray) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 16)))
        self.check("cuMemcpyHtoD_v2", address, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        return address

    def encode(self, address: int, array: np.ndarray, element: str, box: tuple, swizzle: int) -> np.ndarray:
        rank = array.ndim
        raw = np.zeros(192, np.uint8)
        start = -raw.ctypes.data % 64
        out = raw[start : start + 128]
        dims = (ctypes.c_uint64 * rank)(*array.shape[::-1])
        strides = (ctypes.c_uint64 * max(rank - 1, 1))(*array.strides[::-1][1:])
        self.check(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(out.ctypes.data),
            _TYPES[element],
            rank,
            ctypes.c_void_p(address),
            dims,
            strides,
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _SPANS[swizzle],
            0,
            0,
        )
        return out

    def run(self, case: Case) -> dict[str, np.ndarray]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check("cuModuleLoadData", ctypes.byref(module), image_of(text_of(case)))
        self.check("cuModuleGetFunction", ctypes.byref(function), module, b"kernel")
        self.check("cuFuncSetAttribute", function, 8, case.shared)
        pointers = {name: self.upload(a) for name, a in case.arrays.items() if name not in case.maps}
        found = {}
        for name, (array, element, box, swizzle) in case.maps.items():
            data = self.encode(pointers[array].value, case.arrays[array], element, box, swizzle)
            found[f"{name} descriptor"] = data.copy()
            found[f"{name} address"] = np.array([pointers[array].value], np.uint64)
            pointers[name] = self.upload(data)
        values = [pointers[name] for name in case.arrays]
        arguments = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        self.launch(function, case, arguments)
        self.check("cuCtxSynchronize")
        for name in case.outputs:
            out = np.empty_like(case.arrays[name])
            self.check("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), pointers[name], ctypes.c_size_t(out.nbytes))
            found[name] = out
        for pointer in pointers.values():
            self.check("cuMemFree_v2", pointer)
        self.check("cuModuleUnload", module)
        return found

    def launch(self, function: ctypes.c_void_p, case: Case, arguments: object) -> None:
        class Attribute(ctypes.Structure):
            _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))

        class Config(ctypes.Structure):
            _fields_ = (
                ("grid", ctypes.c_uint32 * 3),
                ("block", ctypes.c_uint32 * 3),
                ("shared", ctypes.c_uint32),
                ("stream", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p),
                ("count", ctypes.c_uint32),
            )

        attribute = Attribute(4, 0, (ctypes.c_uint32 * 16)(case.cluster, 1, 1))
        config = Config(
            (ctypes.c_uint32 * 3)(case.grid, 1, 1),
            (ctypes.c_uint32 * 3)(case.block, 1, 1),
            case.shared,
            None,
            ctypes.addressof(attribute),
            1,
        )
        self.check("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None)


def image_of(text: str) -> bytes:
    """A cubin by ptxas when there is one, else the PTX for the driver to compile."""
    if shutil.which("ptxas") is None:
        return text.encode() + b"\0"
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(text)
        subprocess.run(["ptxas", "-arch=sm_90a", str(source), "-o", str(target)], check=True)
        return target.read_bytes()


def run_on_device(path: Path) -> int:
    gpu = Gpu()
    results, failed = {}, 0
    for case in cases():
        try:
            found = gpu.run(case)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{case.name}: {error}")
            failed += 1
            continue
        key = key_of(case)
        results |= {f"{case.name}|{key}|{name}": value for name, value in found.items()}
    np.savez_compressed(path, **results)
    print(f"{len(results)} results, {failed} cases failed, {path.stat().st_size} bytes")
    return int(failed > 0)


# In the simulator -----------------------------------------------------------------------------------------------------


def launch_of(case: Case) -> Launch:
    for name, (array, element, box, swizzle) in case.maps.items():
        a = case.arrays[array]
        data = tensormap.encode(a.ctypes.data, element, a.shape[::-1], a.strides[::-1][1:], box, swizzle)
        case.arrays[name][:] = np.frombuffer(data, np.uint8)
    params = b"".join(a.ctypes.data.to_bytes(8, "little") for a in case.arrays.values())
    return Launch(
        text_of(case),
        "kernel",
        (case.grid, 1, 1),
        (case.block, 1, 1),
        (case.cluster, 1, 1),
        case.shared,
        params,
        [tensor_entry(name, a) for name, a in case.arrays.items()],
    )


def simulate(case: Case) -> tuple[dict[str, np.ndarray], list[str]]:
    """Outputs and executed forms of a case, in the simulator."""
    report = launch_of(case).run(resident=4)
    return {name: case.arrays[name] for name in case.outputs}, coverage.executed_forms(report)


def differs(got: np.ndarray, want: np.ndarray, check: object) -> str | None:
    """How simulated values differ from the judge's, or None."""
    if check == "bits":
        wrong = got.view(f"u{got.itemsize}") != want.view(f"u{want.itemsize}")
    elif check == "float":
        values = [x.view(f"f{x.itemsize}") for x in (got, want)]
        wrong = (got.view(f"u{got.itemsize}") != want.view(f"u{want.itemsize}")) & ~(
            np.isnan(values[0]) & np.isnan(values[1])
        )
    elif check in ("f16", "bf16"):
        # Packed halves: any NaN equals any NaN, half by half.
        halves = [x.view(np.uint16) for x in (got, want)]
        infinity = 0x7C00 if check == "f16" else 0x7F80
        wrong = (halves[0] != halves[1]) & ~(((halves[0] & 0x7FFF) > infinity) & ((halves[1] & 0x7FFF) > infinity))
    else:
        kind, bound = check
        a, b = (x.view(np.float32).astype(np.float64) for x in (got, want))
        scale = np.spacing(np.abs(b).astype(np.float32)).astype(np.float64) if kind == "ulp" else 1.0
        wrong = ~(np.abs(a - b) <= bound * scale) & ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not wrong.any():
        return None
    at = int(np.flatnonzero(wrong.reshape(-1))[0]) * got.size // wrong.size
    values = got.reshape(-1)[at], want.reshape(-1)[at]
    return f"{int(wrong.sum())} of {wrong.size} differ, first {at}: {values[0]!r}, judge {values[1]!r}"


def compare(case: Case, results: dict) -> tuple[str | None, list[str]]:
    """(what differs or None, executed forms)."""
    key = key_of(case)
    wanted = {name: results.get(f"{case.name}|{key}|{name}") for name in case.outputs}
    if any(value is None for value in wanted.values()):
        return "no result for this version of the case", []
    try:
        found, forms = simulate(case)
    except (SimError, PtxError) as error:
        return f"simulation failed: {error}", []
    for name, want in wanted.items():
        problem = differs(found[name], want, case.check)
        if problem:
            return f"{name}: {problem}", forms
    for name in case.maps:
        ours = tensormap.decode(case.arrays[name].tobytes())
        theirs = tensormap.decode(results[f"{case.name}|{key}|{name} descriptor"].tobytes())
        for part in ("element", "dims", "strides", "box", "swizzle"):
            if getattr(ours, part) != getattr(theirs, part):
                return f"tensor map {part}: {getattr(ours, part)}, judge {getattr(theirs, part)}", forms
    return None, forms


def main(args: argparse.Namespace) -> int:
    if args.device:
        return run_on_device(args.file)
    if not args.file.exists():
        sys.exit(f"{args.file} does not exist: run with --device on a Hopper GPU first")
    results = dict(np.load(args.file))
    judged: dict[str, dict] = {}
    failed = 0
    for case in cases():
        problem, forms = compare(case, results)
        if problem:
            failed += 1
            print(f"{case.name}: {problem}")
        else:
            entry = judged.setdefault(f"H200 {case.family}", {"forms": []})
            entry["forms"] = sorted(set(entry["forms"]) | set(forms))
    coverage.JUDGED.write_text(json.dumps(judged, indent=0, sort_keys=True) + "\n")
    print(f"{failed} cases differ; judged forms: {sum(len(e['forms']) for e in judged.values())}")
    return int(failed > 0)
