"""Command line of the benchmarks: `python -m bench` in a checkout, `python -m cute_sparse_mla bench` anywhere."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cute_sparse_mla import arguments
from cute_sparse_mla.errors import ArgumentValueError, SparseMLAError
from cute_sparse_mla.text_rows import Indexer, load_indexer

from . import gaps, report, tune
from .harness import Run, Settings, run_shape
from .implementations import BWD, FWD, PASSES, Implementation, Ours, Pair
from .peers import PEERS
from .shapes import ALL_MODELS, ROWS, BenchShape, model_shapes, plain_shape
from .suites import SUITES, Part, parts

# What runs without arguments: seconds on a CPU, a training step's layer on a GPU.
DEFAULT_TOKENS = {"cpu": "64x4096", "cuda": "4096x8192"}
DEFAULT_TP = {"cpu": "8", "cuda": "1,8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's arguments."""
    parser.add_argument(
        "--suite", metavar="NAME,...", help=f"the shapes, implementations and passes of {', '.join(SUITES)}"
    )
    parser.add_argument("--model", nargs="+", choices=sorted(ALL_MODELS), metavar="NAME", default=[],
                        help=f"layer shapes: {', '.join(sorted(ALL_MODELS))} (default glm5)")  # fmt: skip
    parser.add_argument("--shape", action="append", default=[], metavar="T,S_kv,H,D,K", help="a shape of your own")
    parser.add_argument("--tokens", metavar="T[xS],...",
                        help="query tokens, of a text of S; default 64x4096 on a CPU, 4096x8192 on a GPU")  # fmt: skip
    parser.add_argument("--tp", metavar="N,...", help="tensor-parallel degrees (default 8 on a CPU, 1,8 on a GPU)")
    parser.add_argument("--rows", default="random", metavar="KIND,...", help=f"{', '.join(ROWS)} (default random)")
    parser.add_argument("--invalid", default="0", metavar="PERCENT,...", help="slots made -1 at random (default 0)")
    parser.add_argument("--indexer", metavar="PATH", help="indexer tensors for text rows (default: the sample)")
    parser.add_argument("--pass", dest="passes", metavar="PASS,...",
                        help=f"{', '.join(PASSES)} (default fwd,bwd, or the suite's)")  # fmt: skip
    parser.add_argument("--impl", action="append", metavar="NAME",
                        help="ours, ours:SETTING,... (deterministic, fixed_shapes, plan, pad_heads=..., backend=..., "
                        f"tokens_per_tile=...), {', '.join(PEERS)}, FORWARD+BACKWARD; repeatable "
                        "(default ours, every --peer)")  # fmt: skip
    parser.add_argument("--backend", help="backend of ours (default: the device's own)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PLACE",
                        help="where a peer is: a folder, a Python file or a module's name; repeatable")  # fmt: skip
    parser.add_argument(
        "--peer-path", action="append", default=[], metavar="FOLDER", help="searched for peers' modules"
    )
    parser.add_argument("--reps", type=arguments.count, help="timed runs each (default: what fits --seconds)")
    parser.add_argument("--seconds", type=float,
                        help="time for all runs of one shape and pass (default 3, or the suite's)")  # fmt: skip
    parser.add_argument("--l2-flush", action="store_true", help="overwrite the L2 before every run (GPU)")
    parser.add_argument("--graph", action="store_true", help="time replays of a CUDA graph (GPU)")
    parser.add_argument("--tune", action="store_true",
                        help="measure the config table again (GPU), or its classes of each --shape")  # fmt: skip
    parser.add_argument("--write-table", action="store_true", help="with --tune: put the result into the table")
    parser.add_argument("--gaps", action="store_true",
                        help="what a call of ours costs beyond its kernels: queued, replayed, alone (GPU)")  # fmt: skip
    parser.add_argument("--verify-tokens", type=int, default=64, metavar="N",
                        help="query tokens judged against float64 (default 64; 0: none)")  # fmt: skip
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of the random inputs (default 0)")
    parser.add_argument("--out", type=arguments.output_file, metavar="FILE", help="append result rows as JSON lines")
    parser.add_argument(
        "--device", type=arguments.device, help="torch device (default: cuda where there is one, else cpu)"
    )


