"""PTX text -> kernels made of instructions, registers and variables.

The grammar follows PTX ISA chapters 4 (syntax), 5 (state spaces) and 8.3 (statements), restricted to what compilers
emit: one statement per `;`, nested `{ }` scopes from inline assembly with their own registers and labels.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field


class PtxError(Exception):
    """A PTX statement that cannot be parsed or executed; the message carries the line."""


@dataclass(frozen=True, slots=True)
class Reg:
    """A declared register, by its unique name (inner scopes get a suffix)."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x (PTX ISA chapter 10)."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An integer constant, or the bits of a floating-point one (`is_float`, 32 or 64 bits wide)."""

    value: int
    is_float: bool = False
    bits: int = 64


@dataclass(frozen=True, slots=True)
class Sym:
    """The address of a variable, kernel parameter or label, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Addr:
    """[base + offset], or with coordinates [base, {x, y}] for tensor copies (`coords`, `extra`)."""

    base: object
    offset: int = 0
    coords: tuple = ()
    extra: tuple = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, ...}"""

    items: tuple


@dataclass(frozen=True, slots=True)
class Not:
    """!%p as a source operand."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Pair:
    """%r|%p destinations of shfl, elect and setp."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Sink:
    """The `_` destination."""


@dataclass(slots=True)
class Instr:
    """One instruction. `parts` is the opcode split at the dots; `guard` is (register, negated) or None."""

    op: str
    parts: tuple
    operands: list
    guard: tuple | None
    line: int
    text: str
    source: tuple | None = None
    index: int = -1

    @property
    def base(self) -> str:
        return self.parts[0]

    def has(self, part: str) -> bool:
        return part in self.parts

    @property
    def type(self) -> str:
        """The type suffix: u32, b64, f32, bf16x2, pred ... Forms with several types must use `types`."""
        found = self.types
        if len(found) != 1:
            raise PtxError(f"{self.op} has {len(found)} type suffixes, this instruction is modelled with one")
        return found[0]

    @property
    def types(self) -> list:
        return [part for part in self.parts[1:] if TYPE_RE.fullmatch(part)]


@dataclass(slots=True)
class Variable:
    """A .shared, .local, .const or .global variable of a module or kernel."""

    name: str
    space: str
    align: int
    size: int
    init: bytes | None = None
    address: int = 0


@dataclass(slots=True)
class Param:
    name: str
    size: int
    align: int
    offset: int = 0


@dataclass(slots=True)
class Kernel:
    name: str
    params: list = field(default_factory=list)
    regs: dict = field(default_factory=dict)
    variables: list = field(default_factory=list)
    body: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)
    attributes: dict = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass(slots=True)
class Module:
    kernels: dict
    variables: list
    target: str
    files: dict
    text: str


TYPE_RE = re.compile(
    r"(?:[usb](?:8|16|32|64|128)|f(?:16|32|64)|[fb]?f16x2|bf16|f32x2|f16x2|bf16x2|u16x2|s16x2|tf32"
    r"|pred|e4m3|e5m2|e4m3x2|e5m2x2|ue8m0x2|e2m1x2|e4m3x4|e5m2x4)"
)
SIZES = {
    "pred": 1,
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "b128": 16,
}
_REGISTER = re.compile(r"%?[\w$]+")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_VARIABLE = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.(shared|local|const|global)\b(?:\s*\.attribute\([^)]*\))?"
    r"(?:\s+\.align\s+(\d+))?\s+\.(\w+)\s+([\w$]+)\s*((?:\[\d*\])*)\s*(?:=\s*(.*))?",
    re.S,
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^,]*?\s+)?([\w$]+)(?:\[(\d+)\])?$")
_MODULE_VARIABLE = re.compile(r"(?m)^\s*((?:\.(?:extern|visible|weak)\s+)*\.(?:shared|const|global)\b[^;]*);")
_ENTRY = re.compile(r"(?:\.(?:visible|weak|extern)\s+)?\.entry\s+([\w$]+)\s*")
_SPECIAL = re.compile(
    r"%(?:tid|ntid|ctaid|nctaid|laneid|warpid|nwarpid|smid|nsmid|gridid|clusterid|nclusterid"
    r"|cluster_ctaid|cluster_nctaid|cluster_ctarank|cluster_nctarank|is_explicit_cluster"
    r"|lanemask_\w+|clock|clock64|clock_hi|globaltimer\w*|dynamic_smem_size|total_smem_size"
    r"|aggr_smem_size|envreg\d+|pm\d+)(?:\.[xyzw])?$"
)


def _strip_comments(text: str) -> str:
    """Blank out comments, keeping every line break so that line numbers stay true."""
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def parse_number(token: str) -> Imm | None:
    """An integer or floating-point literal (PTX ISA 4.5), or None."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", token):
        return Imm(int(token[2:], 16), True, 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", token):
        return Imm(int(token[2:], 16), True, 64)
    if re.fullmatch(r"-?0[xX][0-9a-fA-F]+U?", token):
        return Imm(int(token.rstrip("U"), 16))
    if re.fullmatch(r"-?0[bB][01]+U?", token):
        return Imm(int(token.rstrip("U"), 2))
    if re.fullmatch(r"-?0[0-7]+U?", token):
        return Imm(int(token.rstrip("U"), 8))
    if re.fullmatch(r"-?(0|[1-9]\d*)U?", token):
        return Imm(int(token.rstrip("U"), 10))
    if token == "WARP_SZ":
        return Imm(32)
    if re.fullmatch(r"-?\d+\.\d*(?:[eE][+-]?\d+)?", token):
        return Imm(int.from_bytes(struct.pack("<d", float(token)), "little"), True, 64)
    return None


def _offset(token: str, line: int) -> int:
    """The integer literal that follows the sign in an address."""
    number = parse_number(token)
    if number is None or number.is_float:
        raise PtxError(f"line {line}: {token!r} is no offset of an address")
    return number.value


def split_top(text: str, separator: str = ",") -> list:
    """Split at separators that are outside (), [] and {}."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    if last or parts:
        parts.append(last)
    return parts


class _Scope:
    def __init__(self, parent: _Scope | None, suffix: str) -> None:
        self.parent = parent
        self.suffix = suffix
        self.names: dict[str, str] = {}
        self.labels: dict[str, str] = {}

    def find(self, name: str) -> str | None:
        scope = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


class _KernelParser:
    """Parses one kernel body; statements come with their line number."""

    def __init__(self, kernel: Kernel, text: str, line: int) -> None:
        self.kernel = kernel
        self.text = text
        self.line = line
        self.scope = _Scope(None, "")
        self.scopes = 0
        self.pending: list = []
        self.source: tuple | None = None

    def run(self) -> None:
        text, pos, end = self.text, 0, len(self.text)
        while pos < end:
            char = text[pos]
            if char == "\n":
                self.line += 1
                pos += 1
            elif char.isspace() or char == ";":
                pos += 1
            elif char == "{":
                self.scopes += 1
                self.scope = _Scope(self.scope, f"@{self.scopes}")
                pos += 1
            elif char == "}":
                self.scope = self.scope.parent
                pos += 1
            elif text.startswith((".loc\t", ".loc ", ".file"), pos):
                stop = text.find("\n", pos)
                fields = text[pos:stop].split()
                if fields[0] == ".loc":
                    self.source = (int(fields[1]), int(fields[2]))
                pos = stop
            elif match := _LABEL.match(text, pos):
                name = match.group(1)
                unique = name + self.scope.suffix
                self.scope.labels[name] = unique
                self.kernel.labels[unique] = len(self.pending)
                pos = match.end()
            else:
                stop = text.find(";", pos)
                if stop < 0:
                    raise PtxError(f"line {self.line}: statement without ';': {text[pos : pos + 60]!r}")
                statement = text[pos:stop]
                self.statement(statement.strip())
                self.line += statement.count("\n")
                pos = stop + 1
        self.kernel.body = [self.finish(*item) for item in self.pending]

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self.registers(text)
        elif text.startswith((".pragma", ".branchtargets", ".callprototype")):
            return
        elif text.startswith(".param"):
            # A parameter or result of a call: local memory of its scope.
            param = parse_param(text, self.line)
            unique = param.name + self.scope.suffix
            self.scope.labels[param.name] = unique
            self.kernel.variables.append(Variable(unique, "local", param.align, param.size))
        elif text.startswith("."):
            variable = parse_variable(text, self.line)
            self.kernel.variables.append(variable)
        else:
            self.pending.append((text, self.line, self.scope, self.source))

    def registers(self, text: str) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        if not match:
            raise PtxError(f"line {self.line}: cannot parse {text!r}")
        kind = match.group(1)
        for item in match.group(2).split(","):
            item = item.strip()
            ranged = re.fullmatch(r"(%?[\w$]+)<(\d+)>", item)
            names = [f"{ranged.group(1)}{i}" for i in range(int(ranged.group(2)))] if ranged else [item]
            for name in names:
                unique = name + self.scope.suffix
                self.scope.names[name] = unique
                self.kernel.regs[unique] = kind

    def finish(self, text: str, line: int, scope: _Scope, source: tuple | None) -> Instr:
        guard = None
        body = text
        if match := re.match(r"@(!?)(%?[\w$]+)\s+", body):
            guard = (Reg(scope.find(match.group(2)) or self.unknown(match.group(2), line)), bool(match.group(1)))
            body = body[match.end() :]
        op = re.match(r"\S+", body).group()
        rest = body[len(op) :].strip()
        # Inline assembly may break an opcode over lines; a trailing dot then continues in the operand text.
        while op.endswith("."):
            more = re.match(r"\S+", rest).group()
            op, rest = op + more, rest[len(more) :].strip()
        parts = tuple(op.split("."))
        operands = [self.operand(token, scope, line) for token in split_top(rest)] if rest else []
        return Instr(op, parts, operands, guard, line, " ".join(text.split()), source)

    def unknown(self, name: str, line: int) -> str:
        raise PtxError(f"line {line}: unknown register {name}")

    def operand(self, token: str, scope: _Scope, line: int) -> object:
        token = token.strip()
        if token == "_":
            return Sink()
        if token.startswith("["):
            return self.address(token[1:-1].strip(), scope, line)
        if token.startswith("{"):
            return Vec(tuple(self.operand(item, scope, line) for item in split_top(token[1:-1])))
        if token.startswith("("):
            return Vec(tuple(self.operand(item, scope, line) for item in split_top(token[1:-1])))
        if token.startswith("!"):
            return Not(self.operand(token[1:], scope, line))
        if "|" in token:
            first, second = token.split("|")
            return Pair(self.operand(first, scope, line), self.operand(second, scope, line))
        if (number := parse_number(token)) is not None:
            return number
        if (name := scope.find(token)) is not None:
            return Reg(name)
        if _SPECIAL.match(token):
            return Special(token)
        if match := re.fullmatch(r"([\w$]+)\s*\+\s*(-?\w+)", token):
            return Sym(match.group(1), _offset(match.group(2), line))
        if re.fullmatch(r"[a-zA-Z_$][\w$]*", token):
            # A label of an enclosing scope; labels may be defined after their use, hence the second pass.
            probe = scope
            while probe is not None:
                if token in probe.labels:
                    return Sym(probe.labels[token])
                probe = probe.parent
            return Sym(token)
        if re.fullmatch(r"%[\w$.]+", token):
            return Special(token)
        raise PtxError(f"line {line}: cannot parse operand {token!r}")

    def address(self, text: str, scope: _Scope, line: int) -> Addr:
        first, *others = split_top(text)
        base, offset = first, 0
        if match := re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", first):
            base, offset = match.group(1), _offset(match.group(2), line)
        elif match := re.fullmatch(r"(.+?)\s*-\s*(\w+)", first):
            base, offset = match.group(1), -_offset(match.group(2), line)
        coords, extra = (), []
        for other in others:
            value = self.operand(other, scope, line)
            if isinstance(value, Vec) and not coords:
                coords = value.items
            else:
                extra.append(value)
        return Addr(self.operand(base, scope, line), offset, coords, tuple(extra))


def parse_variable(text: str, line: int) -> Variable:
    match = _VARIABLE.fullmatch(text.strip())
    if not match:
        raise PtxError(f"line {line}: cannot parse {text[:80]!r}")
    space, align, kind, name, dims, init = match.groups()
    size = SIZES[kind]
    count = 1
    for dim in re.findall(r"\[(\d*)\]", dims):
        count *= int(dim) if dim else 0
    data = None
    if init and init.strip().startswith("{"):
        values = [parse_number(item) for item in split_top(init.strip()[1:-1])]
        if all(value is not None for value in values):
            data = b"".join((v.value % (1 << (8 * size))).to_bytes(size, "little") for v in values)
            data = data.ljust(size * count, b"\0")
    elif init and (value := parse_number(init.strip())) is not None:
        data = (value.value % (1 << (8 * size))).to_bytes(size, "little")
    return Variable(name, space, int(align or size), size * count, data)


def parse_param(text: str, line: int) -> Param:
    match = _PARAM.fullmatch(" ".join(text.split()))
    if not match:
        raise PtxError(f"line {line}: cannot parse parameter {text!r}")
    align, kind, name, count = match.groups()
    return Param(name, SIZES[kind] * int(count or 1), int(align or SIZES[kind]))


def _params(text: str, line: int) -> list:
    params, offset = [], 0
    for item in split_top(text):
        param = parse_param(item, line)
        param.offset = -(-offset // param.align) * param.align
        params.append(param)
        offset = param.offset + param.size
    return params


def _matching(text: str, pos: int) -> int:
    depth = 0
    for i in range(pos, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
    raise PtxError("unbalanced braces")


def _attributes(text: str) -> dict:
    found = {}
    for name in ("reqntid", "maxntid", "minnctapersm", "reqnctapercluster", "maxnreg", "maxclusterrank"):
        if match := re.search(rf"\.{name}\s+([\d,\s]+)", text):
            found[name] = tuple(int(v) for v in match.group(1).replace(" ", "").strip().strip(",").split(",") if v)
    return found


def parse(text: str) -> Module:
    """Parse a whole PTX module."""
    original = text
    text = _strip_comments(text.rstrip("\0"))
    target = re.search(r"\.target\s+(\w+)", text)
    files = {int(n): name for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    module = Module({}, [], target.group(1) if target else "", files, original)
    spans = []
    for match in _ENTRY.finditer(text):
        kernel = Kernel(match.group(1))
        pos = match.end()
        if text[pos] == "(":
            stop = text.index(")", pos)
            kernel.params = _params(text[pos + 1 : stop], text.count("\n", 0, pos) + 1)
            pos = stop + 1
        start = text.index("{", pos)
        kernel.attributes = _attributes(text[pos:start])
        end = _matching(text, start)
        _KernelParser(kernel, text[start + 1 : end], text.count("\n", 0, start) + 1).run()
        module.kernels[kernel.name] = kernel
        spans.append((match.start(), end + 1))
    outside, last = [], 0
    for start, end in spans:
        outside.append((last, text[last:start]))
        last = end
    outside.append((last, text[last:]))
    for base, chunk in outside:
        for match in _MODULE_VARIABLE.finditer(chunk):
            module.variables.append(parse_variable(match.group(1), text.count("\n", 0, base + match.start(1)) + 1))
    return module
