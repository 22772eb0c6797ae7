"""Context parallelism: the calls of one GPU against those of all ranks, and where the time goes.

    torchrun --nproc-per-node 2 -m bench.parallel --tokens 65536 --out bench/results/parallel.jsonl

Every rank first makes the whole call on its own device, then its part of it, so that both are measured under the same
conditions; a time is that of the slowest rank. A row has, in ms:

* `whole`: one GPU, all tokens; `parallel`: the same call of all ranks; `efficiency = whole / (ranks * parallel)`;
* its account: `local` is the rank's part over kv that is there already, `gather` and `scatter` the collectives alone.

The forward gathers kv; the backward gathers it again and scatters dkv in fp32. Before anything is timed, the parts are
compared with the whole: out, lse and dq bit for bit, dkv to 1e-5 (relative, over all rows of the rank), all of them
finite. All calls take one token a tile, whose results do not depend on the other tokens of a call.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cute_sparse_mla
from cute_sparse_mla import arguments, env, parallel
from cute_sparse_mla.config import SparseAttentionConfig
from cute_sparse_mla.errors import SparseMLAError
from cute_sparse_mla.models import MODELS
from cute_sparse_mla.precision import Inputs

from . import report, timing
from .harness import Run
from .shapes import draw, model_shape

DKV_LIMIT = 1e-5  # sums of the same terms in another order
# A tile of several tokens has other neighbours on a rank than in the whole, and sums in another order.
ONE_TOKEN = SparseAttentionConfig(tokens_per_tile=1)
Row = dict[str, Any]


def own_part(inputs: Inputs, split: parallel.TokenSplit) -> Inputs:
    """A rank's queries, with their positions where the call is causal, and its rows of kv."""
    positions = split.positions(inputs.q.device) if inputs.causal else None
    q, kv, indices, dout = map(split.split, (inputs.q, inputs.kv, inputs.indices, inputs.dout))
    return replace(inputs, q=q, kv=kv, indices=indices, dout=dout, q_positions=positions)


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over the ranks; NaN, which a maximum may lose, counts as infinite."""
    values = [math.inf if math.isnan(value) else value for value in values]
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def verify(whole: tuple[Tensor, ...], part: tuple[Tensor, ...], split: parallel.TokenSplit) -> Row:
    """`(out, lse, dq, dkv)` of the whole call against a rank's: equal bits, the error of dkv, no NaN or infinity.

    But lse may be -inf: a row without a valid slot.
    """
    equal = all(torch.equal(own, split.split(of_whole)) for own, of_whole in zip(part[:3], whole[:3], strict=True))
    out, lse, dq, dkv = part
    finite = all(bool(t.isfinite().all()) for t in (out, dq, dkv)) and bool((lse < math.inf).all())
    expected = split.split(whole[3])
    difference, size = (t.double().norm() for t in (dkv - expected, expected))
    # A rank may have no rows, whose error is none.
    error = float(difference / size) if difference else 0.0
    different, infinite, error = slowest([float(not equal), float(not finite), error], dkv.device)
    ok = not different and not infinite and error <= DKV_LIMIT
    # A row of results holds no infinite number.
    return {
        "bitwise": not different, "finite": not infinite, "dkv_error": error if math.isfinite(error) else None,
        "ok": ok,
    }  # fmt: skip


def measure(inputs: Inputs, kind: str, reps: int, backend: str | None = None) -> list[Row]:
    """A row for each pass: forward, backward."""
    device = inputs.q.device
    shared: dict[str, Any] = {"d_v": inputs.d_v, "config": ONE_TOKEN, "backend": backend}
    options = shared | inputs.options
    split = parallel.TokenSplit(inputs.q.shape[0], kind)
    own = own_part(inputs, split)
    own_options = shared | own.options
    out, lse = cute_sparse_mla.fwd(inputs.q, inputs.kv, inputs.indices, **options)
    own_out, own_lse = parallel.fwd(own.q, own.kv, own.indices, split=split, **own_options)
    whole = (inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse)
    part = (own.q, own.kv, own_out, own.dout, own.indices, own_lse)
    there = (own.q, inputs.kv, *part[2:])
    backward = dict(options, dkv_dtype=torch.float32)
    own_backward = dict(own_options, dkv_dtype=torch.float32)
    for keywords in (backward, own_backward):
        del keywords["d_v"]
    dq, dkv, _ = cute_sparse_mla.bwd(*whole, **backward)
    own_dq, own_dkv, _ = parallel.bwd(*part, split=split, **own_backward)
    verdict = verify((out, lse, dq, dkv), (own_out, own_lse, own_dq, own_dkv), split)

    functions: dict[str, Callable[[], Any]] = {
        "forward whole": lambda: cute_sparse_mla.fwd(inputs.q, inputs.kv, inputs.indices, **options),
        "forward parallel": lambda: parallel.fwd(own.q, own.kv, own.indices, split=split, **own_options),
        "forward local": lambda: cute_sparse_mla.fwd(own.q, inputs.kv, own.indices, **own_options),
        "backward whole": lambda: cute_sparse_mla.bwd(*whole, **backward),
        "backward parallel": lambda: parallel.bwd(*part, split=split, **own_backward),
        "backward local": lambda: cute_sparse_mla.bwd(*there, **own_backward),
        "gather": lambda: parallel.gather_kv(own.kv, split).wait(),
        "scatter": lambda: parallel.scatter_sum(dkv, split),
    }
    # The same number of runs on every rank: some of them wait for each other.
    spreads = timing.interleaved(functions, device, reps=reps)
    ms = dict(zip(spreads, slowest([spread.ms for spread in spreads.values()], device), strict=True))
    rows = []
    for which in ("forward", "backward"):
        times = {name: ms[f"{which} {name}"] for name in ("whole", "parallel", "local")}
        times |= {"gather": ms["gather"], "scatter": ms["scatter"] if which == "backward" else 0.0}
        efficiency = times["whole"] / (split.ranks * times["parallel"])
        rows.append({"pass": which, "split": kind, "ranks": split.ranks, **times, "efficiency": efficiency, **verdict})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run under torchrun; 0 when every part equals the whole."""
    parser = argparse.ArgumentParser(prog="bench.parallel", description="Efficiency of context parallelism.")
    arguments.add_shape(parser)
    parser.add_argument("--tokens", type=arguments.count, default=65536, help="of all ranks (default 65536)")
    parser.add_argument("--splits", nargs="+", choices=parallel.SPLITS, default=list(parallel.SPLITS))
    parser.add_argument("--reps", type=arguments.count, default=10, help="timed runs of each (default 10)")
    parser.add_argument("--seed", type=arguments.seed, default=0)
    parser.add_argument("--out", type=arguments.output_file, help="add the rows to this file of JSON lines")
    args = parser.parse_args(argv)
    if args.model not in ("glm5", "v32"):
        parser.error("--model must be one without compressed rows: glm5, v32")
    wanted = args.device or arguments.default_device()
    if wanted.type == "cpu" and not args.device:
        parser.error("needs GPUs: the reference would take hours; --device cpu --tokens 64 --reps 1 shows it on a CPU")
    try:
        with parallel.process_group(wanted) as device:
            rows = _measured(args, device)
    except SparseMLAError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    return 0 if all(row["ok"] for row in rows) else 1


