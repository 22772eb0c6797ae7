"""`python -m cute_sparse_mla check | bench | explain | warmup`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

import torch

from . import api, check
from .errors import SparseMLAError
from .models import MODELS

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cute_sparse_mla", description="Sparse MLA attention, forward and backward.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{check,bench,explain,warmup}")
    check_parser = commands.add_parser("check", help="the main job: a model's layer on real rows, judged and timed")
    check.add_arguments(check_parser)

    bench_parser = commands.add_parser("bench", help="benchmarks, with peers where they are installed")
    if command == "bench":
        _bench().add_arguments(bench_parser)

    explain_parser = commands.add_parser("explain", help="which kernel and config a call would use, and why")
    _shape_arguments(explain_parser)
    explain_parser.add_argument("--tokens", type=int, default=4096, help="queries and kv rows (default 4096)")
    explain_parser.add_argument(
        "--capability", type=_capability, metavar="X.Y", help="as if on a GPU of this capability"
    )

    warmup_parser = commands.add_parser("warmup", help="compile a model's kernels ahead of the first call")
    _shape_arguments(warmup_parser)
    warmup_parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    warmup_parser.add_argument("--no-backward", action="store_true", help="forward kernels only")
    return parser


def _shape_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), default="glm5", help="layer shape (default glm5)")
    parser.add_argument("--heads", type=int, help="heads after tensor parallelism (default: all of the model's)")
    parser.add_argument("--device", help="torch device (default: cuda where there is one, else cpu)")
    parser.add_argument("--backend", help="sm90, sm100 or reference (default: the device's own)")


def _bench() -> ModuleType:
    # The benchmarks are a package of their own, loaded only when asked for.
    return importlib.import_module(f"{__package__}.bench.cli")


def _explain(args: argparse.Namespace) -> int:
    model, T = MODELS[args.model], args.tokens
    heads = args.heads or model.heads
    device = "meta" if args.capability else args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    q = torch.empty(T, heads, model.D, dtype=torch.bfloat16, device=device)
    kv = torch.empty(T, 1, model.D, dtype=torch.bfloat16, device=device)
    rows = torch.empty(T, model.K, dtype=torch.int32, device=device)
    sink = torch.empty(heads, device=device) if model.has_sink else None
    answer = api.explain(
        q, kv, rows, sm_scale=model.sm_scale, d_v=model.d_v, causal=not model.window, attn_sink=sink,
        backend=args.backend, capability=args.capability,
    )  # fmt: skip
    print(answer)
    return 0 if answer.ok else 1


def _warmup(args: argparse.Namespace) -> int:
    model = MODELS[args.model]
    choices = api.warmup(
        args.heads or model.heads, model.D, d_v=model.d_v, dtype=_DTYPES[args.dtype],
        backward=not args.no_backward, backend=args.backend, device=args.device,
    )  # fmt: skip
    for choice in choices:
        print(f"{choice.backend} ({choice.reason}): {choice.config}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Errors of the package are one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser(words[0] if words else None).parse_args(words)
    runs = {"check": check.main, "explain": _explain, "warmup": _warmup}
    try:
        if args.command == "bench":
            return _bench().main(args)
        return runs[args.command](args)
    except SparseMLAError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
