"""Token groups, measured: `python -m bench.groups [--peer-path FOLDER] [--indexer FILE] [--only TEXT] [--out FILE]`.

On each layer, under tensor parallelism, interleaved in one process: ours as it comes (the device decides about groups,
lists made inside), ours with a plan made ahead, ours token by token, and the peers' forward and backward; then the
lists alone, in CUDA graphs, since the host is slower than they are. Rows are the harness's (`harness.ROW_FIELDS`) and

    kind             groups
    tokens_per_tile  tokens of a tile that are tried at these heads
    union            mean union of n neighbours' rows over K, by n, as in every row
    slots            of the tokens' own lists, and of the unions that tiles of so many tokens gather
    chosen           whether the device grouped them
    implied          gain that the union implies: the first number of `slots` over the second. A tile's time is its
                     slots times a price that does not depend on how many tokens it has: 64 rows of the matrix unit and
                     one row of kv a slot, either way
    gain             time token by token over this row's, same pass
    share            of the implied gain: gain / implied
    of_forward       of the lists: their time over that of a forward token by token. `decision` is what deciding adds to
                     the lists, or where nothing is grouped all that is done

Text rows longer than the committed sample come from `--indexer`, a file that `bench.make_rows` wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cute_sparse_mla import arguments
from cute_sparse_mla.precision import Inputs
from cute_sparse_mla.text_rows import Indexer, load_indexer

from . import report, timing
from .harness import Row, Run, Settings, run_shape
from .implementations import PASSES, Implementation, Ours, plan_of
from .peers import PEERS
from .shapes import BenchShape, draw, model_shapes, unsupported_rows
from .suites import SINGLE

AS_IT_COMES = "ours"
LISTS, DECIDED, DECISION = "lists", "decision and lists", "decision"
PEER_NAMES = ("flash_mla", "cudnn")
# Tensor parallelism that leaves 8, 16 and 32 of 64 heads.
TP = (8, 4, 2)


def shapes() -> list[BenchShape]:
    """The layers: text rows of GLM-5 and of DeepSeek-V4 (window and selected), random rows near and far."""
    text = model_shapes(["glm5", "v4-flash"], [(4096, 8192), (16384, 16384)], TP, ["text"])
    return text + model_shapes(["glm5"], [(4096, 8192), (4096, 131072)], TP, ["random"])


def facts(inputs: Inputs) -> Row:
    """What the rows of one shape have in common; reads the lists on the host."""
    plan = plan_of(inputs, None)
    tokens = plan.tokens_per_tile
    found: Row = {"kind": "groups", "tokens_per_tile": tokens, "slots": None, "chosen": 0, "implied": None}
    if plan.lists is None or tokens is None:
        return found
    chosen = plan.lists.chosen
    whole = plan_of(inputs, tokens).lists
    assert whole is not None
    count = int(whole.lengths.sum())
    # Every slot of a union has a bit for each token that selected it.
    listed = torch.arange(whole.bits.shape[-1], device=whole.bits.device) < whole.lengths[..., None]
    bits = torch.where(listed, whole.bits, 0)
    own = sum(int((bits >> t & 1).sum()) for t in range(tokens))
    return found | {"slots": [own, count], "chosen": 1 if chosen is None else int(chosen), "implied": own / count}


def list_times(inputs: Inputs, tokens: int, settings: Settings) -> dict[str, timing.Spread]:
    """Times of the lists alone, and of decision and lists."""
    functions: dict[str, Callable[[], Any]] = {
        LISTS: lambda: plan_of(inputs, tokens),
        DECIDED: lambda: plan_of(inputs, None),
    }
    if settings.device.type == "cuda":
        functions = {name: timing.captured(function, settings.device) for name, function in functions.items()}
    return timing.interleaved(functions, settings.device, reps=settings.reps, seconds=settings.seconds)


def list_rows(base: Row, times: dict[str, timing.Spread], forward: float | None, chosen: int) -> list[Row]:
    """Rows of the lists, beside `forward`, the milliseconds of a forward token by token."""
    decision = times[DECIDED].ms - (times[LISTS].ms if chosen else 0.0)
    ms = {name: spread.ms for name, spread in times.items()} | {DECISION: decision}
    rows = []
    for name, value in ms.items():
        spread = times.get(name)
        row = base | {"impl": name, "pass": "lists", "ms": round(value, 5)}
        row |= {"of_forward": round(value / forward, 5) if forward else None}
        if spread is not None:
            row |= {"p10": round(spread.p10, 5), "p90": round(spread.p90, 5), "n": spread.n}
        rows.append(row)
    return rows


def with_gains(rows: Sequence[Row], found: Row) -> list[Row]:
    """The harness's rows with what the union implies and how much of it is there."""
    single = {row["pass"]: row["ms"] for row in rows if row["impl"] == SINGLE}
    result = []
    for row in rows:
        if row["ms"] is None and row["note"].startswith("not run"):
            continue  # the one peer has no forward here, the other no backward
        gain = share = None
        base = single.get(row["pass"])
        if base and row["ms"] and row["impl"].partition(":")[0] == "ours":
            gain = base / row["ms"]
            share = gain / found["implied"] if found["implied"] else None
        rounded = {
            name: value if value is None else round(value, 4)
            for name, value in (("implied", found["implied"]), ("gain", gain), ("share", share))
        }
        config = {"groups": row["config"].get("groups", "")} if row["config"] else {}
        result.append(row | found | rounded | {"config": config})
    return result


