"""PTX kernel -> Python functions, one per basic block and mask mode, compiled once per kernel.

A register is a row of a per-warp array: u16, u32 or u64 by 32 lanes (bool for predicates), with signed and float
views of the same bytes. Block functions find them as globals: `r5` is %r5 as u32, `r5i` as s32, `r5f` as f32, `d` is
64 bits wide, `h` 16, `p` a predicate, `q` 128 (two 64-bit rows). The code is generated twice: for a full warp, where
every operation is one numpy call into the destination row, and for a partial mask `M`.

Instruction families register emitters in OPCODES by opcode prefix; the longest matching prefix wins.
"""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from . import assembly
from .machine import ALL_BYTES, FULL, LANES, NONE_BYTES, Warp
from .memory import LOCAL_WINDOW, POISON, POISON_HALF, SHARED_RESERVED, GlobalMemory
from .parser import SIZES, Addr, Imm, Instr, Kernel, Module, Not, Pair, PtxError, Reg, Sink, Special, Sym, Vec

Emitter = Callable[["Emit", Instr], None]
OPCODES: dict[str, Emitter] = {}
BLOCKING: set[str] = set()

DTYPES = {
    "u8": np.uint8,
    "s8": np.int8,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "pred": np.bool_,
}
# PTX type -> the array view it is computed in.
VIEWS = {
    "b8": "u8",
    "u8": "u8",
    "s8": "s8",
    "b16": "u16",
    "u16": "u16",
    "s16": "s16",
    "f16": "f16",
    "bf16": "u16",
    "b32": "u32",
    "u32": "u32",
    "s32": "s32",
    "f32": "f32",
    "f16x2": "u32",
    "bf16x2": "u32",
    "tf32": "u32",
    "b64": "u64",
    "u64": "u64",
    "s64": "s64",
    "f64": "f64",
    "pred": "pred",
    "f32x2": "u64",
    "u16x2": "u32",
    "s16x2": "u32",
}
_REG_CLASS = {
    "pred": "p",
    "b8": "h",
    "u8": "h",
    "s8": "h",
    "b16": "h",
    "u16": "h",
    "s16": "h",
    "f16": "h",
    "bf16": "h",
    "b32": "r",
    "u32": "r",
    "s32": "r",
    "f32": "r",
    "f16x2": "r",
    "bf16x2": "r",
    "b64": "d",
    "u64": "d",
    "s64": "d",
    "f64": "d",
    "b128": "q",
}
_WIDTH = {"p": 1, "h": 16, "r": 32, "d": 64, "q": 128}
_SUFFIX = {"u": "", "s": "i", "f": "f"}


def op(*names: str, blocking: bool = False) -> Callable[[Emitter], Emitter]:
    """Register an emitter for opcode prefixes. Blocking instructions start a basic block of their own."""

    def register(function: Emitter) -> Emitter:
        for name in names:
            OPCODES[name] = function
            if blocking:
                BLOCKING.add(name)
        return function

    return register


# Legal forms whose modifiers the emitters would drop, or whose rounding or range they do not reproduce: refused, since
# a wrong value is worse than none. Model one, judge it, and take it out.
UNMODELLED = re.compile(
    r"mul24\.|mad24\.|cvt\.pack\.|mad\.(lo|hi)\.cc\.|mad\.hi\.sat\."
    r"|cvt\.(?!rn\.relu\.bf16x2\.f32).*\.relu\.|cvt\..*\.satfinite\.(f16|f16x2|bf16x2)\."
    r"|cvt\.r[nzmp]i\.(.*\.)?(f16\.f16|bf16\.bf16|f64\.f64)$|(rcp|sqrt)\.r[zmp]\."
    r"|set(p)?\..*\.(f16x2|bf16x2)|cvt\.(.*\.)?sat\.[us](32|64)\.u64$|cvt\.r[mp]\.(f16|bf16)\.f32"
    r"|cvt\.(.*\.)?sat\.(f16|f16x2)\.|(add|sub|mul|fma)\.(.*\.)?sat\.(f16|f16x2)$"
    r"|cvt\.r[zmp]\.f32\.[us]64$|cvt\.\w+\.(f16|bf16)\.([us](32|64)|f64)$"
    r"|cvt\.(.*\.)?satfinite\.tf32\.|cvt\.rs\.|cp\.async\.bulk\.(?!tensor).*\.(cp_mask|ignore_oob)|tcgen05\.mma\..*\.ashift"
)


