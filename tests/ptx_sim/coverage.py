"""Which instruction forms a kernel uses, and what witnesses that the simulator models them right.

A form is an opcode with its modifiers, or one that only shows at run time: the shape, layout and source of a matrix
product, the box and swizzle of a tensor copy. A witness is a kernel by others that is known to work on hardware and
gives right results here, or a case that an H200 has judged. `witnesses.json` is generated (`python -m tests.ptx_sim
witnesses`), never edited.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from .launch import Launch
from .machine import Report

WITNESSES = Path(__file__).with_name("witnesses.json")
JUDGED = Path(__file__).with_name("judged_forms.json")


def executed_forms(report: Report) -> list[str]:
    """Opcode forms of executed instructions, and the run-time forms."""
    return sorted(report.forms | {normal(op) for op in report.opcodes})


def normal(op: str) -> str:
    """One spelling for forms that mean the same: no cache hints, `.shared` for `.shared::cta`, moves by width only."""
    op = re.sub(r"\.(L1|L2)::[\w:]+", "", op)
    op = re.sub(r"\.level::eviction_priority|\.uni\b", "", op)
    op = op.replace(".x4.m8n8.", ".m8n8.x4.")  # TileLang's order of a matrix store's modifiers; the ISA has the other
    if op.startswith("tcgen05.mma.ws."):
        op = op.replace(".collector::b0::discard", "")  # the default
    if not op.startswith(("cp.async.bulk", "cp.reduce", "tcgen05", "cvta")):
        op = op.replace(".shared::cta", ".shared")
    if op.startswith(("ld.", "st.", "mov.", "selp.")):
        op = op.replace(".nc", "")
        return re.sub(r"\.[usf](8|16|32|64)$", r".b\1", op)
    if op.startswith(("setp.eq.", "setp.ne.")):
        return re.sub(r"\.[us](16|32|64)$", r".b\1", op)
    return op


def forms_of(launch: Launch, **options: object) -> list[str]:
    """Run a launch and list the forms that it executed."""
    return executed_forms(launch.run(**options))


def record(kernels: dict[str, list[Launch]]) -> dict:
    """Run launches and describe them: name -> {sha256, forms}."""
    found: dict = {}
    for name, launches in kernels.items():
        for number, launch in enumerate(launches):
            found[f"{name}, launch {number}"] = {"sha256": launch.sha256, "forms": forms_of(launch)}
    return found


def load(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def witnesses() -> dict[str, list[str]]:
    """Form -> the kernels and judged cases that witness it."""
    out: dict[str, list[str]] = {}
    for path in (WITNESSES, JUDGED):
        for name, entry in load(path).items():
            for form in entry["forms"]:
                out.setdefault(form, []).append(name)
    return out


def pending() -> set[str]:
    """Forms of the H200 micro-kernels, judged or not."""
    from . import judge, judge_cases

    found: set[str] = set()
    for case in judge_cases.cases():
        found.update(judge.simulate(case)[1])
    return found


def table(kernels: dict[str, list[str]]) -> str:
    """Markdown: every form of the given kernels (name -> forms) beside a witness, unproven ones first."""
    known = witnesses()
    waiting = pending()
    users: dict[str, list[str]] = {}
    for name, forms in kernels.items():
        for form in forms:
            users.setdefault(form, []).append(name)
    missing = sorted(f for f in users if f not in known)
    lines = [
        f"{len(users)} forms, {len(missing)} without a witness.",
        "",
        "| form | used by | witness |",
        "|---|---|---|",
    ]
    for form in missing + sorted(f for f in users if f in known):
        witness = known.get(form, ["H200 micro-kernel, not yet run" if form in waiting else "**unproven**"])
        more = f" and {len(witness) - 1} more" if len(witness) > 1 else ""
        used = users[form][0] + (f" and {len(users[form]) - 1} more" if len(users[form]) > 1 else "")
        lines.append(f"| `{form}` | {used} | {witness[0]}{more} |")
    return "\n".join(lines)
