"""What one PTX instruction costs an SM: class, pipe occupancy, latency, registers read and written.

PTX stands in for the machine code, less what ptxas removes: moves, constant loads and address-space casts; integer
instructions whose operands never change after the kernel's start (ptxas hoists or folds them); and repetitions of an
expression (common subexpressions). 64-bit integer instructions cost two slots, everything else one.
"""

from __future__ import annotations

from dataclasses import dataclass

from .parser import SIZES, Addr, Instr, Not, Pair, Reg, Vec
from .rates import OCCUPANCY, Chip

FREE = ("mov", "cvta", "mapa", "createpolicy", "prefetch", "prefetchu", "griddepcontrol", "pmevent", "getctarank")
MATRIX = ("wgmma.mma_async", "tcgen05.mma", "tcgen05.cp", "tcgen05.commit", "wgmma.commit", "wgmma.fence", "wgmma.wait")
COPY = ("cp.", "st.async", "red.async", "st.bulk")
ORDER = ("bar", "barrier", "mbarrier", "fence", "membar", "elect", "setmaxnreg", "nanosleep", "clusterlaunchcontrol")
INTEGER = ("add", "sub", "min", "max", "abs", "neg", "and", "or", "xor", "not", "shl", "shr", "shf", "lop3", "prmt")
INTEGER += ("bfe", "bfi", "bfind", "brev", "clz", "popc", "selp", "set", "setp", "slct", "sad", "testp", "dp4a", "bmsk")
SPECIAL = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div", "rem")
# Classes whose results depend on their operands only; activemask changes by itself.
PURE = ("integer", "multiply", "move", "convert", "special", "fp32", "half")
IMPURE = ("activemask",)
# Instructions that write no register, besides stores.
NO_RESULT = ("st", "red", "bra", "bar", "barrier", "fence", "membar", "cp", "ret", "exit", "trap", "nanosleep", "wgmma")


@dataclass(frozen=True, slots=True)
class Cost:
    """`kind` is the class that counters report; `action` names what the replay has to do beside issuing it."""

    index: int
    kind: str
    slots: float
    pipe: str
    occupancy: float
    latency: float
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    action: str = ""
    size: int = 0
    load: bool = False
    issues: bool = False


def space_of(instr: Instr) -> str:
    for part in instr.parts[1:]:
        if part in ("global", "local", "const"):
            return part
        if part.startswith(("shared", "param")):
            return part.split("::")[0]
    return "global"


def element_of(instr: Instr) -> str:
    """The last type suffix, or nothing."""
    return instr.types[-1] if instr.types else ""


def kind_of(instr: Instr) -> str:
    """The class of an instruction, by which counters are kept."""
    op, base = instr.op, instr.base
    if op.startswith(MATRIX):
        return "matrix issue"
    if op.startswith(COPY):
        return "copy issue"
    if base == "tcgen05":
        return "tensor memory" if instr.parts[1] in ("ld", "st") else "order"
    if base in ORDER:
        return "order"
    if base in ("ld", "ldu", "st", "ldmatrix", "stmatrix"):
        space = "shared" if "matrix" in base else space_of(instr)
        return "move" if space in ("param", "const") else f"{space} memory"
    if base in ("atom", "red"):
        return "reduction" if space_of(instr) == "global" else "shared memory"
    if base in FREE:
        return "move"
    if base in ("bra", "brx", "ret", "exit", "trap", "call"):
        return "control"
    if base in ("shfl", "vote", "redux", "match", "activemask", "movmatrix"):
        return "shuffle"
    if base in SPECIAL:
        return "special"
    kind = element_of(instr)
    if base == "cvt":
        return "move" if set(instr.types) <= {"u32", "u64", "s32"} else "convert"
    if kind == "f64":
        return "double"
    if kind == "f32x2":
        return "fp32x2"
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return "half"
    if kind == "f32" and base in ("add", "sub", "mul", "fma", "mad"):
        return "fp32"
    if base in ("mul", "mad", "fma"):
        return "multiply"
    return "integer"


def _registers(operand: object, names: dict[str, int]) -> list[int]:
    if isinstance(operand, Reg):
        return [names.setdefault(operand.name, len(names))]
    if isinstance(operand, Not):
        return _registers(operand.reg, names)
    if isinstance(operand, Vec):
        return [r for item in operand.items for r in _registers(item, names)]
    if isinstance(operand, Pair):
        return _registers(operand.first, names) + _registers(operand.second, names)
    if isinstance(operand, Addr):
        found = _registers(operand.base, names)
        return found + [r for item in operand.coords for r in _registers(item, names)]
    return []


def _writes(instr: Instr) -> bool:
    if instr.base in NO_RESULT or not instr.operands:
        return False
    if instr.base == "tcgen05":
        return instr.parts[1] == "ld"
    if instr.base == "mbarrier":
        return not isinstance(instr.operands[0], Addr)
    return True