def lookup(instr: Instr) -> tuple[str, Emitter]:
    if UNMODELLED.match(instr.op):
        raise PtxError(f"unmodelled form {instr.op}\n  at line {instr.line}: {instr.text}")
    parts = instr.parts
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in OPCODES:
            return name, OPCODES[name]
    raise PtxError(f"unknown opcode {instr.op}\n  at line {instr.line}: {instr.text}")


@dataclass(slots=True)
class Block:
    """A basic block: instructions [first, last) and where it goes. `rpc` is its immediate post-dominator."""

    first: int
    last: int
    targets: tuple = ()
    rpc: int = -1


class Emit:
    """Generates the source of one block in one mask mode; the helpers below are what emitters use."""

    def __init__(self, program: Program, full: bool) -> None:
        self.program = program
        self.full = full
        self.lines: list[str] = []
        self.origin: list[int] = []
        self.instr: Instr | None = None
        self.where: str | None = None
        self.temps = 0

    def line(self, text: str) -> None:
        self.lines.append("    " + text)
        self.origin.append(self.instr.index)

    def temp(self, expression: str) -> str:
        self.temps += 1
        name = f"t{self.temps}"
        self.line(f"{name} = {expression}")
        return name

    def begin(self, instr: Instr) -> None:
        """Set the lane mask of an instruction from the mode and its guard predicate."""
        self.instr = instr
        guard = None
        if instr.guard is not None:
            register, negated = instr.guard
            guard = self.src(register, "pred")
            if negated:
                guard = f"~{guard}"
        if self.full:
            self.where = self.temp(guard) if guard and guard.startswith("~") else guard
        else:
            self.where = self.temp(f"{guard} & M") if guard else "M"

    @property
    def mask(self) -> str:
        """The mask as an array expression, for calls."""
        return self.where or "FULL"

    # Operands ---------------------------------------------------------------------------------------------------

    def name(self, reg: Reg, kind: str = "u") -> str:
        cls, index = self.program.registers[reg.name]
        return f"{cls}{index}" if cls in "pq" else f"{cls}{index}{_SUFFIX[kind]}"

    def width(self, operand: object) -> int:
        return _WIDTH[self.program.registers[operand.name][0]]

    def src(self, operand: object, dtype: str) -> str:
        """An array expression of 32 lanes of the given PTX type."""
        view = VIEWS[dtype]
        if isinstance(operand, Reg):
            cls = self.program.registers[operand.name][0]
            if view == "pred":
                return self.name(operand)
            bits = int(view[1:])
            if bits == _WIDTH[cls]:
                return self.name(operand, view[0])
            # PTX lets source registers of ld, st and cvt be wider or narrower than the type.
            return self.temp(f"{self.name(operand)}.astype(np_{'u' + str(bits)}).view(np_{view})")
        if isinstance(operand, Not):
            return f"(~{self.name(operand.reg)})"
        if isinstance(operand, Imm):
            return self.const(operand, view)
        if isinstance(operand, Special):
            return self.program.special(self, operand.name, view)
        if isinstance(operand, Sym):
            return self.program.symbol(self, operand, view)
        if isinstance(operand, Vec) and view == "u64" and len(operand.items) == 2:
            low, high = (self.src(item, "u32") for item in operand.items)
            return self.temp(f"pack64({low}, {high})")
        raise PtxError(f"operand {operand} cannot be a {dtype} source")

    def const(self, imm: Imm, view: str) -> str:
        if view == "pred":
            return self.program.constant(np.full(32, bool(imm.value)))
        dtype = np.dtype(DTYPES[view])
        if view[0] == "f" and imm.is_float:
            value = np.array(imm.value, np.uint64 if imm.bits == 64 else np.uint32)
            value = value.view(np.float64 if imm.bits == 64 else np.float32).astype(dtype)
        elif view[0] == "f":
            value = dtype.type(imm.value)
        else:
            if imm.is_float and imm.bits == 64 and dtype.itemsize < 8:
                raise PtxError(f"a 64-bit floating-point literal cannot be a {view} source")
            bits = imm.value % (1 << (8 * dtype.itemsize))
            if imm.is_float and dtype.itemsize == 2:
                bits = int(np.array(imm.value, np.uint32).view(np.float32).astype(np.float16).view(np.uint16))
            value = np.array(bits, f"u{dtype.itemsize}").view(dtype)
        return self.program.constant(np.full(32, value, dtype))

    def put(self, operand: object, dtype: str, expression: str) -> None:
        """Assign an array expression of the type's view dtype to a destination register."""
        if isinstance(operand, Sink):
            return
        view = VIEWS[dtype]
        if view == "pred":
            target = self.name(operand)
        else:
            width = self.width(operand)
            target = self.name(operand, view[0])
            if width != int(view[1:]):
                # Loads and conversions extend to the register width: signed types with sign, others with zeros.
                target = self.name(operand, "s" if view[0] == "s" else "u")
                if view[0] == "f":
                    expression = f"{expression}.view(np_u{view[1:]})"
        if self.where is None:
            self.line(f"{target}[:] = {expression}")
        else:
            self.line(f"copyto({target}, {expression}, 'unsafe', {self.where})")

    def ufunc(self, function: str, sources: list[str], operand: object, dtype: str, extra: str = "") -> None:
        """One numpy ufunc straight into the destination row."""
        if isinstance(operand, Sink):
            return
        view = VIEWS[dtype]
        target = self.name(operand) if view == "pred" else self.name(operand, view[0])
        where = "" if self.where is None else f", where={self.where}"
        # numpy wants the destination of minimum and maximum by keyword; positional is faster elsewhere.
        target = f"out={target}" if function in ("np_minimum", "np_maximum") else target
        self.line(f"{function}({', '.join(sources)}, {target}{extra}{where})")

    def bind(self, function: object) -> str:
        return self.program.shared_object(function)

    def call(self, function: Callable, *arguments: str) -> None:
        """Call `function(split, mask, instruction index, *arguments)`."""
        self.line(f"{self.bind(function)}(S, {self.mask}, {self.instr.index}{''.join(', ' + a for a in arguments)})")

    def value(self, function: Callable, *arguments: str) -> str:
        return self.temp(
            f"{self.bind(function)}(S, {self.mask}, {self.instr.index}{''.join(', ' + a for a in arguments)})"
        )

    def blocking(self, function: Callable, *arguments: str) -> None:
        """Like call; a true result means the split was parked and must re-run this block when woken."""
        self.line(
            f"if {self.bind(function)}(S, {self.mask}, {self.instr.index}"
            f"{''.join(', ' + a for a in arguments)}): return -1"
        )

    def rows(self, items: tuple) -> str | None:
        """An index into the 32-bit register file that selects these registers: a slice or an array; else None."""
        found = [self.program.registers[i.name] if isinstance(i, Reg) else ("", -1) for i in items]
        if any(cls != "r" for cls, _ in found):
            return None
        first = found[0][1]
        if all(at == first + n for n, (_, at) in enumerate(found)):
            return f"{first}:{first + len(items)}"
        if len({at for _, at in found}) < len(found):
            return None
        return self.program.constant(np.array([at for _, at in found]))

    def address(self, operand: Addr, dtype: str = "") -> str:
        """The per-lane address of [base + offset]; the type follows the base register unless given."""
        base = operand.base
        if isinstance(base, Reg):
            view = dtype or ("u32" if self.width(base) == 32 else "u64")
            expression = self.src(base, view)
            if operand.offset:
                expression = self.temp(f"np_add({expression}, {self.const(Imm(operand.offset), view)})")
            return expression
        if isinstance(base, Sym):
            return self.program.symbol(self, Sym(base.name, base.offset + operand.offset), dtype or "u64")
        if isinstance(base, Imm):
            return self.const(Imm(base.value + operand.offset), dtype or "u64")
        raise PtxError(f"cannot form an address from {operand}")


