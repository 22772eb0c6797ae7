"""Counters of a trace: instructions by class, matrix work by shape, bytes by path, waits by site."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .costs import kind_of
from .trace import Op, Trace


@dataclass
class Counters:
    """Totals over the recorded CTAs. Instructions are PTX warp instructions; bytes are payload."""

    ctas: int = 0
    warps: int = 0
    instructions: Counter = field(default_factory=Counter)
    # Shape -> [products, FLOP].
    matrix: dict[str, list[int]] = field(default_factory=dict)
    # (path, what) -> bytes.
    bytes: Counter = field(default_factory=Counter)
    # Instruction index -> successful waits.
    waits: Counter = field(default_factory=Counter)

    @property
    def flop(self) -> int:
        return sum(flop for _, flop in self.matrix.values())


def shape_name(op: Op) -> str:
    """The form of a matrix operation in PTX terms."""
    if op.shape[0] == "wgmma":
        return f"wgmma m64n{op.shape[2]}k16, A in {'registers' if op.shape[1] else 'shared memory'}"
    if op.shape[0] == "tcgen05":
        _, pair, ws, m, n = op.shape
        return f"tcgen05.mma cta_group::{2 if pair else 1}{' ws' if ws else ''} M{m} N{n} K16"
    return op.shape[0]


def count(trace: Trace) -> Counters:
    found = Counters(len({w.cta for w in trace.warps}), len(trace.warps))
    for index, times in trace.executed.items():
        found.instructions[kind_of(trace.code[index])] += times
    for (path, kind), size in trace.traffic.items():
        name = {"global": "L2", "distributed shared": "distributed shared memory"}.get(path, path)
        found.bytes[name, f"warps {kind}"] += size
    for op in trace.ops:
        if op.shape:
            entry = found.matrix.setdefault(shape_name(op), [0, 0])
            entry[0] += 1
            entry[1] += op.flop * len(op.ctas)
            found.bytes["shared", "matrix operands"] += op.operand_bytes * len(op.ctas)
            continue
        found.bytes["L2", "copies read"] += op.global_read
        found.bytes["L2", "copies write"] += op.global_write
        found.bytes["L2", "copies add"] += op.global_reduce
        found.bytes["shared", "copies read"] += op.shared_read
        for cta, size in op.shared_write.items():
            remote = cta != op.cta and not op.global_read
            found.bytes["distributed shared memory" if remote else "shared", "copies write"] += size
    found.waits = trace.waits
    return found


def table(trace: Trace, counters: Counters) -> str:
    """Counters as text."""
    lines = [f"{counters.ctas} CTA, {counters.warps} warps, {sum(counters.instructions.values())} warp instructions"]
    lines += [f"  {times:10d}  {kind}" for kind, times in counters.instructions.most_common()]
    lines.append(f"matrix work: {counters.flop:.4g} FLOP")
    for shape, (times, flop) in sorted(counters.matrix.items()):
        lines.append(f"  {times:10d}  {shape}: {flop:.4g} FLOP")
    lines.append("bytes")
    for (path, what), size in sorted(counters.bytes.items()):
        if size:
            lines.append(f"  {size:10d}  {path}: {what}")
    lines.append("successful waits by site")
    for index, times in counters.waits.most_common():
        lines.append(f"  {times:10d}  {trace.where(index)}")
    return "\n".join(lines)