def _words(name: str, text: str, allowed: Sequence[str]) -> list[str]:
    words = [word for word in text.split(",") if word]
    unknown = [word for word in words if word not in allowed]
    if unknown or not words:
        raise ArgumentValueError(f"--{name}", f"must be of {', '.join(allowed)}", text)
    return words


def _numbers(name: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ArgumentValueError(f"--{name}", "must be positive numbers with commas", text)
    return [int(word) for word in words]


def _percents(text: str) -> list[float]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) <= 100 for word in words):
        raise ArgumentValueError("--invalid", "must be percentages, 0 to 100, with commas", text)
    return [int(word) / 100 for word in words]


def _tokens(text: str) -> list[tuple[int, int]]:
    pairs = []
    for word in text.split(","):
        T, context = ([*_numbers("tokens", word.replace("x", ",")), 0, 0])[:2]
        if context and context < T:
            raise ArgumentValueError("--tokens", "T x S needs S at least T", word)
        pairs.append((T, context or T))
    return pairs


def _shapes(args: argparse.Namespace, kind: str) -> list[BenchShape]:
    rows = _words("rows", args.rows, ROWS)
    shapes = [plain_shape(text, row) for text in args.shape for row in rows]
    if args.model or not args.shape:
        tokens = _tokens(args.tokens or DEFAULT_TOKENS[kind])
        shapes += model_shapes(args.model or ["glm5"], tokens, _numbers("tp", args.tp or DEFAULT_TP[kind]), rows)
    return [replace(shape, invalid=share) for shape in shapes for share in _percents(args.invalid)]


def _implementation(name: str, args: argparse.Namespace, places: dict[str, str], made: dict) -> Implementation:
    """An implementation by its name on the command line; peers are imported here and only here."""
    if name in made:
        return made[name]
    base, _, settings = name.partition(":")
    if base == "ours":
        made[name] = Ours(settings, args.backend)
    elif "+" in name:
        forward, _, backward = name.partition("+")
        made[name] = Pair(*(_implementation(part, args, places, made) for part in (forward, backward)))
    elif name in PEERS:
        made[name] = PEERS[name](places.get(name))
    else:
        raise ArgumentValueError("--impl", f"must be ours, ours:SETTINGS, A+B or one of {', '.join(PEERS)}", name)
    return made[name]


def _names(given: Sequence[str] | None) -> list[str]:
    # `ours:a,b` has commas of its own: a word that is no implementation's name belongs to the word before.
    names: list[str] = []
    for word in ",".join(given or []).split(","):
        starts = word.partition(":")[0].partition("+")[0] in ("ours", *PEERS)
        if names and not starts and names[-1].startswith("ours:"):
            names[-1] += f",{word}"
        elif word:
            names.append(word)
    return names


@dataclass(frozen=True)
class _Job:
    """A shape, what runs on it and how."""

    shape: BenchShape
    implementations: list[Implementation]
    part: Part
    suite: str = ""


def _own_part(args: argparse.Namespace, kind: str) -> Part:
    """Shapes of one's own."""
    return Part(tuple(_shapes(args, kind)), passes=(FWD, BWD), graph=args.graph, seconds=3.0, fewest=0)


def _suite_parts(args: argparse.Namespace, kind: str) -> list[tuple[str, Part]]:
    """`(suite, part)` of the suites asked for."""
    if args.model or args.shape or args.tokens:
        raise ArgumentValueError("--suite", "brings its own shapes: no --model, --shape or --tokens", args.suite)
    names = _words("suite", args.suite, tuple(SUITES))
    if kind != "cuda":
        raise ArgumentValueError("--suite", "needs a GPU: the reference would take hours on a CPU", kind)
    return [(name, part) for name in names for part in parts(name)]