def _action(instr: Instr, kind: str) -> str:
    op = instr.op
    if kind == "shared memory":
        return "remote store" if instr.base == "st" and "shared::cluster" in instr.parts else "shared"
    if kind == "reduction":
        return "reduce"
    if kind == "global memory":
        return "load" if instr.base in ("ld", "ldu") else "store"
    if kind == "tensor memory":
        return f"tmem {instr.parts[1]}"
    if op.startswith("tcgen05.wait"):
        return "tmem wait"
    if op.startswith("fence.proxy"):
        return "proxy fence"
    if op.startswith("cp.async.c"):
        return "cp.async"
    return ""


def _tmem_registers(instr: Instr) -> int:
    count = int(next(p for p in instr.parts if p[0] == "x" and p[1:].isdigit())[1:])
    shape = next(p for p in instr.parts if p[:2] in ("16", "32") and "x" in p)
    return count * {"16x128b": 2, "16x256b": 4}.get(shape, 1)


def _key(operand: object, values: dict[str, object]) -> object:
    """A name for the value of an operand: equal names, equal values."""
    if isinstance(operand, Reg):
        return values.get(operand.name, operand.name)
    if isinstance(operand, Not):
        return ("not", _key(operand.reg, values))
    if isinstance(operand, Vec):
        return tuple(_key(item, values) for item in operand.items)
    if isinstance(operand, Addr):
        return ("address", _key(operand.base, values), operand.offset)
    return operand


def removable(code: list[Instr]) -> set[int]:
    """Instructions that cost nothing when executed again: invariant ones and common subexpressions.

    PTX is in static single assignment form but for loop variables, which have several definitions and never count as
    invariant. An expression pays where it stands first in the code.
    """
    definitions: dict[str, int] = {}
    for instr in code:
        if _writes(instr):
            for name in _names(instr.operands[0]):
                definitions[name] = definitions.get(name, 0) + 1
    values: dict[str, object] = {}
    invariant: set[str] = set()
    # Expressions by number, so that a name of a value stays small.
    numbers: dict[object, int] = {}
    free: set[int] = set()
    for instr in code:
        if not _writes(instr) or instr.guard is not None or kind_of(instr) not in PURE or instr.op.startswith(IMPURE):
            continue
        targets = _names(instr.operands[0])
        if any(definitions[name] > 1 for name in targets):
            continue
        sources = [name for operand in instr.operands[1:] for name in _names(operand)]
        key = (instr.op, *(_key(operand, values) for operand in instr.operands[1:]))
        known = key in numbers
        number = numbers.setdefault(key, len(numbers))
        for place, name in enumerate(targets):
            values[name] = (place, number)
        if all(name in invariant for name in sources):
            invariant.update(targets)
            free.add(instr.index)
        elif known:
            free.add(instr.index)
    return free


def _names(operand: object) -> list[str]:
    found: dict[str, int] = {}
    _registers(operand, found)
    return list(found)


def cost_of(instr: Instr, chip: Chip, names: dict[str, int], free: bool = False) -> Cost:
    """`names` numbers the registers of a kernel and grows; `free` says that ptxas removes the instruction."""
    kind = "move" if free else kind_of(instr)
    operands = list(instr.operands)
    targets = _registers(operands.pop(0), names) if _writes(instr) else []
    sources = [r for operand in operands for r in _registers(operand, names)]
    if instr.op.startswith("wgmma.mma_async"):
        # The accumulators are read and written asynchronously; wait_group orders their readers.
        sources = [r for operand in operands[1:3] for r in _registers(operand, names)]
    if instr.guard is not None:
        sources += _registers(instr.guard[0], names)
    wide = element_of(instr) in ("s64", "u64", "b64") and kind == "integer"
    slots = (0.0 if kind == "move" else 2.0 if wide else 1.0) / chip["issue"]
    pipe = kind if kind in OCCUPANCY else ""
    occupancy = OCCUPANCY[kind].value * (2 if wide else 1) / chip["issue"] if pipe else 0.0
    latency = chip.latency.get(kind, chip.latency["integer"])
    if instr.base in ("setp", "set"):
        latency = chip.latency["predicate"]
    if kind == "move":
        latency = 0
    elif kind == "shared memory":
        latency = chip.latency["shared"]
    elif kind in ("global memory", "reduction"):
        latency = chip["l2_latency"]
    elif kind == "tensor memory":
        latency = chip["tmem_latency"]
    size = _tmem_registers(instr) if kind == "tensor memory" else SIZES.get(element_of(instr), 4)
    return Cost(
        instr.index,
        kind,
        slots,
        "integer" if pipe == "multiply" else pipe,
        occupancy,
        latency,
        tuple(sources),
        tuple(targets),
        _action(instr, kind),
        size,
        instr.base in ("ld", "ldu", "ldmatrix"),
        kind in ("copy issue", "matrix issue", "order"),
    )


def costs_of(code: list[Instr], chip: Chip) -> tuple[list[Cost], int]:
    """The cost of every instruction of a kernel, and the number of registers."""
    names: dict[str, int] = {}
    free = removable(code)
    costs = [cost_of(instr, chip, names, instr.index in free) for instr in code]
    return costs, len(names)
