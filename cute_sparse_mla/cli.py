"""`python -m cute_sparse_mla check | bench | explain | warmup`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import torch

from . import api, arguments, check
from .errors import SparseMLAError
from .models import MODELS
from .version import __version__

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cute_sparse_mla", description="Sparse MLA attention, forward and backward.")
    parser.add_argument("--version", action="version", version=f"cute_sparse_mla {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{check,bench,explain,warmup}")
    check_parser = _command(commands, "check", "the main job: a model's layer on real rows, judged and timed")
    check.add_arguments(check_parser)

    bench_parser = _command(commands, "bench", "benchmarks, with peers where they are installed")
    if command == "bench":
        _bench().add_arguments(bench_parser)

    explain_parser = _command(commands, "explain", "which kernel and config a call would use, and why")
    arguments.add_shape(explain_parser)
    explain_parser.add_argument(
        "--tokens", type=arguments.count, default=4096, help="queries and kv rows (default 4096)"
    )
    explain_parser.add_argument(
        "--capability", type=arguments.capability, metavar="X.Y", help="as if on a GPU of this capability"
    )

    warmup_parser = _command(commands, "warmup", "compile a model's kernels ahead of the first call")
    arguments.add_shape(warmup_parser)
    warmup_parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    warmup_parser.add_argument("--no-backward", action="store_true", help="forward kernels only")
    return parser


def _command(commands: argparse._SubParsersAction, name: str, summary: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")


def _bench() -> ModuleType:
    # The benchmarks are a package of their own, loaded only when asked for.
    return importlib.import_module(f"{__package__}.bench.cli")


def _explain(args: argparse.Namespace) -> int:
    model, T = MODELS[args.model], args.tokens
    heads = args.heads or model.heads
    device = torch.device("meta") if args.capability else args.device or arguments.default_device()
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
        causal=(False, True), backward=not args.no_backward, backend=args.backend, device=args.device,
    )  # fmt: skip
    for causal, choice in zip((False, True), choices, strict=True):
        print(f"causal={causal}: {choice.backend} ({choice.reason}), {choice.config}")
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
    except BrokenPipeError:
        # Whoever read the output has seen enough; the interpreter must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SparseMLAError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