def _jobs(args: argparse.Namespace, kind: str) -> list[_Job]:
    """What the command line asks for, in order."""
    given = args.passes and tuple(_words("pass", args.passes, PASSES))
    wanted, places = _names(args.impl), _places(args)
    made: dict[str, Implementation] = {}
    jobs = []
    for suite, part in _suite_parts(args, kind) if args.suite else [("", _own_part(args, kind))]:
        part = replace(part, passes=given or part.passes, graph=part.graph or args.graph)
        names = wanted or list(part.implementations)
        names += [name for name in places if not any(name in other.split("+") for other in names)]
        implementations = [_implementation(name, args, places, made) for name in dict.fromkeys(names)]
        jobs += [_Job(shape, implementations, part, suite) for shape in part.shapes]
    return jobs


def _places(args: argparse.Namespace) -> dict[str, str]:
    """Where peers are, by name."""
    for folder in args.peer_path:
        sys.path.insert(0, str(Path(folder).resolve()))
    places = {}
    for text in args.peer:
        name, _, place = text.partition("=")
        if name not in PEERS or not place:
            raise ArgumentValueError("--peer", f"must be NAME=PLACE with NAME of {', '.join(PEERS)}", text)
        places[name] = place
    return places


def _indexer(args: argparse.Namespace, shapes: Sequence[BenchShape]) -> Indexer | None:
    if not any(shape.rows == "text" for shape in shapes):
        return None
    try:
        return load_indexer(args.indexer)
    except FileNotFoundError:
        if args.indexer:
            raise ArgumentValueError("--indexer", "must be a file", args.indexer) from None
        return None


def _settings(
    args: argparse.Namespace, device: torch.device, job: _Job, progress: Callable[[str], None] = lambda message: None
) -> Settings:
    part = job.part
    return Settings(
        device, part.passes, args.reps, part.seconds if args.seconds is None else args.seconds, args.l2_flush,
        part.graph, args.verify_tokens, args.seed, part.fewest, job.suite, progress,
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the benchmark. Exit code 0, or 1 when something missed its verification or ours failed."""
    device = args.device or arguments.default_device()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    jobs = _jobs(args, "cuda" if device.type == "cuda" else "cpu")
    indexer = _indexer(args, [job.shape for job in jobs])
    if device.type != "cuda" and (args.graph or args.l2_flush or args.gaps or args.tune):
        raise ArgumentValueError("--graph, --l2-flush, --gaps, --tune", "need a GPU", device)
    run = Run(device)
    if args.tune:
        settings = _settings(args, device, jobs[0])
        indexer = _indexer(args, [replace(job.shape, rows="text") for job in jobs])
        return tune.main(args, [plain_shape(text) for text in args.shape], settings, run, indexer)
    names = dict.fromkeys(i.name for job in jobs for i in job.implementations)
    print(f"run {run.id} on {run.device_name}: {', '.join(names)}")
    start, failed = time.perf_counter(), False
    for number, job in enumerate(jobs, 1):

        def progress(step: str, label: str = f"[{number}/{len(jobs)}] {job.shape}") -> None:
            print(f"{time.perf_counter() - start:7.1f} s  {label}: {step}", file=sys.stderr, flush=True)

        settings = _settings(args, device, job, progress)
        rows = run_shape(job.shape, job.implementations, settings, run, indexer)
        if args.out:
            report.append_jsonl(args.out, rows)
        print(f"\n{job.shape}\n{report.table(rows)}", flush=True)
        for ours in (i for i in job.implementations if args.gaps and isinstance(i, Ours)):
            found = gaps.rows(job.shape, ours, settings, run, indexer)
            if args.out:
                report.append_jsonl(args.out, found)
            print("\n".join(map(gaps.describe, found)), flush=True)
        failed |= any(row["ok"] is False for row in rows)
    return int(failed)


def console(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m bench`; errors of the package are one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="bench", description="Benchmarks of sparse MLA, ours and peers'.")
    add_arguments(parser)
    try:
        return main(parser.parse_args(argv))
    except SparseMLAError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
