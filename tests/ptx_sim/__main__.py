"""Command line: `python -m tests.ptx_sim run DUMP_DIR`, `speed`, `opcodes`, `coverage`, `predict`, `races`, others."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import assembly, coverage, mutate, race_commands, subjects, timing_commands
from .launch import Launch
from .machine import Machine
from .memory import SimError
from .parser import PtxError, parse
from .translate import lookup


def launches_in(folder: Path) -> list[tuple[str, Launch]]:
    """The saved launches in a folder or in its subfolders."""
    found = subjects.launches_in(folder)
    if not found:
        sys.exit(f"no launch.json in {folder} or its subfolders: record launches with PTX_SIM_DUMP={folder}")
    return found


def run(args: argparse.Namespace) -> int:
    status = 0
    for name, launch in launches_in(args.folder):
        print(
            f"{name}: {launch.kernel[:80]} grid {launch.grid} block {launch.block} cluster {launch.cluster} "
            f"shared {launch.shared_bytes} B"
        )
        try:
            if not args.no_ptxas:
                assembly.assemble(launch.ptx)
            memory = launch.memory()
            program = launch.program(memory)
            report = Machine(program, launch, memory, resident=args.resident, strict=args.strict).run()
        except (SimError, PtxError) as error:
            print(f"  failed: {error}")
            status = 1
            continue
        print(
            f"  {report.warp_instructions} warp instructions in {report.seconds:.2f} s "
            f"({report.microseconds_per_instruction:.1f} us of CPU time each)"
        )
        for finding in report.findings:
            print(f"  {finding}")
        if args.save:
            for item in memory.allocations():
                path = args.save / f"{name}.{item.name.replace(' ', '_')}.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                memory.bytes_at(item.base, item.size).tofile(path)
    return status


def opcodes(args: argparse.Namespace) -> int:
    """Opcode forms of a PTX file, and which of them the simulator does not know."""
    from . import opcodes as _  # noqa: F401 - fills the table

    found: dict[str, int] = {}
    unknown = set()
    for kernel in parse(args.file.read_text()).kernels.values():
        for instr in kernel.body:
            found[instr.op] = found.get(instr.op, 0) + 1
            try:
                lookup(instr)
            except PtxError:
                unknown.add(instr.op)
    for form in sorted(found, key=lambda f: -found[f]):
        print(f"{found[form]:6d} {'unknown ' if form in unknown else ''}{form}")
    return bool(unknown)


def mutants(args: argparse.Namespace) -> int:
    for name, launch in launches_in(args.folder):
        laboratory = mutate.Laboratory(launch)
        outcomes = laboratory.sample(args.count, args.seed)
        print(f"{name}: {mutate.summary(outcomes, laboratory.program)}")
    return 0


def show_coverage(args: argparse.Namespace) -> int:
    kernels: dict[str, list[str]] = {}
    for folder in args.folders:
        for _, launch in launches_in(folder):
            # Variants of one kernel (its launches differ in their PTX) count together.
            forms = kernels.setdefault(launch.kernel, [])
            forms += [form for form in coverage.forms_of(launch) if form not in forms]
    print(coverage.table(kernels))
    return 0


def make_witnesses(args: argparse.Namespace) -> int:
    """Run the foreign kernels and write what they witness."""
    from . import foreign_dsa, foreign_gemm

    if (reason := foreign_dsa.unavailable()) is not None:
        sys.exit(reason)
    found = coverage.record(foreign_dsa.all_kernels() | foreign_gemm.all_kernels())
    coverage.WITNESSES.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    print(f"{len(found)} launches, {len({f for e in found.values() for f in e['forms']})} forms")
    return 0


def show_speed(args: argparse.Namespace) -> int:
    from . import foreign_dsa, speed

    if (reason := foreign_dsa.unavailable()) is not None:
        sys.exit(reason)
    rows, most = speed.table(args.repeats, args.only)
    print("\n".join(rows))
    print(f"{most:.2f} us of CPU time per warp instruction at most; the aim is {speed.LIMIT}")
    return int(most > speed.LIMIT)


def run_judge(args: argparse.Namespace) -> int:
    from . import judge

    return judge.main(args)


def run_judge_kernels(args: argparse.Namespace) -> int:
    from . import judge_kernels

    return judge_kernels.main(args)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_sim", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("run", help="execute saved launches")
    sub.add_argument("folder", type=Path)
    sub.add_argument("--resident", type=int, default=1, help="clusters that run at the same time")
    sub.add_argument("--strict", action="store_true", help="findings are failures")
    sub.add_argument("--no-ptxas", action="store_true", help="do not assemble the PTX first, where ptxas is on PATH")
    sub.add_argument("--save", type=Path, help="folder for the tensors after the run")
    sub.set_defaults(do=run)
    sub = commands.add_parser("speed", help="CPU time per warp instruction of the foreign kernels")
    sub.add_argument("--only", default="", help="kernels whose name contains this")
    sub.add_argument("--repeats", type=int, default=3)
    sub.set_defaults(do=show_speed)
    sub = commands.add_parser("opcodes", help="list the opcode forms of a PTX file")
    sub.add_argument("file", type=Path)
    sub.set_defaults(do=opcodes)
    sub = commands.add_parser("mutants", help="single-instruction mutants of saved launches")
    sub.add_argument("folder", type=Path)
    sub.add_argument("--count", type=int, default=300)
    sub.add_argument("--seed", type=int, default=0)
    sub.set_defaults(do=mutants)
    sub = commands.add_parser("coverage", help="forms of saved launches beside their witnesses")
    sub.add_argument("folders", type=Path, nargs="+")
    sub.set_defaults(do=show_coverage)
    sub = commands.add_parser("witnesses", help="regenerate witnesses.json from the foreign kernels")
    sub.set_defaults(do=make_witnesses)
    sub = commands.add_parser("judge", help="run the micro-kernels on a Hopper GPU, or compare with its results")
    sub.add_argument("file", type=Path)
    sub.add_argument("--device", action="store_true", help="run on the GPU and write the file")
    sub.set_defaults(do=run_judge)
    sub = commands.add_parser("judge-kernels", help="the same for the project's whole Hopper kernels")
    sub.add_argument("file", type=Path)
    sub.add_argument("--device", action="store_true", help="run on the GPU and write the file")
    sub.set_defaults(do=run_judge_kernels)
    race_commands.add(commands)
    timing_commands.register(commands, launches_in)
    args = parser.parse_args()
    return args.do(args)


if __name__ == "__main__":
    sys.exit(main())
