"""The commands `races` and `sync-mutants`: on saved launches (a folder) or on named subjects (`subjects.py`)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from . import allowances, subjects, sync_mutants
from .launch import Launch
from .machine import Machine
from .memory import SimError
from .parser import PtxError
from .policies import Delay, Priorities
from .races import Race, Races
from .registers import RegisterCheck

RESULTS = Path(__file__).with_name("sync_mutants.json")
DEFAULT_INPUT = (384, 2)
# What RESULTS holds: subject, launch (by number or kernel) or None for all, (slots per row, query tokens) of inputs.
# Rows of several blocks wrap rings; in rows of one block some waits stand alone.
COMMITTED = (
    ("wheel-fwd-h64-d512", "000", [(384, 2)]),
    ("wheel-bwd-h64-d512", "002", [(256, 1)]),
    ("wheel-bwd90-h64-d512", "001", [(256, 1)]),
    ("hopper-fwd-h64-d576", "sparse_mla_fwd_kernel", [(192, 2)]),
    ("hopper-h64-d576", "sparse_mla_bwd_kernel", [(192, 2)]),
    ("hopper-h64-d576-deterministic", "sparse_mla_products_kernel", [(64, 5)]),
    ("sm100-fwd-h64-d512", "000", [(320, 2), (64, 4)]),
    ("sm100-fwd-h128-d512", "000", [(320, 2), (64, 4)]),
    ("sm100-fwd-h64-d576", "000", [(320, 2), (64, 4)]),
    ("sm100-fwd-h128-d576", "000", [(320, 2), (64, 4)]),
    ("sm100-bwd-h64-d512", None, [(320, 3), (64, 4)]),
    ("sm100-bwd-h64-d576", None, [(320, 3), (64, 4)]),
    ("sm100-bwd-h128-d512", None, [(320, 3), (64, 4)]),
    ("sm100-bwd-h128-d576", None, [(320, 3), (64, 4)]),
)


def _launches(target: str, slots: int, tokens: int) -> list[tuple[str, Launch]]:
    """Launches of a folder or of a subject."""
    if Path(target).is_dir():
        found = subjects.launches_in(Path(target))
        if not found:
            sys.exit(f"no launch.json in {target} or its subfolders: record launches with PTX_SIM_DUMP={target}")
        return found
    from . import capture_cute, capture_tilelang

    for capture in (capture_cute, capture_tilelang):
        if capture.available() is None:
            capture.prepare()
    if target not in subjects.subjects():
        sys.exit(f"{target} is neither a folder nor one of: {', '.join(subjects.subjects())}")
    return subjects.record(target, slots, tokens)


def check(launch: Launch, resident: int = 1, schedule: int | None = None) -> tuple[list[Race], list[Race], float]:
    """(reports, allowed reports, microseconds of user CPU time per warp instruction) of one run and the register rules.

    `schedule` seeds an adversarial schedule: engines and warps held back at random.
    """
    memory = launch.memory()
    program = launch.program(memory)
    observer = Races(allow=allowances.allowed)
    options = {} if schedule is None else {"policy": Delay(schedule), "order": Priorities(schedule)}
    machine = Machine(program, launch, memory, resident=resident, observer=observer, **options)
    start = os.times().user
    report = machine.run()
    cost = 1e6 * (os.times().user - start) / max(report.warp_instructions, 1)
    observer.registers(RegisterCheck(program).misuses(report.visits))
    return observer.races, observer.allowed, cost


def races(args: argparse.Namespace) -> int:
    status = 0
    targets = list(subjects.subjects()) if args.targets == ["all"] else args.targets
    for target in targets:
        for name, launch in _launches(target, args.slots, args.tokens):
            for schedule in (None, *range(args.schedules)):
                # Every run starts from the recorded memory.
                contents = [(a, launch.memory().bytes_at(a.base, a.size).copy()) for a in launch.memory().allocations()]
                how = "in order" if schedule is None else f"schedule {schedule}"
                try:
                    found, allowed, cost = check(launch, args.resident, schedule)
                except (SimError, PtxError) as error:
                    print(f"{target} {name} {how}: failed: {error}")
                    status = 1
                    continue
                finally:
                    for item, data in contents:
                        launch.memory().bytes_at(item.base, item.size)[:] = data
                print(
                    f"{target} {name} {launch.kernel[:60]} {how}: {len(found)} reports, {len(allowed)} allowed, "
                    f"{cost:.1f} us of user CPU time per warp instruction"
                )
                for race in found:
                    print(race.text)
                    status = 1
                if args.allowed:
                    for race in allowed:
                        print(f"allowed: {race.text}")
    return status


def _inputs(target: str, wanted: str | None, inputs: list[tuple[int, int]]) -> Iterator[tuple[str, list[Launch]]]:
    """Each launch of a target by its number, or only the wanted ones by number or kernel, on all inputs."""
    found: dict[str, list[Launch]] = {}
    kernels = []
    for slots, tokens in inputs[:1] if Path(target).is_dir() else inputs:
        for number, launch in _launches(target, slots, tokens):
            kernels.append(f"{number} {launch.kernel[:60]}")
            if wanted in (None, number, launch.kernel):
                found.setdefault(wanted or number, []).append(launch)
    if not found:
        sys.exit(f"{target} has no launch {wanted}, but {', '.join(kernels)}")
    yield from found.items()


def mutants(args: argparse.Namespace) -> int:
    results = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    inputs = args.input or [DEFAULT_INPUT]
    for target, wanted, inputs in [(t, args.launch, inputs) for t in args.targets] or COMMITTED:
        for name, launches in _inputs(target, wanted, inputs):
            inquiry = sync_mutants.Inquiry(launches, args.resident)
            if not inquiry.sites:
                continue
            record = _mutants(f"{target} {name}", inquiry, args.processes)
            if args.json is not None:
                key = f"{target} {name}, " + " and ".join(f"{slots} slots {tokens} tokens" for slots, tokens in inputs)
                results[key] = {"inputs": inputs, **record}
                args.json.write_text(json.dumps(results, indent=0) + "\n")
    return 0


def _mutants(title: str, inquiry: sync_mutants.Inquiry, processes: int) -> dict:
    """Run and print all mutants of a kernel."""
    if any(laboratory.races.races for laboratory in inquiry.laboratories):
        sys.exit(f"{title} has reports unmutated: run `races` first")
    sites = inquiry.sites
    print(f"{title} {inquiry.laboratories[0].launch.kernel[:60]}: {len(sites)} sites", flush=True)
    found = []
    for outcome in sync_mutants.outcomes(inquiry, sites, processes):
        found.append(outcome)
        if outcome.verdict == "survived":
            print(f"  line {outcome.line} {outcome.text}: {outcome.kind}: {outcome.detail}", flush=True)
    survivors = [site for site, outcome in zip(sites, found, strict=True) if outcome.verdict == "survived"]
    gone, wrong = inquiry.redundant(survivors, processes)
    record = sync_mutants.table(inquiry, found, gone, wrong)
    print(f"  {record['reported']} of {record['sites']} reported, {record['twin']} twins, {record['idle']} idle")
    if survivors:
        schedules = wrong or f"{sync_mutants.SCHEDULES} adversarial schedules agree"
        print(f"  {len(gone)} of the survivors can go together: no report without them, {schedules}")
    return record


def _input(text: str) -> tuple[int, int]:
    slots, tokens = text.split(",")
    return int(slots), int(tokens)


def add(commands: argparse._SubParsersAction) -> None:
    """Add both commands to the command line."""
    sub = commands.add_parser("races", help="happens-before races of saved launches or named kernels")
    sub.add_argument("targets", nargs="+", help="folders of launches, names of subjects, or all")
    sub.add_argument("--schedules", type=int, default=0, help="adversarial schedules to run as well")
    sub.add_argument("--resident", type=int, default=1, help="clusters that run at the same time")
    sub.add_argument("--slots", type=int, default=128, help="slots per row of a named kernel's input")
    sub.add_argument("--tokens", type=int, default=2, help="its query tokens")
    sub.add_argument("--allowed", action="store_true", help="print the reports that a documented allowance covers, too")
    sub.set_defaults(do=races)
    sub = commands.add_parser("sync-mutants", help="take out one wait, fence, commit or arrival at a time")
    sub.add_argument(
        "targets", nargs="*", help=f"folders of launches, or names of subjects; none: those of {RESULTS.name}"
    )
    sub.add_argument("--launch", help="only the launch of this number (000, 001 ...) or kernel")
    sub.add_argument("--processes", type=int, default=2)
    sub.add_argument("--resident", type=int, default=1, help="clusters that run at the same time")
    sub.add_argument(
        "--input",
        type=_input,
        action="append",
        metavar="SLOTS,TOKENS",
        help="slots per row and query tokens of a named kernel's input, by default 384,2; of several, one must report",
    )
    sub.add_argument("--json", type=Path, help=f"add the results to this file ({RESULTS.name} is the committed one)")
    sub.set_defaults(do=mutants)
