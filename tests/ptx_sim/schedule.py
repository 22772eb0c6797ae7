"""List scheduling of straight code, as an assembler does it: the order in which a warp issues a recorded code range.

PTX comes in the order that the front end emitted; ptxas reorders it so that independent chains overlap. Within one
code range (no wait or hand-over to an engine lies inside) instructions are ordered by the longest latency that hangs
on them. Register dependences and the order of side effects are kept.
"""

from __future__ import annotations

import heapq

from .costs import Cost

# Classes that keep their order among each other. Loads may pass those that touch memory asynchronously or not at all.
ORDERED = ("order", "control", "matrix issue", "copy issue", "reduction", "tensor memory", "shuffle")
PASSED = ("matrix issue", "copy issue", "shuffle")


def edges(costs: list[Cost]) -> list[list[tuple[int, float]]]:
    """Per instruction its successors and the clocks that they must stay behind."""
    after: list[list[tuple[int, float]]] = [[] for _ in costs]
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    effect = barrier = -1
    loads: list[int] = []
    for i, cost in enumerate(costs):
        for register in cost.sources:
            if register in writer:
                after[writer[register]].append((i, costs[writer[register]].latency))
            readers.setdefault(register, []).append(i)
        for register in cost.targets:
            for reader in readers.pop(register, ()):
                if reader != i:
                    after[reader].append((i, 0.0))
            if register in writer:
                after[writer[register]].append((i, 0.0))
            writer[register] = i
        if cost.load:
            if barrier >= 0:
                after[barrier].append((i, 0.0))
            loads.append(i)
        elif cost.action or cost.kind in ORDERED:
            if effect >= 0:
                after[effect].append((i, 0.0))
            effect = i
            if cost.kind not in PASSED:
                for other in loads:
                    after[other].append((i, 0.0))
                barrier, loads = i, []
    return after


def order(costs: list[Cost]) -> list[Cost]:
    """The costs in issue order."""
    if len(costs) < 3:
        return costs
    after = edges(costs)
    height = [0.0] * len(costs)
    for i in range(len(costs) - 1, -1, -1):
        height[i] = max((height[j] + max(latency, 1.0) for j, latency in after[i]), default=costs[i].latency)
    waiting = [0] * len(costs)
    for successors in after:
        for j, _ in successors:
            waiting[j] += 1
    ready_at = [0.0] * len(costs)
    pipes: dict[str, float] = {}
    ready = [(-height[i], i) for i in range(len(costs)) if not waiting[i]]
    heapq.heapify(ready)
    later: list[tuple[float, int]] = []
    out: list[Cost] = []
    clock = 0.0
    while ready or later:
        while later and later[0][0] <= clock:
            _, i = heapq.heappop(later)
            heapq.heappush(ready, (-height[i], i))
        if not ready:
            clock = later[0][0]
            continue
        _, i = heapq.heappop(ready)
        cost = costs[i]
        free = pipes.get(cost.pipe, 0.0) if cost.pipe else 0.0
        if free > clock:
            heapq.heappush(later, (free, i))
            continue
        out.append(cost)
        if cost.pipe:
            pipes[cost.pipe] = clock + cost.occupancy
        for j, latency in after[i]:
            ready_at[j] = max(ready_at[j], clock + latency)
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(later, (ready_at[j], j))
        clock += cost.slots
    return out
