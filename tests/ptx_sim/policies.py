"""When asynchronous work completes: policies for `Machine(policy=...)`. Without one, everything completes at issue."""

from __future__ import annotations

import random
from collections import deque

from .machine import AsyncOp, Machine, Split

# Engines whose operations complete in the order of issue, per key: the tensor cores per CTA pair or warpgroup, cp.async
# per warp. All other engines complete in any order.
IN_ORDER = ("tcgen05", "wgmma", "cp.async")
GROUPED = {"cp.async": ("cp.async",), "bulk": ("bulk store", "tensor store")}


class Delay:
    """Holds operations back at random; whatever is left runs when nothing else can, or when a wait demands it.

    A correct program gives the same results under every seed.
    """

    def __init__(self, seed: int = 0, eagerness: float = 0.1) -> None:
        self.random = random.Random(seed)
        self.eagerness = eagerness
        self.queues: dict[tuple, deque[AsyncOp]] = {}
        # Per warp and kind of group: the operations of each committed group, and those not yet committed.
        self.groups: dict[tuple, list] = {}
        self.delayed = 0

    def _key(self, op: AsyncOp) -> tuple:
        warp = op.split.warp
        cluster = warp.cta.cluster.index
        if op.engine == "tcgen05":
            return ("tcgen05", cluster, warp.cta.rank & ~1)
        if op.engine == "wgmma":
            return ("wgmma", cluster, warp.cta.rank, warp.index // 4)
        if op.engine == "cp.async":
            return ("cp.async", cluster, warp.cta.rank, warp.index)
        return (op.engine, cluster, id(op))

    def submit(self, machine: Machine, op: AsyncOp) -> None:
        self.queues.setdefault(self._key(op), deque()).append(op)
        for kind, engines in GROUPED.items():
            if op.engine in engines:
                self.groups.setdefault((kind, id(op.split.warp)), [[]])[-1].append(op)
        self.delayed += 1
        while self.queues and self.random.random() < self.eagerness:
            self._run_one()

    def _run_one(self) -> None:
        key = self.random.choice(list(self.queues))
        self._run_head(key)

    def _run_head(self, key: tuple) -> None:
        queue = self.queues[key]
        op = queue.popleft()
        if not queue:
            del self.queues[key]
        op.split.machine.execute(op)

    def _finish(self, op: AsyncOp) -> None:
        """Run an operation and whatever must come before it."""
        key = self._key(op)
        while op in self.queues.get(key, ()):
            self._run_head(key)

    def advance(self, machine: Machine) -> bool:
        if not self.queues:
            return False
        self._run_one()
        return True

    def group(self, split: Split, kind: str, action: str, count: int) -> None:
        """Commit opens a new group; a wait finishes all but the last `count` groups."""
        if kind not in GROUPED:
            return
        groups = self.groups.setdefault((kind, id(split.warp)), [[]])
        if action == "commit_group" or action == "commit":
            groups.append([])
            return
        if action == "wait_all":
            groups.append([])
            count = 0
        for group in groups[: max(len(groups) - 1 - count, 0)]:
            for op in group:
                self._finish(op)
        del groups[: max(len(groups) - 1 - count, 0)]

    def flush(self) -> None:
        while self.queues:
            self._run_one()


class Priorities:
    """Scheduling order (`Machine(order=...)`): of the warps that can run, the one that a random permutation prefers.

    Every `patience` choices the permutation changes, so that a warp that spins cannot keep the others from running.
    """

    def __init__(self, seed: int = 0, patience: int = 200) -> None:
        self.random = random.Random(seed)
        self.patience = patience
        self.left = 0
        self.rank: dict[int, float] = {}

    def choose(self, ready: deque[Split]) -> Split:
        """Take one split out of `ready`."""
        self.left -= 1
        if self.left < 0:
            self.left = self.patience
            self.rank = {}
        best = min(ready, key=lambda split: self.rank.setdefault(id(split.warp), self.random.random()))
        ready.remove(best)
        return best
