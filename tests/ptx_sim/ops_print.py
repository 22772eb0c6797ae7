"""Calls of `vprintf` (cute.printf, printf): formatted per lane, printed at once and kept in the report.

The second argument points to the values as a C struct, doubles and 64-bit integers aligned to 8 bytes (CUDA
programming guide, formatted output; System V ABI layout).
"""

from __future__ import annotations

import re
import sys

import numpy as np

from .access import load, store
from .machine import Split
from .memory import LOCAL_WINDOW, SHARED_WINDOW, SimError
from .parser import Instr, PtxError, Sym, Vec
from .translate import Emit, op

_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|j|z|t)?([diouxXeEfFgGaAcspn%])")
_WIDE = ("l", "ll", "j", "z", "t")
_LONGEST = 1 << 16


def _bytes(split: Split, lane: int, address: int, size: int) -> bytes:
    """Memory at one lane's generic address."""
    if address < SHARED_WINDOW:
        return split.machine.memory.bytes_at(address, size).tobytes()
    if address < LOCAL_WINDOW:
        return split.cta.cluster.shared.bytes_at(address - SHARED_WINDOW, size).tobytes()
    return split.warp.local[lane, address - LOCAL_WINDOW :][:size].tobytes()


def _text(split: Split, lane: int, address: int) -> str:
    """A NUL-terminated string."""
    out = bytearray()
    while len(out) < _LONGEST:
        byte = _bytes(split, lane, address + len(out), 1)
        if byte == b"\0":
            return out.decode(errors="replace")
        out += byte
    raise SimError(f"printf string without an end at 0x{address:x}")


class _Values:
    """Reads the argument struct of one lane, in order."""

    def __init__(self, split: Split, lane: int, address: int) -> None:
        self.split, self.lane, self.address, self.offset = split, lane, address, 0

    def take(self, size: int) -> bytes:
        start = -(-self.offset // size) * size
        self.offset = start + size
        return _bytes(self.split, self.lane, self.address + start, size)

    def integer(self, size: int, signed: bool) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def convert(self, match: re.Match) -> str:
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        width, precision = (self.integer(4, True) if p == "*" else p for p in (width, precision))
        head = f"%{flags}{'' if width is None else width}{'' if precision is None else f'.{precision}'}"
        if kind in "eEfFgGaA":
            value = float(np.frombuffer(self.take(8), np.float64)[0])
            return value.hex() if kind in "aA" else f"{head}{kind}" % value
        if kind == "s":
            return f"{head}s" % _text(self.split, self.lane, self.integer(8, False))
        if kind == "p":
            return f"{head}s" % hex(self.integer(8, False))
        value = self.integer(8 if length in _WIDE else 4, kind in "di")
        if length in ("h", "hh"):
            bits = 16 if length == "h" else 8
            value = (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) if kind in "di" else value % (1 << bits)
        return f"{head}c" % (value & 255) if kind == "c" else f"{head}{'d' if kind == 'u' else kind}" % value


def _print(split: Split, mask: np.ndarray, index: int, text: np.ndarray, values: np.ndarray) -> None:
    for lane in np.flatnonzero(mask).tolist():
        reader = _Values(split, lane, int(values[lane]))
        line = _CONVERSION.sub(reader.convert, _text(split, lane, int(text[lane])))
        split.machine.report.printed.append(line)
        sys.stdout.write(line)


@op("call")
def call(emit: Emit, instr: Instr) -> None:
    callee = next((o.name for o in instr.operands if isinstance(o, Sym)), "?")
    arguments = instr.operands[-1]
    if callee != "vprintf" or not isinstance(arguments, Vec) or len(arguments.items) != 2:
        raise PtxError(f"call of {callee}: device functions that are not inlined are not modelled")
    places = [emit.program.symbol(emit, item, "u64") for item in arguments.items]
    emit.call(_print, *(emit.value(load, place, "8", repr("local")) for place in places))
    for result in instr.operands[0].items if isinstance(instr.operands[0], Vec) else ():
        # The number of values printed; no compiler output that was met reads it.
        place = emit.program.symbol(emit, result, "u64")
        emit.call(store, place, "4", repr("local"), "np.zeros(32, np_u32)")
