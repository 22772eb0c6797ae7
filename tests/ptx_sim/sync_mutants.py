"""Synchronisation mutants: is a report made when one wait, fence, commit or arrival of a working kernel is missing?

Every such instruction that a run executes is one mutant. It is taken out (a wait returns at once), the launch runs
again under race tracking, and the outcome is race, deadlock, error (a defect that the simulator itself reports), wrong
result or survived. Survivors get the other edge that orders what the removed one ordered.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from . import allowances
from .launch import Launch
from .machine import Deadlock, Machine, Report, Split
from .memory import SimError
from .parser import Instr, PtxError, Reg
from .policies import Priorities
from .races import Race, RaceFound, Races
from .registers import RegisterCheck
from .translate import Emit, Program, op

VERDICTS = ("race", "deadlock", "error", "wrong result", "survived")
# Relative error of a sum whose order the schedule decides.
LOOSE = 1e-3


def _removed(split: Split, mask: np.ndarray, index: int) -> None:
    observer = split.machine.observer
    if isinstance(observer, Explanation):
        observer.removed(split, mask, index)


@op("removed")
def removed(emit: Emit, instr: Instr) -> None:
    """What stands in the place of a removed instruction: a wait's predicate is true."""
    if instr.operands:
        emit.put(instr.operands[0], "pred", "np.ones(32, bool)")
    emit.call(_removed)


def without(program: Program, index: int) -> Program:
    """The program with one synchronisation instruction taken out."""
    instr = program.code[index]
    wait = instr.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))
    operands = [o for o in instr.operands[:1] if isinstance(o, Reg)] if wait else []
    return program.with_instruction(index, replace(instr, op="removed", parts=("removed",), operands=operands))


@dataclass(frozen=True)
class Outcome:
    """`line` and `text` of the removed PTX instruction, the verdict, and its report or the other edge."""

    line: int
    text: str
    verdict: str
    kind: str
    detail: str


class Laboratory:
    """Runs one launch again and again from the same initial memory, under race tracking."""

    def __init__(self, launch: Launch, resident: int = 1) -> None:
        self.launch = launch
        self.resident = resident
        self.memory = launch.memory()
        self.program = launch.program(self.memory)
        self.initial = [(a, self.memory.bytes_at(a.base, a.size).copy()) for a in self.memory.allocations()]
        self.registers = RegisterCheck(self.program)
        self.races, self.report = self.run(self.program)
        self.truth = self._state()
        self.findings = {f.split("\n")[0].split(":")[0] for f in self.report.findings}
        # Tensors whose bits depend on the schedule (sums by atomics) are compared as fp32.
        self.run(self.program, order=Priorities(1))
        self.loose = [a != b for a, b in zip(self.truth, self._state(), strict=True)]
        self.misused = self._misused(-1)

    def run(self, program: Program, observer: Races | None = None, **options: object) -> tuple[Races, Report]:
        for item, data in self.initial:
            self.memory.bytes_at(item.base, item.size)[:] = data
        observer = observer or Races(allow=allowances.allowed)
        machine = Machine(
            program, self.launch, self.memory, resident=self.resident, observer=observer, limit=50, **options
        )
        return observer, machine.run()

    def _misused(self, index: int) -> set[tuple[int, int]]:
        return {(m.first, m.second) for m in self.registers.misuses(self.report.visits, index)}

    def _state(self) -> list[np.ndarray]:
        return [self.memory.bytes_at(item.base, item.size).tobytes() for item, _ in self.initial]

    def _same(self) -> bool:
        for loose, truth, found in zip(self.loose, self.truth, self._state(), strict=True):
            if truth == found:
                continue
            if not loose or len(truth) % 4:
                return False
            a, b = np.frombuffer(truth, np.float32), np.frombuffer(found, np.float32)
            if not np.linalg.norm(a - b) <= LOOSE * np.linalg.norm(a):
                return False
        return True

    @property
    def sites(self) -> list[int]:
        """Every wait, fence, commit and arrival that the run executed."""
        return sorted(self.races.executed)

    def try_site(self, index: int) -> Outcome:
        """Take out one instruction and see."""
        instr = self.program.code[index]

        def outcome(verdict: str, kind: str = "", detail: str = "") -> Outcome:
            return Outcome(instr.line, instr.text[:120], verdict, kind, detail)

        fresh = [
            m
            for m in self.registers.misuses(self.report.visits, index)
            if (m.first, m.second) not in self.misused and m.second != index
        ]
        if fresh:
            return outcome("race", "registers", fresh[0].text)
        try:
            observer = Races(stop=True, allow=allowances.allowed)
            _, report = self.run(without(self.program, index), observer)
        except RaceFound as found:
            return outcome("race", observer.races[0].kind, str(found))
        except Deadlock as error:
            return outcome("deadlock", "", str(error).split("\n")[0])
        except (SimError, PtxError, MemoryError) as error:
            return outcome("error", "", str(error).split("\n")[0])
        new = [f for f in report.findings if f.split("\n")[0].split(":")[0] not in self.findings]
        if new:
            return outcome("error", "finding", new[0].split("\n")[0])
        if not self._same():
            return outcome("wrong result")
        return outcome("survived", "", self.explain(index))

    def explain(self, index: int) -> str:
        """The edge that orders what the removed instruction ordered."""
        gains = Explanation(index)
        self.run(self.program, gains)
        later = Explanation(index, gains.gained)
        self.run(without(self.program, index), later)
        return later.answer(self.program)


