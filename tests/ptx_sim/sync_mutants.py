"""Synchronisation mutants: is a report made when one wait, fence, commit or arrival of a working kernel is missing?

Every such instruction that a run executes is one mutant. It is taken out (a wait returns at once), the launch runs
again under race tracking, and the outcome is race, deadlock, error (a defect that the simulator itself reports), wrong
result or survived.

A mutant may be judged on several inputs of one kernel (`Inquiry`): it is reported if it is on any of them.

A survivor is not yet a hole: compilers and authors synchronise more than they must. So for each the other edge is
looked for that orders the same, and put to the test: without both, there must be a report that is not there without the
other edge alone (`twin`). What remains orders nothing in this run (`idle`).

The proof that survivors are redundant takes them out together, one after the other: whatever can go with all that went
before it, without a report and with the same results, is `redundant`; what cannot is needed then. Without all redundant
ones the kernel must also pass adversarial schedules: a wrong result there is a hole in tracking.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from . import allowances
from .launch import Launch
from .machine import Deadlock, Machine, Report, Split
from .memory import SimError
from .observer import Observer
from .parser import Instr, PtxError, Reg
from .policies import Delay, Priorities
from .races import Race, RaceFound, Races
from .registers import RegisterCheck
from .translate import Emit, Program, op

VERDICTS = ("race", "deadlock", "error", "wrong result", "survived")
# Relative error of a sum whose order the schedule decides.
LOOSE = 1e-3
# Adversarial schedules that survivors run under.
SCHEDULES = 6


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


def without(program: Program, *sites: int) -> Program:
    """The program with synchronisation instructions taken out."""
    for index in sites:
        instr = program.code[index]
        wait = instr.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))
        operands = [o for o in instr.operands[:1] if isinstance(o, Reg)] if wait else []
        program = program.with_instruction(index, replace(instr, op="removed", parts=("removed",), operands=operands))
    return program


@dataclass(frozen=True)
class Outcome:
    """`line` and `text` of the removed PTX instruction, the verdict, and its report or the other edge.

    `kind` is that of a race; of survivors `twin` (the other edge was shown to order the same) or `idle`.
    """

    line: int
    text: str
    verdict: str
    kind: str = ""
    detail: str = ""


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
        self.loose = [False] * len(self.truth)
        for seed in range(2):
            self.run(self.program, Observer(), order=Priorities(seed))
            self.loose = [old or a != b for old, a, b in zip(self.loose, self.truth, self._state(), strict=True)]
        self.misused = self._misused()
        self._known: dict[tuple, set] = {}

    def run(self, program: Program, observer: Observer | None = None, **options: object) -> tuple[Observer, Report]:
        for item, data in self.initial:
            self.memory.bytes_at(item.base, item.size)[:] = data
        observer = observer or Races(allow=allowances.allowed)
        machine = Machine(
            program, self.launch, self.memory, resident=self.resident, observer=observer, limit=50, **options
        )
        return observer, machine.run()

    def _misused(self, *sites: int) -> set[tuple]:
        found = self.registers.misuses(self.report.visits, frozenset(sites))
        return {("registers", m.first, m.second) for m in found if m.second not in sites}

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

    def verdict(self, *sites: int) -> tuple[str, str, str]:
        """(verdict, kind, report) of the kernel without these instructions."""
        fresh = [
            m
            for m in self.registers.misuses(self.report.visits, frozenset(sites))
            if ("registers", m.first, m.second) not in self.misused and m.second not in sites
        ]
        if fresh:
            return "race", "registers", fresh[0].text
        observer = Races(stop=True, allow=allowances.allowed)
        try:
            _, report = self.run(without(self.program, *sites), observer)
        except RaceFound as found:
            return "race", observer.races[0].kind, str(found)
        except Deadlock as error:
            return "deadlock", "", str(error).split("\n")[0]
        except (SimError, PtxError, MemoryError) as error:
            return "error", "", str(error).split("\n")[0]
        new = [f for f in report.findings if f.split("\n")[0].split(":")[0] not in self.findings]
        if new:
            return "error", "finding", new[0].split("\n")[0]
        return "survived" if self._same() else "wrong result", "", ""

    def _reports(self, *sites: int) -> set[tuple]:
        """Everything that is reported without these instructions, up to the first error."""
        sites = tuple(sorted(sites))
        found = self._known.get(sites)
        if found is None:
            found = self._misused(*sites)
            observer = Races(allow=allowances.allowed, limit=1000)
            try:
                self.run(without(self.program, *sites), observer)
            except (SimError, PtxError, MemoryError) as error:
                found.add((type(error).__name__,))
            found |= {(race.kind, race.first, race.second) for race in observer.races}
            self._known[sites] = found
        return found

    def explain(self, index: int) -> tuple[str, str]:
        """(`twin` or `idle`, the other edge in words) of a survivor."""
        code, where = self.program.code, self._line
        same = tuple(s for s in self.sites if s != index and code[s].op == code[index].op)
        # Register rules need no run: look among all instructions of the same kind first.
        for other in same:
            if self._misused(index, other) - self._misused(other):
                return "twin", f"the same is ordered by {where(other)}; without both: registers"
        # What teaches the same warps the same, and the neighbours of the same kind.
        candidates = self._twins(index)
        beside = [s for s in same if s < index][-1:] + [s for s in same if s > index][:1]
        candidates += [s for s in beside if s not in candidates]
        for other in candidates:
            if fresh := self._reports(index, other) - self._reports(other):
                return "twin", f"the same is ordered by {where(other)}; without both: {sorted(fresh)[0][0]}"
        if same and code[index].base in ("fence", "tcgen05", "wgmma"):
            fresh = self._reports(index, *same) - self._reports(*same)
            if fresh:
                lines = ", ".join(str(code[s].line) for s in same)
                return "twin", f"the same is ordered by lines {lines} together; without all: {sorted(fresh)[0][0]}"
        other = f"; the same is ordered by {where(candidates[0])}" if candidates else ""
        return "idle", "nothing needs it" + other

    def _line(self, index: int) -> str:
        """A PTX line without the path of its source, for results that are committed."""
        instr = self.program.code[index]
        return f"PTX line {instr.line}: {instr.text[:160]}"

    def under_schedule(self, seed: int, *sites: int) -> str:
        """What goes wrong without the instructions when engines and warps are held back at random; empty: nothing."""
        try:
            self.run(without(self.program, *sites), Observer(), policy=Delay(seed), order=Priorities(seed))
        except (SimError, PtxError, MemoryError) as error:
            return f"schedule {seed}: {str(error).splitlines()[0]}"
        return "" if self._same() else f"schedule {seed}: wrong result"

    def _twins(self, index: int, most: int = 3) -> list[int]:
        """Instructions that teach the same warps what the removed one did, the most frequent first."""
        gains = Explanation(index)
        self.run(self.program, gains)
        later = Explanation(index, gains.gained)
        self.run(without(self.program, index), later)
        return [site for site, _ in later.others.most_common(most)]


class Explanation(Races):
    """First run (`gained` not given): what does each execution of instruction `site` teach its warp?

    Second run, without that instruction: which other instructions (`others`) teach the warp the same, before or after?
    """

    def __init__(self, site: int, gained: dict | None = None) -> None:
        super().__init__(allow=allowances.allowed)
        self.site = site
        self.second = gained is not None
        self.gained: dict[tuple, list[dict[tuple, int]]] = gained or {}
        self.teachers: dict[tuple, int] = {}
        self.open: dict[int, list[dict]] = {}
        self.others: Counter[int] = Counter()
        self.counts: dict[int, int] = {}

    def _watch(self, name: str, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        _, warp = self._of(split)
        before = warp.everything()
        getattr(Races, name)(self, split, mask, index, *rest)
        after = warp.everything()
        rows, actors = np.nonzero(after > before)
        news = {(r, a): int(after[r, a]) for r, a in zip(rows.tolist(), actors.tolist(), strict=True)}
        key = (split.cta.cluster.index, split.cta.rank, split.warp.index)
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
                self.others[index] += 1

    def removed(self, split: Split, mask: np.ndarray, index: int) -> None:
        _, warp = self._of(split)
        key = (split.cta.cluster.index, split.cta.rank, split.warp.index)
        number = self.counts[id(split.warp)] = self.counts.get(id(split.warp), -1) + 1
        lessons = self.gained.get(key, [])
        if not self.second or number >= len(lessons):
            return
        known = warp.everything()
        wanted = dict(lessons[number])
        for item, clock in lessons[number].items():
            if known[item] >= clock:
                del wanted[item]
                if (*key, *item) in self.teachers:
                    self.others[self.teachers[(*key, *item)]] += 1
        self.open.setdefault(id(split.warp), []).append(wanted)


def _watched(name: str) -> object:
    def hook(self: Explanation, split: Split, mask: np.ndarray, index: int, *rest: object) -> None:
        self._watch(name, split, mask, index, *rest)

    return hook


for _name in (
    "fence",
    "warp_sync",
    "barrier_done",
    "cluster_wait",
    "mbarrier_wait",
    "bulk_group",
    "cp_async_group",
    "wgmma_sync",
):
    setattr(Explanation, _name, _watched(_name))


class Inquiry:
    """The mutants of one kernel, judged on launches of several inputs."""

    def __init__(self, launches: list[Launch], resident: int = 1) -> None:
        if len({launch.sha256 for launch in launches}) != 1:
            raise ValueError(f"{len(launches)} inputs of {launches[0].kernel} are not launches of one PTX")
        self.laboratories = [Laboratory(launch, resident) for launch in launches]
        self.code = self.laboratories[0].program.code

    @property
    def sites(self) -> list[int]:
        """Every wait, fence, commit and arrival that any of the inputs executes."""
        return sorted(set().union(*(laboratory.sites for laboratory in self.laboratories)))

    def verdict(self, *sites: int) -> tuple[str, str, str]:
        """(verdict, kind, report) of the first input that reports it."""
        found = ("survived", "", "")
        for laboratory in self.laboratories:
            if not laboratory.races.executed.isdisjoint(sites):
                found = laboratory.verdict(*sites)
            if found[0] != "survived":
                break
        return found

    def try_site(self, index: int) -> Outcome:
        """Take out one instruction and see."""
        verdict, kind, detail = self.verdict(index)
        for laboratory in self.laboratories:
            if verdict == "survived" and kind != "twin" and index in laboratory.races.executed:
                kind, detail = laboratory.explain(index)
        instr = self.code[index]
        return Outcome(instr.line, instr.text[:120], verdict, kind, detail)

    def redundant(self, survivors: Iterable[int], processes: int = 1) -> tuple[list[int], str]:
        """Survivors that can go together, and what adversarial schedules then get wrong (empty: nothing)."""
        gone: list[int] = []
        left = list(survivors)
        with _workers(self, processes) as each:
            while left:
                # Several at a time, as if each could go: what lies behind the first that cannot was tried in vain.
                ahead = [(*gone, *left[: n + 1]) for n in range(min(processes, len(left)))]
                can_go = itertools.takewhile(lambda found: found[0] == "survived", each(_verdict, ahead))
                count = sum(1 for _ in can_go)
                gone += left[:count]
                left = left[count + (count < len(ahead)) :]
            runs = list(itertools.product(range(len(self.laboratories)), range(SCHEDULES))) if gone else []
            wrong = next(filter(None, each(partial(_under_schedule, gone), runs)), "")
        return gone, wrong


_inquiry: Inquiry | None = None


def _try(index: int) -> Outcome:
    return _inquiry.try_site(index)


def _verdict(sites: tuple[int, ...]) -> tuple[str, str, str]:
    return _inquiry.verdict(*sites)


def _under_schedule(sites: list[int], which: tuple[int, int]) -> str:
    laboratory, seed = which
    return _inquiry.laboratories[laboratory].under_schedule(seed, *sites)


@contextmanager
def _workers(inquiry: Inquiry, processes: int) -> Iterator[Callable[[Callable, Iterable], Iterator]]:
    """A `map` of questions to an inquiry, in this process or in several, which are forked from it."""
    global _inquiry
    _inquiry = inquiry
    if processes == 1:
        yield map
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield pool.imap


def outcomes(inquiry: Inquiry, sites: Iterable[int], processes: int = 1) -> Iterator[Outcome]:
    """The mutants of the given sites, in their order."""
    with _workers(inquiry, processes) as each:
        yield from each(_try, list(sites))


def table(inquiry: Inquiry, found: list[Outcome], gone: list[int], wrong: str) -> dict:
    """A JSON-able record of a kernel's mutants: counts, survivors, and every mutant's verdict.

    `gone` and `wrong` are those of `Inquiry.redundant`.
    """
    launch = inquiry.laboratories[0].launch
    counts = {v: sum(o.verdict == v for o in found) for v in VERDICTS}
    lines = {inquiry.code[site].line for site in gone}
    survivors = [asdict(o) | {"redundant": o.line in lines} for o in found if o.verdict == "survived"]
    return {
        "kernel": launch.kernel,
        "sha256": launch.sha256,
        "sites": len(found),
        "reported": len(found) - counts["survived"],
        "twin": sum(o.kind == "twin" for o in found),
        "idle": sum(o.kind == "idle" for o in found),
        "redundant": len(gone),
        "wrong without the redundant": wrong,
        **counts,
        "survivors": survivors,
        "mutants": [[o.line, o.text.split()[0], o.verdict, o.kind] for o in found],
    }


__all__ = ["Inquiry", "Laboratory", "Outcome", "Race", "outcomes", "table"]
