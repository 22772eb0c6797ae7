"""Registers of asynchronous instructions: used too early, or without the fence that wgmma wants.

A data-flow analysis over the blocks that a run has visited (a use is reported if any path through them leads to it):

- The results of tcgen05.ld exist after tcgen05.wait::ld (PTX ISA, tcgen05.wait). Shipped kernels move and pack them
  earlier, which only renames registers: then the copies must not be used.
- Accumulators of wgmma must not be touched until a wait_group covers its committed group, and a wgmma.fence must come
  first, and again after any other access to them (PTX ISA, wgmma.fence, wgmma.wait_group). A fragments likewise, but
  they may be read: a shipped kernel stores them while a product uses them.

Registers are bits of an int; a second bit, `size` higher, stands for writing one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .parser import Addr, Instr, Not, Pair, Reg, Vec
from .translate import Program

_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Misuse:
    """`first` is the asynchronous instruction (or the other access), `second` the one that comes too early."""

    first: int
    second: int
    text: str


@dataclass(frozen=True, slots=True)
class _State:
    """Sets of registers as bit masks."""

    loading: int = 0  # results of tcgen05.ld before their wait
    open: int = 0  # of wgmma since the last commit_group
    groups: tuple[int, ...] = ()  # of committed groups that may be in flight, oldest first
    touched: int = 0  # accessed by others since the last wgmma.fence
    unfenced: bool = True

    def join(self, other: _State) -> _State:
        count = max(len(self.groups), len(other.groups))
        mine, theirs = ((0,) * (count - len(g)) + g for g in (self.groups, other.groups))
        return _State(
            self.loading | other.loading,
            self.open | other.open,
            tuple(a | b for a, b in zip(mine, theirs, strict=True)),
            self.touched | other.touched,
            self.unfenced or other.unfenced,
        )


def _names(operand: object) -> list[str]:
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Not):
        return [operand.reg.name]
    if isinstance(operand, Vec):
        return [name for item in operand.items for name in _names(item)]
    if isinstance(operand, Pair):
        return _names(operand.first) + _names(operand.second)
    if isinstance(operand, Addr):
        return _names(operand.base) + [name for c in operand.coords or () for name in _names(c)]
    return []


class RegisterCheck:
    """Checks one program; `without` leaves instructions out, as if they had been removed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbers = {name: n for n, name in enumerate(program.registers)}
        self.size = len(self.numbers)
        self.uses = [self._bits(instr) for instr in program.code]
        self.fragments = {
            instr.index: self._fragment(instr) for instr in program.code if instr.op.startswith("wgmma.mma_async")
        }
        self.loads = {
            instr.index: self._mask(instr.operands[0]) for instr in program.code if instr.op.startswith("tcgen05.ld")
        }
        self.relevant = 0
        for mask in (*self.fragments.values(), *self.loads.values()):
            self.relevant |= mask

    def _mask(self, *operands: object) -> int:
        mask = 0
        for operand in operands:
            for name in _names(operand):
                mask |= 1 << self.numbers[name]
        return mask

    def _bits(self, instr: Instr) -> int:
        """What an instruction accesses and what it writes; stores and the like have an address first."""
        mask = self._mask(*instr.operands)
        if instr.guard is not None:
            mask |= 1 << self.numbers[instr.guard[0].name]
        return mask | self._mask(*instr.operands[:1]) << self.size if instr.base != "bra" else mask

    def _fragment(self, instr: Instr) -> int:
        """Accumulators whose access, A fragments whose writing conflicts."""
        d, a = instr.operands[:2]
        return self._mask(d) | (self._mask(a) << self.size if isinstance(a, Vec) else 0)

    def misuses(self, visits: list[int], without: frozenset = frozenset()) -> list[Misuse]:
        """All misuses on paths through visited blocks."""
        if not self.relevant:
            return []
        blocks = self.program.blocks
        before: dict[int, _State] = {0: _State()}
        work = [0]
        while work:
            number = work.pop()
            after = self._run(number, before[number], without, None)
            for target in blocks[number].targets:
                if target < 0 or not visits[target]:
                    continue
                joined = before[target].join(after) if target in before else after
                if before.get(target) != joined:
                    before[target] = joined
                    work.append(target)
        found: list[Misuse] = []
        for number, state in before.items():
            self._run(number, state, without, found)
        return found

    def _run(self, number: int, state: _State, without: frozenset, found: list[Misuse] | None) -> _State:
        block = self.program.blocks[number]
        for index in range(block.first, block.last):
            if index in without:
                continue
            state = self._step(index, state, found)
        return state

    def _step(self, index: int, state: _State, found: list[Misuse] | None) -> _State:
        instr, uses = self.program.code[index], self.uses[index]
        if index in self.fragments:
            return self._product(index, state, found)
        op = instr.op
        if op.startswith("wgmma."):
            if op.startswith("wgmma.fence"):
                return replace(state, touched=0, unfenced=False)
            if op.startswith("wgmma.commit"):
                return replace(state, open=0, groups=(*state.groups, state.open)[-_GROUPS:])
            count = instr.operands[0].value
            return replace(state, groups=state.groups[len(state.groups) - count :] if count else ())
        if op.startswith("tcgen05.wait::ld"):
            return replace(state, loading=0)
        moved = 0
        if uses & state.loading and instr.base == "mov":
            moved = uses & ~self._mask(*instr.operands[1:])
            uses &= ~state.loading
        moved &= (1 << self.size) - 1
        if found is not None and uses:
            self._uses(index, uses, state, found)
        loading = state.loading | moved | self.loads.get(index, 0)
        touched = state.touched | uses & self.relevant
        if loading == state.loading and touched == state.touched:
            return state
        return replace(state, loading=loading, touched=touched)

    def _uses(self, index: int, uses: int, state: _State, found: list[Misuse]) -> None:
        if both := uses & state.loading:
            first = next((i for i, mask in self.loads.items() if mask & both), index)
            found.append(self._misuse(first, index, both, "no tcgen05.wait::ld lies between the load and this use"))
        flight = state.open
        for group in state.groups:
            flight |= group
        if both := uses & flight:
            first = next(i for i, mask in self.fragments.items() if mask & both)
            why = "no wgmma.wait_group" if not uses & state.open else "no wgmma.commit_group and wait_group"
            found.append(self._misuse(first, index, both, f"{why} lies between the wgmma and this use"))

    def _product(self, index: int, state: _State, found: list[Misuse] | None) -> _State:
        mask = self.fragments[index]
        if found is not None:
            if state.unfenced:
                found.append(self._misuse(index, index, mask, "no wgmma.fence before the first wgmma"))
            elif both := mask & state.touched:
                text = "no wgmma.fence since another instruction accessed it"
                found.append(self._misuse(index, index, both, text))
        return replace(state, open=state.open | mask)

    def _misuse(self, first: int, second: int, registers: int, why: str) -> Misuse:
        name = next(
            n for n, number in self.numbers.items() if registers >> number & 1 or registers >> self.size + number & 1
        )
        where = self.program.where
        lines = [f"register {name} of an asynchronous instruction"]
        if first != second:
            lines.append(f"  issued\n    at {where(first)}")
        lines.append(f"  used\n    at {where(second)}\n  missing: {why}")
        return Misuse(first, second, "\n".join(lines))