def measure(
    shape: BenchShape, implementations: Sequence[Implementation], settings: Settings, run: Run, indexer: Indexer | None
) -> list[Row]:
    """All rows of one shape."""
    rows = run_shape(shape, implementations, settings, run, indexer)
    if unsupported_rows(shape, indexer):
        return rows
    inputs = draw(shape, settings.device, settings.seed, indexer)
    found = facts(inputs)
    rows = with_gains(rows, found)
    if found["slots"] is not None:
        forward = next((row["ms"] for row in rows if row["impl"] == SINGLE and row["pass"] == "fwd"), None)
        names = ("run", "model", "tp", "T", "S_kv", "H", "D", "d_v", "K", "rows", "union", "device", "versions")
        base = {name: rows[0][name] for name in names} | found | {"implied": round(found["implied"], 4)}
        rows += list_rows(base, list_times(inputs, found["tokens_per_tile"], settings), forward, found["chosen"])
    return rows


def summary(rows: Sequence[Row]) -> str:
    """A line a pass for people: times, gain beside the implied one, the peers', and the lists' shares."""
    lines = []
    for which in dict.fromkeys(row["pass"] for row in rows):
        group = [row for row in rows if row["pass"] == which and row["ms"]]
        parts = [f"{row['impl']} {row['ms']:.4g}" for row in group]
        for row in group:
            if row.get("gain") and row["impl"] != SINGLE:
                share = f" of {row['implied']:.2f}: {row['share']:.0%}" if row["share"] else ""
                parts.append(f"{row['impl']} gains {row['gain']:.3f}{share}")
            if row.get("of_forward"):
                parts.append(f"{row['impl']} {row['of_forward']:.2%} of a forward")
        ours = next((row["ms"] for row in group if row["impl"] == AS_IT_COMES), None)
        parts += [f"{row['impl']} x {row['ms'] / ours:.2f}" for row in group if ours and row["impl"] in PEER_NAMES]
        lines.append(f"  {which:5s} " + ", ".join(parts))
    first = rows[0]
    return "\n".join([f"  tokens {first.get('tokens_per_tile')}, chosen {first.get('chosen')}", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.groups", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--peer-path", action="append", default=[], metavar="FOLDER", help="searched for the peers")
    parser.add_argument("--indexer", metavar="FILE", help="indexer tensors for texts longer than the sample's")
    parser.add_argument("--only", action="append", metavar="TEXT", help="shapes whose description has it")
    parser.add_argument("--pass", dest="passes", default="fwd,bwd", help=f"of {', '.join(PASSES)} (default fwd,bwd)")
    parser.add_argument("--reps", type=arguments.count, help="timed runs each (default: what fits --seconds)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for all runs of a shape and pass (default 0.5)")
    parser.add_argument("--verify-tokens", type=int, default=16, help="query tokens judged against float64")
    parser.add_argument("--out", type=arguments.output_file, metavar="FILE", help="append result rows as JSON lines")
    args = parser.parse_args(argv)
    sys.path[:0] = [str(Path(folder).resolve()) for folder in args.peer_path]
    device = arguments.default_device()
    if device.type == "cpu" and not args.only:
        parser.error("needs a GPU: the reference would take hours on a CPU; --only names a shape")
    implementations: list[Implementation] = [Ours(), Ours("plan"), Ours("tokens_per_tile=1")]
    implementations += [PEERS[name](None) for name in PEER_NAMES if args.peer_path]
    settings = Settings(
        device, tuple(args.passes.split(",")), args.reps, args.seconds, verify_tokens=args.verify_tokens
    )
    run, failed = Run(device), False
    sample, longer = load_indexer(), load_indexer(args.indexer) if args.indexer else None
    for shape in shapes():
        if any(text in str(shape) for text in args.only or [""]):
            indexer = longer if longer and shape.context > sample.tokens else sample
            rows = measure(shape, implementations, settings, run, indexer)
            if args.out:
                report.append_jsonl(args.out, rows)
            print(f"{shape}\n{summary(rows)}", flush=True)
            failed |= any(row.get("ok") is False for row in rows)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
