"""The commands of the timing model: counters, predict, timeline, predicted, predicted-sm100 and its backward."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from . import predicted_sm100, predicted_sm100_backward, predicted_sm100_groups
from .counters import count, table
from .launch import Launch
from .predict import Footprint, Pair, busy_shares, memory_of, predict
from .predicted import OUT, write
from .rates import CHIPS, Chip, chip_of
from .timeline import picture
from .trace import Trace, record

Load = Callable[[Path], list[tuple[str, Launch]]]


def _chip(args: argparse.Namespace, trace: Trace) -> Chip:
    return CHIPS[args.chip] if args.chip else chip_of(trace.target)


def show_counters(args: argparse.Namespace) -> int:
    for name, launch in args.load(args.folder):
        trace = record(launch, args.clusters)
        print(f"{name}: {launch.kernel[:80]}, PTX sha256 {launch.sha256}")
        print(table(trace, count(trace)))
    return 0


def show_prediction(args: argparse.Namespace) -> int:
    launches = args.load(args.folder)
    longer = args.load(args.longer) if args.longer else launches
    if len(longer) != len(launches):
        sys.exit(f"{args.folder} has {len(launches)} launches, {args.longer} {len(longer)}")
    ctas = dict(item.split("=") for item in args.ctas)
    footprint = Footprint(args.gather_mb, args.adds_mb)
    total = 0.0
    for (name, launch), (_, other) in zip(launches, longer, strict=True):
        trace = record(launch, 1)
        pair = Pair(trace, record(other, 1) if args.longer else trace, 1.0, args.steps if args.longer else 0.0)
        chip = _chip(args, trace)
        found = predict(pair, chip, int(ctas.get(name, math.prod(launch.grid))), footprint)
        total += found.milliseconds
        print(f"{name}: {launch.kernel[:80]}, PTX sha256 {launch.sha256}")
        print(
            f"  predicted {found.milliseconds:.3f} ms on {chip.name}: {found.ctas} CTAs, {found.ctas_per_sm} an SM, "
            f"{found.waves} waves; {found.fixed_clocks:.0f} clocks and {found.step_clocks:.0f} a step"
        )
        shares = busy_shares(trace, chip, memory_of(chip, footprint)).most_common(6)
        print(f"  predicted limiter: {found.limiter}; busy: {', '.join(f'{n} {100 * s:.0f} %' for n, s in shares)}")
        if found.savings:
            saved = ", ".join(f"{n} {100 * s:.1f} %" for n, s in list(found.savings.items())[:5])
            print(f"  predicted savings, each resource twice as fast: {saved}")
    print(f"predicted {total:.3f} ms in all")
    return 0


def draw_timeline(args: argparse.Namespace) -> int:
    launches = args.load(args.folder)
    traces = [record(launch, 1) for name, launch in launches if args.launch in (None, name)]
    if not traces:
        sys.exit(f"no launch {args.launch} in {args.folder}: there are {', '.join(name for name, _ in launches)}")
    trace = max(traces, key=lambda t: sum(t.executed.values()))
    chip = _chip(args, trace)
    args.out.write_text(
        picture(trace, chip, memory_of(chip, Footprint(args.gather_mb, args.adds_mb)), args.steps), encoding="utf-8"
    )
    return 0


def write_predicted(args: argparse.Namespace) -> int:
    return write(args.out, not args.quick, args.only)


def register(commands: argparse._SubParsersAction, load: Load) -> None:
    """Add the commands to the parser; `load` reads the saved launches of a folder."""

    def add(name: str, do: Callable, text: str, folder: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(do=do, load=load)
        if folder:
            sub.add_argument("folder", type=Path)
        return sub

    sub = add("counters", show_counters, "instructions, matrix work, bytes and waits of saved launches")
    sub.add_argument("--clusters", type=int, help="count only the first clusters of each grid")
    sub = add("predict", show_prediction, "predicted time and limiter of saved launches")
    _chip_options(sub)
    sub.add_argument("--longer", type=Path, help="the same launches saved with one more step a CTA (K block, tile)")
    sub.add_argument("--steps", type=float, default=0.0, help="steps that the real problem has more than FOLDER")
    sub.add_argument(
        "--ctas", action="append", default=[], metavar="LAUNCH=N", help="CTAs of a launch at the real size"
    )
    sub = add("timeline", draw_timeline, "SVG of one steady-state step")
    _chip_options(sub)
    sub.add_argument("--out", type=Path, required=True)
    sub.add_argument("--launch", help="name of the launch in FOLDER; default: the one with most instructions")
    sub.add_argument("--steps", type=int, default=1)
    sub = add("predicted", write_predicted, "predict every published and measured time that is known", folder=False)
    sub.add_argument("--out", type=Path, default=OUT)
    sub.add_argument("--only", default="", help="rows that contain this, such as 'sm90 backward H 64'")
    sub.add_argument("--quick", action="store_true", help="without limiters")
    sub = add("predicted-sm100", predicted_sm100.write, "the SM100 forward at its models' shapes", folder=False)
    sub.add_argument("--out", type=Path, default=predicted_sm100.OUT)
    sub.add_argument("--only", default="", help="shapes that contain this, such as 'GLM-5 H 64'")
    sub = add("predicted-sm100-backward", predicted_sm100_backward.write, "the same for the backward", folder=False)
    sub.add_argument("--out", type=Path, default=predicted_sm100_backward.OUT)
    sub.add_argument("--only", default="", help="as above")
    sub = add("predicted-sm100-groups", predicted_sm100_groups.write, "token groups on rows of text", folder=False)
    sub.add_argument("--out", type=Path, default=predicted_sm100_groups.OUT)
    sub.add_argument("--only", default="", help="rows that contain this, such as 'glm5 8 heads, 8 tokens'")


def _chip_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--chip", choices=sorted(CHIPS), help="default: by the PTX target")
    sub.add_argument("--gather-mb", type=float, default=0.0, help="MB of rows that gathers read at the real size")
    sub.add_argument("--adds-mb", type=float, default=0.0, help="MB of fp32 rows that reductions add to")