def _poison(files: Iterable[np.ndarray]) -> None:
    """PTX gives registers no initial values: NaN wherever one is read that nobody wrote. Predicates are false."""
    for rows in files:
        if rows.dtype == bool:
            rows[:] = False
        else:
            rows.view(np.uint16)[:] = POISON_HALF


class Program:
    """A kernel's blocks, compiled code, and how to set up a warp's registers; to run, it is bound to a launch."""

    def __init__(self, module: Module, kernel: Kernel, memory: GlobalMemory) -> None:
        self.module = module
        self.kernel = kernel
        self.launch: object = None
        self.filename = f"<ptx {kernel.name[:40]}>"
        self.code = kernel.body
        for index, instr in enumerate(self.code):
            instr.index = index
        self.registers: dict[str, tuple[str, int]] = {}
        self.counts = {"p": 0, "h": 0, "r": 0, "d": 0, "q": 0}
        for name, kind in kernel.regs.items():
            cls = _REG_CLASS[kind]
            self.registers[name] = (cls, self.counts[cls])
            self.counts[cls] += 1
        self.shared_names: dict[str, object] = {}
        self._constants: dict[tuple, str] = {}
        self._objects: dict[int, str] = {}
        self._specials: dict[str, str] = {}
        self.symbols: dict[str, tuple[str, int]] = {}
        self.shared_variables: list[tuple[int, int, str]] = []
        self.local_size = 0
        self.static_shared = 0
        self._place_variables(memory)
        for instr in self.code:
            lookup(instr)
        assembly.check(module, kernel)
        self.blocks: list[Block] = []
        self.block_of: dict[int, int] = {}
        self._find_blocks()
        self._post_dominators()
        self.block_sizes = [sum(1 for i in self.code[b.first : b.last]) for b in self.blocks]
        self.line_map: dict[int, int] = {}
        self._pool: list[tuple] = []
        self._compile()

    def for_launch(self, launch: object) -> Program:
        """This program for one launch, with a pool of registers of its own."""
        other = copy.copy(self)
        other.launch, other._pool = launch, []
        return other

    @property
    def has_globals(self) -> bool:
        """Whether variables of the kernel or its module lie in global memory, at addresses that the code holds."""
        return any(space == "global" for space, _ in self.symbols.values())

    # Variables and names ------------------------------------------------------------------------------------------

    def _place_variables(self, memory: GlobalMemory) -> None:
        """Static shared memory first, then dynamic (extern) shared memory, both after the reserved first KiB."""
        offset = SHARED_RESERVED
        variables = self.module.variables + self.kernel.variables
        for var in variables:
            if var.space == "shared" and var.size:
                offset = -(-offset // var.align) * var.align
                self.symbols[var.name] = ("shared", offset)
                self.shared_variables.append((offset, var.size, var.name))
                offset += var.size
            elif var.space == "local":
                self.local_size = -(-self.local_size // var.align) * var.align
                self.symbols[var.name] = ("local", self.local_size)
                self.local_size += var.size
            elif var.space in ("global", "const"):
                data = np.zeros(max(var.size, 16), np.uint8)
                if var.init:
                    data[: len(var.init)] = np.frombuffer(var.init, np.uint8)
                memory.add_array(var.name, data)
                self.symbols[var.name] = ("global", data.ctypes.data)
        externs = [v for v in variables if v.space == "shared" and not v.size]
        if externs:
            align = max(v.align for v in externs)
            offset = -(-offset // align) * align
            for var in externs:
                self.symbols[var.name] = ("shared", offset)
                self.shared_variables.append((offset, 1 << 23, var.name))
        self.static_shared = offset - SHARED_RESERVED
        for param in self.kernel.params:
            self.symbols[param.name] = ("param", param.offset)

    def constant(self, array: np.ndarray) -> str:
        key = (array.dtype.str, array.tobytes())
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"k{len(self._constants)}"
            array.flags.writeable = False
            self.shared_names[name] = array
        return name

    def shared_object(self, thing: object) -> str:
        name = self._objects.get(id(thing))
        if name is None:
            name = self._objects[id(thing)] = f"F{len(self._objects)}"
            self.shared_names[name] = thing
        return name

    def special(self, emit: Emit, name: str, view: str) -> str:
        """Special registers that never change are rows of the namespace; clocks are counted per read."""
        if name.startswith(("%clock", "%globaltimer")):
            return emit.temp(f"np.full(32, S.machine.tick(), np_{view})")
        known = name[1:].replace(".", "_")
        self._specials[known] = known
        base = f"s_{known}"
        return base if view in ("u32",) else emit.temp(f"{base}.astype(np_{view})")

    def symbol(self, emit: Emit, sym: Sym, view: str) -> str:
        """The address of a variable: shared ones depend on the CTA, local ones on the lane."""
        if sym.name not in self.symbols:
            raise PtxError(f"unknown symbol {sym.name}")
        space, address = self.symbols[sym.name]
        address += sym.offset
        if space == "shared":
            return emit.temp(f"np.full(32, S.cta.base + {address}, np_{view})")
        if space == "local":
            return emit.const(Imm(address), view)
        if space == "param":
            return emit.temp(f"np.full(32, S.machine.params.ctypes.data + {address}, np_{view})")
        return emit.const(Imm(address), view)

    # Control flow -------------------------------------------------------------------------------------------------

    def _find_blocks(self) -> None:
        code, labels = self.code, self.kernel.labels
        leaders = {0} | {at for at in labels.values() if at < len(code)}
        for i, instr in enumerate(code):
            name, _ = lookup(instr)
            if name in ("bra", "ret", "exit", "trap", "brx.idx"):
                leaders.add(i + 1)
            if name in BLOCKING:
                leaders.add(i)
                if instr.guard is not None:
                    # Lanes whose guard is false may go on at the next block.
                    leaders.add(i + 1)
        starts = sorted(at for at in leaders if at < len(code))
        for n, first in enumerate(starts):
            last = starts[n + 1] if n + 1 < len(starts) else len(code)
            self.block_of[first] = n
            self.blocks.append(Block(first, last))
        for n, block in enumerate(self.blocks):
            final = code[block.last - 1]
            following = n + 1 if n + 1 < len(self.blocks) else -1
            if final.base == "bra":
                target = self.label(final.operands[0].name)
                block.targets = (target,) if final.guard is None else (target, following)
            elif final.base in ("ret", "exit", "trap"):
                block.targets = () if final.guard is None else (following,)
            else:
                block.targets = (following,) if following >= 0 else ()

    def label(self, name: str) -> int:
        at = self.kernel.labels[name]
        return self.block_of.get(at, -1)

    def _post_dominators(self) -> None:
        """Immediate post-dominators by the iterative algorithm on the reversed graph; -1 is the exit."""
        count = len(self.blocks)
        exit_node = count
        succ = [list(b.targets) or [exit_node] for b in self.blocks]
        for n, block in enumerate(self.blocks):
            final = self.code[block.last - 1]
            if final.base in ("ret", "exit", "trap") and final.guard is not None:
                succ[n].append(exit_node)
        preds: list[list[int]] = [[] for _ in range(count + 1)]
        for n, targets in enumerate(succ):
            for target in targets:
                preds[exit_node if target < 0 else target].append(n)
        order, seen, stack = [], {exit_node}, [(exit_node, iter(preds[exit_node]))]
        while stack:
            node, children = stack[-1]
            child = next((c for c in children if c not in seen), None)
            if child is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(preds[child])))
        number = {node: i for i, node in enumerate(order)}
        idom = {exit_node: exit_node}
        changed = True
        while changed:
            changed = False
            for node in reversed(order[:-1]):
                best = None
                for target in succ[node]:
                    target = exit_node if target < 0 else target
                    if target not in idom:
                        continue
                    best = target if best is None else self._meet(best, target, idom, number)
                if best is not None and idom.get(node) != best:
                    idom[node] = best
                    changed = True
        for n, block in enumerate(self.blocks):
            at = idom.get(n, exit_node)
            block.rpc = -1 if at == exit_node else at

    @staticmethod
    def _meet(a: int, b: int, idom: dict, number: dict) -> int:
        while a != b:
            while number[a] < number[b]:
                a = idom[a]
            while number[b] < number[a]:
                b = idom[b]
        return a

    # Code ---------------------------------------------------------------------------------------------------------

    def _compile(self) -> None:
        source, line = [], 0
        for mode in (True, False):
            for n, block in enumerate(self.blocks):
                emit = Emit(self, mode)
                self._emit_block(emit, n, block)
                header = f"def {'f' if mode else 'm'}{n}(S, M):"
                source.append(header)
                line += 1
                for text, origin in zip(emit.lines, emit.origin, strict=True):
                    source.append(text)
                    line += 1
                    self.line_map[line] = origin
        self.source = "\n".join(source)
        scope: dict = {}
        exec(compile(self.source, self.filename, "exec"), scope)
        self.full_code = [scope[f"f{n}"].__code__ for n in range(len(self.blocks))]
        self.masked_code = [scope[f"m{n}"].__code__ for n in range(len(self.blocks))]
        names = set()
        for code in self.full_code + self.masked_code:
            names.update(code.co_names)
        self.row_names = self._row_names(names)

    def with_instruction(self, index: int, instr: Instr) -> Program:
        """A copy of this program in which one instruction is another; only its block is translated again.

        The instruction must neither end a block nor change whether it can block.
        """
        other = copy.copy(self)
        other.code = list(self.code)
        instr.index = index
        other.code[index] = instr
        other._pool = []
        number = next(n for n, b in enumerate(self.blocks) if b.first <= index < b.last)
        other.filename = f"{self.filename} {index}"
        other.full_code, other.masked_code = list(self.full_code), list(self.masked_code)
        names = {row[0] for row in self.row_names}
        for mode, codes in ((True, other.full_code), (False, other.masked_code)):
            emit = Emit(other, mode)
            other._emit_block(emit, number, self.blocks[number])
            scope: dict = {}
            exec(compile("def f(S, M):\n" + "\n".join(emit.lines), other.filename, "exec"), scope)
            codes[number] = scope["f"].__code__
            names.update(codes[number].co_names)
        other.row_names = other._row_names(names)
        return other

    def _emit_block(self, emit: Emit, n: int, block: Block) -> None:
        for instr in self.code[block.first : block.last]:
            _, emitter = lookup(instr)
            try:
                if instr.base in ("bra", "ret", "exit", "trap"):
                    emit.instr = instr
                else:
                    emit.begin(instr)
                emitter(emit, instr)
            except PtxError as error:
                raise PtxError(f"{error}\n  at {self.where(instr.index)}") from None
            except (IndexError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise PtxError(
                    f"cannot translate ({type(error).__name__}: {error})\n  at {self.where(instr.index)}"
                ) from error
        final = self.code[block.last - 1]
        if final.base not in ("bra", "ret", "exit", "trap") or (final.base != "bra" and final.guard is not None):
            if not block.targets:
                raise PtxError(f"control runs off the end of the kernel\n  at {self.where(final.index)}")
            emit.line(f"return {block.targets[-1]}")

    def _row_names(self, names: set) -> list[tuple]:
        """Which register views the code uses: (name, class, index, kind)."""
        rows = []
        for name in names:
            cls = name[0]
            if cls not in "phrdq" or len(name) < 2 or not name[1].isdigit():
                continue
            digits = name[1:].rstrip("ifplh")
            if digits.isdigit() and name[1 + len(digits) :] in ("", "i", "f", "p", "l", "h"):
                rows.append((name, cls, int(digits), name[1 + len(digits) :]))
        return rows

    def bind(self, warp: Warp) -> None:
        """Give a warp its registers and its own instances of the block functions."""
        if self._pool:
            warp.namespace, warp.full, warp.masked = self._pool.pop()
            _poison(warp.namespace["FILES"])
            self._bind_specials(warp.namespace, warp)
            self._give_local(warp)
            return
        space: dict = dict(NAMESPACE)
        space.update(self.shared_names)
        space["__builtins__"] = __builtins__
        files = {
            "p": np.zeros((self.counts["p"], 32), bool),
            "h": np.zeros((self.counts["h"], 32), np.uint16),
            "r": np.zeros((self.counts["r"], 32), np.uint32),
            "d": np.zeros((self.counts["d"], 32), np.uint64),
            "q": np.zeros((self.counts["q"], 2, 32), np.uint64),
        }
        _poison(files.values())
        signed = {"h": files["h"].view(np.int16), "r": files["r"].view(np.int32), "d": files["d"].view(np.int64)}
        floats = {"h": files["h"].view(np.float16), "r": files["r"].view(np.float32), "d": files["d"].view(np.float64)}
        halves = files["d"].view(np.uint32)
        pairs = files["d"].view(np.float32)
        for name, cls, index, kind in self.row_names:
            if kind == "":
                space[name] = files[cls][index]
            elif kind == "i":
                space[name] = signed[cls][index]
            elif kind == "f":
                space[name] = floats[cls][index]
            elif kind == "p":
                space[name] = pairs[index]
            else:
                space[name] = halves[index, (0 if kind == "l" else 1) :: 2]
        space["FILES"] = tuple(files.values())
        space["RF"], space["RFF"] = files["r"], floats["r"]
        self._bind_specials(space, warp)
        warp.namespace = space
        self._give_local(warp)
        make = types.FunctionType
        warp.full = [make(code, space) for code in self.full_code]
        warp.masked = [make(code, space) for code in self.masked_code]

    def _give_local(self, warp: Warp) -> None:
        """Poisoned local memory, and a mark per byte that was written."""
        if self.local_size:
            words = -(-self.local_size // 16) * 4
            warp.local = np.full((32, words), POISON, np.uint32).view(np.uint8)
            warp.local_marks = np.zeros(warp.local.shape, np.uint8)

    def release(self, warp: Warp) -> None:
        """Take back the registers of a warp that has ended."""
        self._pool.append((warp.namespace, warp.full, warp.masked))

    def _bind_specials(self, space: dict, warp: Warp) -> None:
        cta = warp.cta
        launch = self.launch
        linear = (LANES + np.uint32(32 * warp.index)).astype(np.int64)
        bx, by, _ = launch.block
        cluster, grid = launch.cluster, launch.grid
        first = cta.cluster.ctas[0].ctaid
        inside = tuple(cta.ctaid[i] - first[i] for i in range(3))
        values = {
            "tid": (linear % bx, linear // bx % by, linear // (bx * by)),
            "ntid": launch.block,
            "ctaid": cta.ctaid,
            "nctaid": grid,
            "cluster_ctaid": inside,
            "cluster_nctaid": cluster,
            "clusterid": tuple(cta.ctaid[i] // cluster[i] for i in range(3)),
            "nclusterid": tuple(grid[i] // cluster[i] for i in range(3)),
        }
        flat = {
            "laneid": LANES,
            "warpid": warp.index,
            "nwarpid": len(cta.warps) or -(-bx * by * launch.block[2] // 32),
            "cluster_ctarank": cta.rank,
            "cluster_nctarank": len(cta.cluster.ctas),
            "smid": cta.rank,
            "nsmid": 132,
            "is_explicit_cluster": int(cluster != (1, 1, 1)),
            "gridid": 0,
            "dynamic_smem_size": launch.shared_bytes,
            "total_smem_size": launch.shared_bytes + self.static_shared,
            "lanemask_eq": 1 << LANES,
            "lanemask_lt": (1 << LANES) - 1,
            "lanemask_le": (2 << LANES) - 1,
            "lanemask_ge": ~((1 << LANES) - 1),
            "lanemask_gt": ~((2 << LANES.astype(np.uint64)) - 1),
        }
        for name in self._specials:
            base, _, axis = name.rpartition("_")
            if base in values and axis in "xyzw":
                value = 0 if axis == "w" else values[base]["xyz".index(axis)]
            elif name in flat:
                value = flat[name]
            else:
                raise PtxError(f"unknown special register %{name}")
            row = np.zeros(32, np.uint32)
            row[:] = np.asarray(value).astype(np.int64) & 0xFFFFFFFF
            space[f"s_{name}"] = row

    # Messages -----------------------------------------------------------------------------------------------------

    def where(self, index: int) -> str:
        instr = self.code[index]
        text = f"PTX line {instr.line}: {instr.text[:160]}"
        if instr.source and instr.source[0] in self.module.files:
            text += f"  ({self.module.files[instr.source[0]]}:{instr.source[1]})"
        return text

    def where_block(self, block: int) -> str:
        return self.where(self.blocks[block].first)

    def executed_opcodes(self, visits: list[int]) -> set[str]:
        """Opcodes with modifiers of the blocks that were visited."""
        return {
            instr.op
            for block, count in zip(self.blocks, visits, strict=True)
            if count
            for instr in self.code[block.first : block.last]
        }


def pack64(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


NAMESPACE = {
    "np": np,
    "copyto": np.copyto,
    "FULL": FULL,
    "NONE": NONE_BYTES,
    "ALL": ALL_BYTES,
    "pack64": pack64,
    "where": np.where,
    **{f"np_{view}": dtype for view, dtype in DTYPES.items()},
    **{
        f"np_{name}": getattr(np, name)
        for name in (
            "add",
            "subtract",
            "multiply",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "invert",
            "left_shift",
            "right_shift",
            "less",
            "less_equal",
            "greater",
            "greater_equal",
            "equal",
            "not_equal",
            "minimum",
            "maximum",
            "fmin",
            "fmax",
            "logical_not",
            "negative",
            "absolute",
            "divide",
            "sqrt",
            "exp2",
            "log2",
            "isnan",
            "floor_divide",
            "remainder",
            "tanh",
            "sin",
            "cos",
        )
    },
}

__all__ = ["BLOCKING", "LOCAL_WINDOW", "OPCODES", "SIZES", "VIEWS", "Emit", "Pair", "Program", "lookup", "op"]
