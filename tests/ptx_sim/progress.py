"""Forward progress: which splits spin in place, which waiting lanes may go on, and what is said when nothing moves.

Lanes that wait at the meeting point of a divergent branch do so for speed only: with independent thread scheduling
(CUDA programming guide, SIMT architecture) every lane makes progress in the end. So when nothing else can run, lanes
are let go from their meeting point: per-lane spinlocks and barriers on both sides of a branch rely on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .machine import Cluster, Machine, Split

# States of one split that are remembered while nothing else happens; a loop that counts never repeats one.
REMEMBERED = 64


class Spins:
    """Recognises splits that repeat a state (program counter and registers) while nothing else moves."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        # Grows whenever a split ends, blocks or meets another.
        self.epoch = 0
        self.rounds = 0
        self.mark = -1

    def slice(self, split: Split) -> bool:
        """A split used its time slice. True when it and every other split that could run are spinning."""
        key = (self.machine.progress, self.epoch)
        if split.spin is None or split.spin[0] != key or len(split.spin[1]) > REMEMBERED:
            split.spin = (key, set())
            split.spinning = False
        state = (split.pc, _registers(split))
        if state not in split.spin[1]:
            split.spin[1].add(state)
            return False
        split.spinning = split.spun = True
        return all(s.spinning and s.spin[0] == key for s in self.machine.ready)

    def out_of_turns(self) -> bool:
        """Whether timed waits have timed out three times without any progress."""
        self.rounds = self.rounds + 1 if self.mark == self.machine.progress else 0
        self.mark = self.machine.progress
        return self.rounds > 3


def _registers(split: Split) -> int:
    return hash(tuple(file[..., split.mask].tobytes() for file in split.warp.namespace["FILES"]))


def let_lanes_go(clusters: list[Cluster], report: str) -> bool:
    """Let the lanes that wait at one meeting point go on without the others; False when none wait.

    `report` says why: it is what the user must see if that does not help (see `Warp.relaxed`).
    """
    for cluster in clusters:
        for cta in cluster.ctas:
            for warp in cta.warps:
                for split in warp.splits:
                    if _release(split, report):
                        return True
    return False


def _release(split: Split, report: str) -> bool:
    from .machine import Split

    join = split.join
    while join is not None:
        waiting = join.arrived & join.expected
        if waiting.any():
            parent = join.parent
            join.expected = join.expected & ~waiting
            join.arrived = np.zeros(32, bool)
            join.open = True
            freed = Split(parent.warp, waiting, parent.pc, parent.rpc, parent.join)
            freed.spun = True
            parent.warp.splits.append(freed)
            parent.warp.relaxed = parent.warp.relaxed or report
            parent.machine.ready.append(freed)
            return True
        join = join.parent.join
    return False


def gather(split: Split, meeting: object) -> bool:
    """In front of an .aligned instruction, after lanes were let go: merge with those that wait here in the same place.

    The split stops here, until the missing lanes come or, when none is missing, to run again with the mask of all.
    """
    for other in [s for s in meeting.waiters if s.rpc == split.rpc and s.join is split.join]:
        meeting.waiters.remove(other)
        split.warp.splits.remove(other)
        split.set_mask(split.mask | other.mask)
    if split.mask.tobytes() == split.warp.live.tobytes():
        # All are here: the instruction runs again, with the mask of all.
        split.warp.relaxed = None
        split.machine.ready.append(split)
        return True
    meeting.arrived = split.mask
    return split.park(meeting)
