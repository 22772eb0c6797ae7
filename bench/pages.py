"""The project's pages: measure every suite on this GPU, then draw the tables and pictures from the committed rows.

    python -m bench.pages                         # redraws from the committed rows; needs no GPU
    python -m bench.pages --measure               # first measures all suites (or those named); about five minutes
    python -m bench.pages --measure heads --peer flash_mla=PLACE      # with peers, as `bench --peer`

A table stands in a page between `<!-- figures: NAME -->` and `<!-- end -->` (`tables.TABLES`), pictures lie beside the
rows (`plots.PICTURES`). `--check` says what differs from the rows and writes nothing. New rows replace those of the
same suite and device; rows of suites that were not measured stay. For a checkout: an installed package has no pages.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from cute_sparse_mla import env

from . import cli, plots, report, tables, timing
from .suites import SUITES

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "numbers.md", ROOT / "tests" / "ptx_sim" / "README.md")
MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def drawn() -> dict[Path, str]:
    """What every page and picture holds when made from the committed rows."""
    results = tables.load()
    files = {tables.RESULTS / f"{name}.svg": draw(results) for name, draw in plots.PICTURES.items()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files[page] = MARKED.sub(lambda m: f"{m[1]}{tables.TABLES[m[2]](results)}\n{m[3]}", text)
    return files


def stale() -> list[Path]:
    """The files that differ from what the rows say."""
    return [path for path, text in drawn().items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def measure(suites: Sequence[str], words: Sequence[str]) -> bool:
    """Measure suites and put their rows in place of older ones; whether everything passed its verification."""
    fine = True
    device = torch.device("cuda")
    _replace("floors", [matrix_product(device)])
    for suite in suites:
        with tempfile.TemporaryDirectory() as folder:
            out, start = Path(folder) / "rows.jsonl", time.perf_counter()
            code = cli.console(["--suite", suite, "--out", str(out), *words])
            if not out.exists():
                return False
            rows = report.read_jsonl(out)
        fine &= code == 0
        seconds = round(time.perf_counter() - start, 1)
        _replace(suite, [*rows, {"suite": suite, "device": rows[0]["device"], "seconds": seconds}])
    return fine


def _replace(suite: str, rows: Sequence[report.Row]) -> None:
    """Put a suite's rows in place of older ones of the same device."""
    older = report.read_jsonl(tables.PAGES) if tables.PAGES.exists() else []
    kept = [row for row in older if (row["suite"], row["device"]) != (suite, rows[0]["device"])]
    tables.PAGES.unlink(missing_ok=True)
    report.append_jsonl(tables.PAGES, [*kept, *rows])


def matrix_product(device: torch.device, size: int = 8192) -> report.Row:
    """The rate of torch's bf16 matrix product, which no kernel here can exceed by much."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    ms = timing.interleaved({"mm": lambda: a @ b}, device, reps=20)["mm"].ms
    what, device_name = f"bf16 {size}^3 matrix product", env.device_name(device)
    return {"suite": "floors", "device": device_name, "what": what, "tflops": round(2 * size**3 / ms / 1e9, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a verification missed or, with `--check`, something is out of date."""
    parser = argparse.ArgumentParser(prog="bench.pages", description="Tables and pictures from result rows.")
    parser.add_argument("--measure", nargs="*", choices=tuple(SUITES), metavar="SUITE",
                        help=f"measure these suites first, all without a name: {', '.join(SUITES)}")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="say what is out of date, write nothing")
    args, words = parser.parse_known_args(argv)
    if words and args.measure is None:
        parser.error(f"without --measure nothing is run: {' '.join(words)}")
    if args.measure is not None and not torch.cuda.is_available():
        parser.error("--measure needs a GPU; without it the committed rows are drawn")
    fine = args.measure is None or measure(args.measure or tuple(SUITES), words)
    if args.check:
        for path in stale():
            print(f"out of date: {path.relative_to(ROOT)}; python -m bench.pages", file=sys.stderr)
        return int(bool(stale()))
    for path, text in drawn().items():
        path.write_text(text, encoding="utf-8")
    device = env.device_name(torch.device("cuda")) if args.measure is not None else "the committed rows"
    print(f"drawn from {device}: {', '.join(path.name for path in drawn())}")
    return int(not fine)


if __name__ == "__main__":
    raise SystemExit(main())
