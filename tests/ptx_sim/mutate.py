"""Single-instruction mutants: does the simulator notice when one instruction of a working kernel is wrong?

Three kinds: a predicate negated (guard, or the predicate of selp and of an MMA), a memory address moved by 16 bytes,
two source operands swapped where order matters. A mutant is killed when an output tensor changes, when the run fails or
when it reports a finding that the original does not. Survivors are printed with their PTX line.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .launch import Launch
from .machine import Machine
from .memory import SimError
from .parser import Addr, Imm, Instr, Not, PtxError, Reg, Vec
from .translate import BLOCKING, Program, lookup

COMMUTATIVE = (
    "add",
    "mul",
    "and",
    "or",
    "xor",
    "min",
    "max",
    "mov",
    "cvt",
    "ld",
    "st",
    "neg",
    "not",
    "abs",
    "ex2",
    "lg2",
)
PASSIVE = ("prefetch", "prefetchu", "nanosleep", "createpolicy", "fence", "griddepcontrol", "setmaxnreg")


@dataclass(frozen=True)
class Mutant:
    index: int
    kind: str
    instr: Instr


@dataclass
class Outcome:
    mutant: Mutant
    verdict: str
    detail: str = ""


def _with(instr: Instr, **changes: object) -> Instr:
    return replace(instr, **changes)


def _negated(instr: Instr) -> Iterator[Instr]:
    if instr.guard is not None:
        yield _with(instr, guard=(instr.guard[0], not instr.guard[1]))
    if instr.base == "selp":
        *rest, p = instr.operands
        yield _with(instr, operands=[*rest, Not(p) if isinstance(p, Reg) else p.reg])


def _moved(instr: Instr) -> Iterator[Instr]:
    if instr.base in PASSIVE:
        return
    for at, operand in enumerate(instr.operands):
        if isinstance(operand, Addr) and not operand.coords:
            operands = list(instr.operands)
            operands[at] = replace(operand, offset=operand.offset + 16)
            yield _with(instr, operands=operands)


def _swapped(instr: Instr) -> Iterator[Instr]:
    if instr.base in COMMUTATIVE or any(isinstance(o, (Addr, Vec)) for o in instr.operands):
        return
    if instr.base == "setp" and instr.parts[1] in ("eq", "ne"):
        return
    if instr.base in ("fma", "mad") and len(instr.operands) == 4:
        d, a, b, c = instr.operands
        if a != c and not isinstance(c, Imm):
            yield _with(instr, operands=[d, c, b, a])
        return
    if instr.base in ("sub", "div", "shl", "shr", "setp", "selp", "prmt", "bfe", "rem") and len(instr.operands) >= 3:
        d, a, b, *rest = instr.operands
        if a != b:
            yield _with(instr, operands=[d, b, a, *rest])


KINDS = {"negated": _negated, "moved": _moved, "swapped": _swapped}


def candidates(program: Program, visits: list[int]) -> list[Mutant]:
    """Mutants of executed instructions that do not steer blocks (branches are negated through their setp)."""
    found = []
    for number, block in enumerate(program.blocks):
        if not visits[number]:
            continue
        for instr in program.code[block.first : block.last]:
            name, _ = lookup(instr)
            if instr.base in ("bra", "ret", "exit", "trap") or (name in BLOCKING and instr.guard is not None):
                continue
            for kind, build in KINDS.items():
                found += [Mutant(instr.index, kind, changed) for changed in build(instr)]
    return found


class Laboratory:
    """Runs mutants of one launch from the same initial memory."""

    def __init__(self, launch: Launch, limit: int = 50) -> None:
        self.launch = launch
        self.limit = limit
        self.memory = launch.memory()
        self.program = launch.program(self.memory)
        self.initial = [(a, self.memory.bytes_at(a.base, a.size).copy()) for a in self.memory.allocations()]
        self.report = self._run(self.program)
        self.truth = self._state()
        self.findings = {f.split("\n")[0].split(":")[0] for f in self.report.findings}

    def _run(self, program: Program):
        for item, data in self.initial:
            self.memory.bytes_at(item.base, item.size)[:] = data
        return Machine(program, self.launch, self.memory, limit=self.limit).run()

    def _state(self) -> list[bytes]:
        return [self.memory.bytes_at(item.base, item.size).tobytes() for item, _ in self.initial]

    def try_mutant(self, mutant: Mutant) -> Outcome:
        try:
            program = self.program.with_instruction(mutant.index, mutant.instr)
            report = self._run(program)
        except (SimError, PtxError, MemoryError) as error:
            return Outcome(mutant, "reported", str(error).split("\n")[0])
        fresh = [f for f in report.findings if f.split("\n")[0].split(":")[0] not in self.findings]
        if fresh:
            return Outcome(mutant, "reported", fresh[0].split("\n")[0])
        if self._state() != self.truth:
            return Outcome(mutant, "changed the result")
        return Outcome(mutant, "survived")

    def sample(self, count: int, seed: int = 0) -> list[Outcome]:
        pool = candidates(self.program, self.report.visits)
        chosen = random.Random(seed).sample(pool, min(count, len(pool)))
        return [self.try_mutant(m) for m in chosen]


def summary(outcomes: list[Outcome], program: Program) -> str:
    killed = sum(o.verdict != "survived" for o in outcomes)
    lines = [f"{killed} of {len(outcomes)} mutants killed ({100 * killed / max(len(outcomes), 1):.1f} %)"]
    for verdict in ("changed the result", "reported"):
        lines.append(f"  {sum(o.verdict == verdict for o in outcomes)} {verdict}")
    for o in outcomes:
        if o.verdict == "survived":
            lines.append(f"  survived: {o.mutant.kind} at {program.where(o.mutant.index)}")
    return "\n".join(lines)
