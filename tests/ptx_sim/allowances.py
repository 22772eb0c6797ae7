"""Reports about kernels by others that were traced and are known to do no harm on hardware.

An entry names the kernel, the rule, the instructions and the reason. It is no statement that the kernel is right by the
PTX ISA: most entries are real violations that today's hardware or ptxas forgives. Kernels of this project get none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .machine import Machine
from .races import Race


@dataclass(frozen=True)
class Allowance:
    """`kernel`, `first` and `second` are regular expressions: of the entry name and of the two PTX instructions."""

    kernel: str
    kind: str
    first: str
    second: str
    reason: str

    def covers(self, race: Race, kernel: str, first: str, second: str) -> bool:
        return (
            race.kind == self.kind
            and re.search(self.kernel, kernel) is not None
            and re.search(self.first, first) is not None
            and re.search(self.second, second) is not None
        )


ALLOWANCES = (
    Allowance(
        r"sparse_attention_backward.*dsa_bwd_sm100",
        "tensor fence",
        r"tcgen05\.",
        r"tcgen05\.",
        "The wheel's SM100 backward kernels contain no tcgen05.fence at all: they go from mbarrier waits, bar.sync and "
        "arrivals straight to tcgen05.ld and mma. The PTX ISA asks for the fences; to ptxas they only forbid "
        "moving tcgen05 instructions across the synchronisation, which it does not do there.",
    ),
    Allowance(
        r"sparse_attention_backward.*dsa_bwd_sm100(FlashAttentionDSABackwardSm100_|_deterministic|_h16|_h32)",
        "registers",
        r"",
        r"",
        "These kernels compute with results of tcgen05.ld before tcgen05.wait::ld. Registers of a load are tracked by "
        "the hardware's scoreboard, so the values are right; the PTX ISA does not promise it.",
    ),
    Allowance(
        r"dsa_bwd_sm100_h128_(d576_)?2cta",
        "order",
        r"st\.shared\.(b16|v4\.b32)",
        r"tcgen05\.mma",
        "All lanes store V columns, or zeros of invalid slots, and execute fence.proxy.async; then one lane of the "
        "warp arrives, without bar.warp.sync: right only while the warp runs converged, as it does.",
    ),
    Allowance(
        r"dsa_bwd_sm90FlashAttentionDSABackwardSm90",
        "init",
        r"mbarrier\.init",
        r"cp\.async\.bulk",
        "mbarrier.init, bar.sync, tensor copy: no fence.mbarrier_init or fence.proxy.async anywhere in the kernel.",
    ),
    Allowance(
        r"dsa_fwd_sm100_head128_small_topk",
        "overrun",
        r"mbarrier\.try_wait",
        r"",
        "Warps 1 to 3 wait for the last product of a tile without arriving anywhere before the leader's next commit on "
        "the same mbarrier: a warp that were held up for a whole tile would wait for ever. In practice none is.",
    ),
)


def allowed(race: Race, machine: Machine) -> bool:
    code, kernel = machine.program.code, machine.launch.kernel
    return any(a.covers(race, kernel, code[race.first].text, code[race.second].text) for a in ALLOWANCES)