class Explanation(Races):
    """First run (`gained` not given): what does each execution of instruction `site` teach its warp?

    Second run, without that instruction: which other instruction taught the warp the same, before or after?
    """

    def __init__(self, site: int, gained: dict | None = None) -> None:
        super().__init__(allow=allowances.allowed)
        self.site = site
        self.second = gained is not None
        self.gained: dict[tuple, list[dict[tuple, int]]] = gained or {}
        self.teachers: dict[tuple, int] = {}
        self.open: dict[int, list[dict]] = {}
        self.others: dict[str, int] = {}
        self.counts: dict[int, int] = {}

    def _key(self, split: Split) -> tuple:
        return split.cta.cluster.index, split.cta.rank, split.warp.index

    def _watch(self, name: str, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        _, warp = self._of(split)
        before = np.maximum.reduce([g.known for g in warp.groups])
        getattr(super(), name)(split, mask, index, *rest)
        after = np.maximum.reduce([g.known for g in warp.groups])
        rows, actors = np.nonzero(after > before)
        news = {(r, a): int(after[r, a]) for r, a in zip(rows.tolist(), actors.tolist(), strict=True)}
        key = self._key(split)
        if not self.second:
            if index == self.site:
                self.gained.setdefault(key, []).append(news)
            return
        for item in news:
            self.teachers[(*key, *item)] = index
        for wanted in self.open.get(id(split.warp), []):
            met = [item for item, clock in wanted.items() if after[item] >= clock]
            for item in met:
                del wanted[item]
            if met:
                self.others["afterwards by"] = index

    def removed(self, split: Split, mask: np.ndarray, index: int) -> None:
        _, warp = self._of(split)
        key = self._key(split)
        number = self.counts[id(split.warp)] = self.counts.get(id(split.warp), -1) + 1
        lessons = self.gained.get(key, [])
        if not self.second or number >= len(lessons):
            return
        known = np.maximum.reduce([g.known for g in warp.groups])
        wanted = dict(lessons[number])
        for item, clock in lessons[number].items():
            if known[item] >= clock:
                del wanted[item]
                if (*key, *item) in self.teachers:
                    self.others["before by"] = self.teachers[(*key, *item)]
        self.open.setdefault(id(split.warp), []).append(wanted)

    def answer(self, program: Program) -> str:
        if not any(lesson for lessons in self.gained.values() for lesson in lessons):
            return "it orders nothing that was not ordered already"
        if self.others:
            return "; ".join(f"the same is ordered {how} {program.where(index)}" for how, index in self.others.items())
        return "no later access depends on what it orders"

    def fence(self, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        self._watch("fence", split, mask, index, *rest)

    def warp_sync(self, split: Split, mask: np.ndarray, index: int) -> None:
        self._watch("warp_sync", split, mask, index)

    def barrier_done(self, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        self._watch("barrier_done", split, mask, index, *rest)

    def cluster_wait(self, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        self._watch("cluster_wait", split, mask, index, *rest)

    def mbarrier_wait(self, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        self._watch("mbarrier_wait", split, mask, index, *rest)

    def bulk_group(self, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        self._watch("bulk_group", split, mask, index, *rest)

    def cp_async_group(self, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        self._watch("cp_async_group", split, mask, index, *rest)

    def wgmma_sync(self, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        self._watch("wgmma_sync", split, mask, index, *rest)


_laboratory: Laboratory | None = None


def _try(index: int) -> Outcome:
    return _laboratory.try_site(index)


def outcomes(laboratory: Laboratory, sites: Iterable[int], processes: int = 1) -> Iterator[Outcome]:
    """The mutants of the given sites, in their order; worker processes are forked from this one."""
    global _laboratory
    _laboratory = laboratory
    sites = list(sites)
    if processes == 1:
        yield from map(_try, sites)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap(_try, sites, chunksize=1)


def table(launch: Launch, found: list[Outcome]) -> dict:
    """A JSON-able record of one launch's mutants: counts, survivors, and every mutant's verdict."""
    counts = {v: sum(o.verdict == v for o in found) for v in VERDICTS}
    return {
        "kernel": launch.kernel,
        "sha256": launch.sha256,
        "sites": len(found),
        "reported": len(found) - counts["survived"],
        **counts,
        "survivors": [asdict(o) for o in found if o.verdict == "survived"],
        "mutants": [[o.line, o.text.split()[0], o.verdict, o.kind] for o in found],
    }


__all__ = ["Laboratory", "Outcome", "Race", "outcomes", "table"]