def _measured(args: argparse.Namespace, device: torch.device) -> list[Row]:
    """The rows of every split, which rank 0 also prints and keeps."""
    model = MODELS[args.model]
    if args.heads:
        model = replace(model, heads=args.heads)
    shape = model_shape(model, args.tokens, args.tokens)
    inputs = draw(shape, device, args.seed)
    run = Run(device)
    rows = [row for kind in args.splits for row in measure(inputs, kind, args.reps, args.backend)]
    facts = {"run": run.id, "model": model.name, "T": shape.T, "H": shape.H, "D": shape.D, "K": shape.K}
    facts |= {
        "rows": shape.rows,
        "tokens_per_tile": ONE_TOKEN.tokens_per_tile,
        "reps": args.reps,
        "backend": args.backend,
    }
    facts |= {"device": run.device_name, "versions": run.versions}
    rows = [facts | row for row in rows]
    if dist.get_rank() == 0:
        print(
            f"{model.name}: {shape.T} tokens on {dist.get_world_size()} ranks, H {shape.H}, D {shape.D}, K {shape.K}, "
            f"{shape.rows} rows, one token a tile; {env.device_name(device)}; ms of the slowest rank"
        )
        for row in rows:
            print(json.dumps({name: value for name, value in row.items() if name not in facts}))
        if args.out:
            report.append_jsonl(args.out, rows)
    return rows


if __name__ == "__main__":
    sys.exit(main())
