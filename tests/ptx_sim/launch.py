"""One recorded kernel launch, and how it is stored in a folder and run."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import assembly, limits
from .machine import Machine, Report
from .memory import GlobalMemory
from .parser import Module, PtxError, parse
from .translate import Program

_PARSED: dict[str, Module] = {}
# Programs, the last ones used last: of a large kernel some 4 MB each.
_TRANSLATED: dict[tuple[str, str], Program] = {}
KEPT = 128


def parsed(text: str) -> Module:
    """The module of a PTX text, which is parsed once."""
    key = _digest(text)
    module = _PARSED.get(key)
    if module is None:
        module = _PARSED[key] = parse(text)
    return module


def _digest(text: str) -> str:
    """The sha256 of a PTX text without its debug sections and the names of source files: nvcc's are temporary."""
    code = text.rstrip("\0").partition("\t.section\t.debug")[0]
    return hashlib.sha256(re.sub(r"(?m)^\t\.file\t.*\n", "", code).encode()).hexdigest()


@dataclass
class Launch:
    """What a GPU launch would use: PTX text, entry name, geometry, dynamic shared bytes and parameter bytes.

    `tensors` names the memory the kernel may touch: (name, address, bytes, owner that keeps it alive).
    """

    ptx: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    params: bytes
    tensors: list = field(default_factory=list)
    # The function attribute NonPortableClusterSizeAllowed: clusters of up to 16 CTAs.
    nonportable_cluster: bool = False

    @property
    def sha256(self) -> str:
        return _digest(self.ptx)

    def memory(self) -> GlobalMemory:
        memory = GlobalMemory()
        for name, address, size, owner in self.tensors:
            if size:
                memory.add(name, address, size, owner)
        return memory

    def program(self, memory: GlobalMemory) -> Program:
        """The kernel translated, once unless it has global variables: those lie in `memory`."""
        # Emitters register themselves on import.
        from . import opcodes  # noqa: F401

        module, key = parsed(self.ptx), (self.sha256, self.kernel)
        kernel = module.kernels.get(self.kernel)
        if kernel is None:
            raise PtxError(f"no entry {self.kernel!r} in the PTX; there are {sorted(module.kernels)}")
        program = _TRANSLATED.pop(key, None) or Program(module, kernel, memory)
        if not program.has_globals:
            _TRANSLATED[key] = program
            if len(_TRANSLATED) > KEPT:
                del _TRANSLATED[next(iter(_TRANSLATED))]
        program = program.for_launch(self)
        limits.check(self, module, kernel, program.static_shared)
        return program

    def run(self, ptxas: bool = False, **options: object) -> Report:
        """Execute the launch on the tensors' own memory. `ptxas` assembles the PTX first, where ptxas is on PATH.

        The other options are those of `Machine`: resident, policy, observer, limit, strict.
        """
        if ptxas:
            assembly.assemble(self.ptx)
        memory = self.memory()
        machine = Machine(self.program(memory), self, memory, **options)
        return machine.run()

    def save(self, folder: Path) -> None:
        """Write PTX, geometry, parameters and tensor contents, so that `python -m tests.ptx_sim run` can replay it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.ptx").write_text(self.ptx.rstrip("\0"))
        (folder / "params.bin").write_bytes(self.params)
        memory = self.memory()
        tensors = []
        for i, item in enumerate(memory.allocations()):
            memory.bytes_at(item.base, item.size).tofile(folder / f"tensor{i}.bin")
            tensors.append({"name": item.name, "address": item.base, "size": item.size, "file": f"tensor{i}.bin"})
        meta = {
            "kernel": self.kernel,
            "grid": self.grid,
            "block": self.block,
            "cluster": self.cluster,
            "shared_bytes": self.shared_bytes,
            "nonportable_cluster": self.nonportable_cluster,
            "sha256": self.sha256,
            "tensors": tensors,
        }
        (folder / "launch.json").write_text(json.dumps(meta, indent=1) + "\n")

    @staticmethod
    def load(folder: Path) -> Launch:
        """Read a saved launch; tensors get new addresses, and pointers to them in the parameters are rewritten."""
        meta = json.loads((folder / "launch.json").read_text())
        params = bytearray((folder / "params.bin").read_bytes())
        tensors = []
        moves = []
        for item in meta["tensors"]:
            data = np.fromfile(folder / item["file"], np.uint8)
            backing = np.zeros(len(data) + 4096, np.uint8)
            start = (item["address"] - backing.ctypes.data) % 1024
            array = backing[start : start + len(data)]
            array[:] = data
            moves.append((item["address"], item["size"], array.ctypes.data))
            tensors.append((item["name"], array.ctypes.data, len(data), backing))
        for at in range(0, len(params) - 7, 8):
            value = int.from_bytes(params[at : at + 8], "little")
            for old, size, new in moves:
                if old <= value < old + size:
                    params[at : at + 8] = (value - old + new).to_bytes(8, "little")
                    break
        return Launch(
            (folder / "kernel.ptx").read_text(),
            meta["kernel"],
            tuple(meta["grid"]),
            tuple(meta["block"]),
            tuple(meta["cluster"]),
            meta["shared_bytes"],
            bytes(params),
            tensors,
            meta.get("nonportable_cluster", False),
        )


def dump_if_asked(launch: Launch) -> None:
    """Save a recorded launch under $PTX_SIM_DUMP, if that is set."""
    folder = os.environ.get("PTX_SIM_DUMP")
    if folder:
        root = Path(folder)
        number = len(list(root.glob("*/launch.json"))) if root.exists() else 0
        launch.save(root / f"{number:03d}")


def tensor_entry(name: str, tensor: object) -> tuple:
    """(name, address, bytes, owner) of a torch tensor or numpy array, by its whole storage extent."""
    if isinstance(tensor, np.ndarray):
        return name, tensor.ctypes.data, tensor.nbytes, tensor
    if tensor.numel() == 0:
        return name, tensor.data_ptr(), 0, tensor
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return name, tensor.data_ptr(), extent * tensor.element_size(), tensor
