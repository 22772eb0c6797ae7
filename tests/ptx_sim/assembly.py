"""What ptxas would reject: cheap checks of our own for every kernel, and ptxas itself where it is on PATH.

The cheap checks cover labels, registers, operand counts and sizes of common instructions, and which architecture has an
instruction (PTX ISA chapters 6.4 and 9). They are no type checker: `ptxas_errors` is the authority.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .limits import capability
from .parser import _SPECIAL, SIZES, Addr, Instr, Kernel, Module, Not, Pair, PtxError, Reg, Special, Sym, Vec

COUNTS = {
    2: "abs neg not cnot popc clz brev bfind ex2 lg2 rcp sqrt rsqrt sin cos tanh cvta mov isspacep ldmatrix stmatrix "
    "movmatrix testp elect mbarrier.init mbarrier.expect_tx mbarrier.complete_tx getctarank",
    3: "sub mul mul24 div rem and or xor shl shr copysign mapa redux match",
    4: "mad fma shf selp slct prmt bfe sad",
    5: "bfi shfl.sync",
    1: "bra activemask mbarrier.inval",
    0: "ret exit trap brkpt",
}
OPERANDS: dict[str, tuple[int, ...]] = {name: (n,) for n, names in COUNTS.items() for name in names.split()} | {
    "add": (3,),
    "min": (3, 4),
    "max": (3, 4),
    "lop3": (5, 6),
    "setp": (3, 4),
    "set": (3, 4),
    "ld": (2, 3),
    "st": (2, 3),
    "atom": (3, 4, 5),
    "red": (2, 3),
    "vote.sync": (3,),
    "bar.sync": (1, 2),
    "bar.arrive": (2,),
    "barrier.sync": (1, 2),
    "barrier.arrive": (2,),
    "mbarrier.try_wait": (3, 4),
    "mbarrier.test_wait": (3,),
}
# Instructions whose register operands all have the size of the one type suffix; operand numbers where only some do.
_ALL_SIZED = (
    "add sub mul mad div rem min max abs neg and or xor not fma ex2 lg2 rcp sqrt rsqrt sin cos tanh mov copysign"
)
SIZED: dict[str, tuple[int, ...] | None] = dict.fromkeys(_ALL_SIZED.split())
SIZED |= {"selp": (0, 1, 2), "setp": (1, 2), "shl": (0, 1), "shr": (0, 1)}
# Pattern -> (least compute capability, whether it needs an 'a' or 'f' target).
ARCHITECTURES = [
    (r"tcgen05\.", 100, True),
    (r"clusterlaunchcontrol\.", 100, False),
    (r".*\.tile::(gather4|scatter4)", 100, True),
    (r".*\.cta_group::", 100, True),
    (r"(add|sub|mul|fma)\.(.*\.)?f32x2", 100, False),
    (r"redux\.sync\.(.*\.)?f32", 100, True),
    (r"setmaxnreg\.", 90, True),
    (r"cp\.(reduce\.)?async\.bulk", 90, False),
    (r"mbarrier\.(try_wait|expect_tx|complete_tx)|mbarrier\..*expect_tx", 90, False),
    (r"barrier\.cluster\.|mapa\.|getctarank\.|elect\.|stmatrix\.|griddepcontrol\.|fence\.proxy\.async", 90, False),
    (r"(st|red)\.async|multimem\.", 90, False),
    (r"cp\.async\.|mbarrier\.|createpolicy\.|redux\.", 80, False),
]


def check(module: Module, kernel: Kernel) -> None:
    """Raise PtxError with the line of the first instruction that no assembler would accept."""
    for instr in kernel.body:
        for problem in _problems(module, kernel, instr):
            raise PtxError(f"{problem}\n  at line {instr.line}: {instr.text}")


def _problems(module: Module, kernel: Kernel, instr: Instr) -> Iterator[str]:
    operands = [*instr.operands, *([instr.guard[0]] if instr.guard else [])]
    for leaf in _leaves(operands):
        if isinstance(leaf, Special) and not _SPECIAL.match(leaf.name):
            yield f"undeclared register {leaf.name}"
    if instr.guard and isinstance(instr.guard[0], Reg) and kernel.regs[instr.guard[0].name] != "pred":
        yield f"guard {instr.guard[0].name} is no predicate"
    if instr.base == "bra" and instr.operands:
        target = instr.operands[0]
        if not isinstance(target, Sym) or target.name not in kernel.labels:
            yield f"undefined label {getattr(target, 'name', target)}"
    yield from _wrong_count(instr)
    yield from _wrong_size(kernel, instr)
    yield from _wrong_architecture(module.target, instr)


def _leaves(operands: object) -> Iterator[object]:
    for operand in operands:
        if isinstance(operand, Vec):
            yield from _leaves(operand.items)
        elif isinstance(operand, Pair):
            yield from _leaves((operand.first, operand.second))
        elif isinstance(operand, Addr):
            yield from _leaves((operand.base, *operand.coords, *operand.extra))
        elif isinstance(operand, Not):
            yield operand.reg
        else:
            yield operand


def _wrong_count(instr: Instr) -> Iterator[str]:
    allowed = OPERANDS.get(".".join(instr.parts[:2]), OPERANDS.get(instr.base))
    if instr.has("async"):
        return
    if allowed and len(instr.operands) not in allowed:
        yield f"{instr.op} takes {' or '.join(map(str, allowed))} operands, {len(instr.operands)} given"


def _wrong_size(kernel: Kernel, instr: Instr) -> Iterator[str]:
    kinds = instr.types
    if instr.base not in SIZED or len(kinds) != 1 or (kinds[0] not in SIZES and kinds[0] != "f32x2"):
        return
    kind, chosen = kinds[0], SIZED[instr.base]
    size = SIZES.get(kind, 8)
    for at, operand in enumerate(instr.operands):
        if not isinstance(operand, Reg) or (chosen is not None and at not in chosen):
            continue
        found = kernel.regs[operand.name]
        # mul.wide and mad.wide have a destination (and addend) of twice the size.
        wanted = 2 * size if instr.has("wide") and at in (0, 3) else size
        if (found == "pred") != (kind == "pred") or SIZES[found] != wanted:
            yield f"{instr.op}: operand {operand.name.split('@')[0]} is .{found}, {wanted} bytes of .{kind} wanted"


def _wrong_architecture(target: str, instr: Instr) -> Iterator[str]:
    arch, accelerated = capability(target), target[-1:] in ("a", "f")
    if instr.op.startswith("wgmma.") and target != "sm_90a":
        yield f"{instr.op} exists on sm_90a only; this module is for {target}"
    if instr.op.startswith("tcgen05.") and not 100 <= arch < 120:
        yield f"{instr.op} exists on sm_100 to sm_110 only; this module is for {target}"
    for pattern, least, suffix in ARCHITECTURES:
        if re.match(pattern, instr.op) and (arch < least or (suffix and not accelerated)):
            yield f"{instr.op} needs sm_{least}{'a' if suffix else ''} or later; this module is for {target}"


# ptxas ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _version() -> str | None:
    """Path and version of the ptxas on PATH, or None."""
    path = shutil.which("ptxas")
    if path is None:
        return None
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptx_sim"


@functools.cache
def ptxas_errors(text: str) -> str | None:
    """What ptxas says about a module, or None when it assembles (or when there is no ptxas).

    Verdicts are kept in the user's cache folder by the hash of the PTX and the version of ptxas.
    """
    version = _version()
    if version is None:
        return None
    text = text.rstrip("\0")
    kept = _cache_folder() / f"{hashlib.sha256((version + text).encode()).hexdigest()}.ptxas"
    if kept.exists():
        return kept.read_text() or None
    verdict = _assemble(text)
    if newer := re.search(r"Unsupported \.version [\d.]+; current version is '([\d.]+)'", verdict):
        # An older ptxas: what it can say is whether the module assembles as the newest PTX that it knows.
        verdict = _assemble(re.sub(r"(\.version\s+)[\d.]+", rf"\g<1>{newer.group(1)}", text, count=1))
        verdict = verdict and f"(assembled as PTX {newer.group(1)}, the newest of this ptxas)\n{verdict}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(verdict)
    return verdict or None


def _assemble(text: str) -> str:
    """The errors of one call of ptxas, empty when there are none."""
    target = re.search(r"\.target\s+(\w+)", text)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "module.ptx"
        source.write_text(text)
        arch = target.group(1) if target else "sm_90a"
        command = ["ptxas", f"-arch={arch}", "-O0", "-o", f"{folder}/out.cubin", str(source)]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode == 0:
            return ""
        return (found.stderr or f"ptxas ended with {found.returncode}").strip().replace(f"{folder}/", "")


def assemble(text: str) -> None:
    """Raise PtxError when ptxas rejects the module."""
    verdict = ptxas_errors(text)
    if verdict is not None:
        raise PtxError(f"ptxas rejects the PTX:\n{verdict}")
