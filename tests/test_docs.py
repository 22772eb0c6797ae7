"""The README and the pages: their code runs as it stands, their links lead somewhere, their figures are the rows'."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import pages, tables

from . import full

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "tests" / "ptx_sim" / "README.md"]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)


# The simulator's example needs a process of its own: test_ptx_sim_readme.py.
@pytest.mark.parametrize(("page", "number"), [(p, n) for p in PAGES[:-1] for n in range(len(snippets(p)))],
                         ids=lambda value: getattr(value, "stem", value))  # fmt: skip
def test_code_runs(page: Path, number: int) -> None:
    exec(compile(snippets(page)[number], f"{page.name}, snippet {number}", "exec"), {})


def test_pages_have_code() -> None:
    assert len(snippets(README)) == 1 and len(snippets(ROOT / "docs" / "choose.md")) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_files_named_in_the_readme_exist() -> None:
    text = README.read_text(encoding="utf-8")
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in re.findall(r"`make ([\w-]+)", text):
        assert re.search(rf"^{name}:", targets, flags=re.M), name


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """`make` with this Python, as on a machine without a GPU."""
    command = ["make", "-C", str(ROOT), "NO_VENV=1", f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_help_lists_the_targets() -> None:
    listed = {line.split()[0] for line in make("help").stdout.splitlines() if line and not line.startswith("make")}
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    assert targets - listed == {"hopper-gpu"} and {"check", "test", *full.PARTS} <= listed


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_what_needs_a_hopper_gpu_says_so() -> None:
    run = make("sentinel-h200")
    assert run.returncode != 0 and "needs a Hopper GPU" in run.stderr and "passed" not in run.stdout


def test_figures_are_those_of_the_rows() -> None:
    assert [path.name for path in pages.stale()] == [], "run python -m bench.pages"


def test_every_table_and_picture_is_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in tables.TABLES:
        assert f"<!-- figures: {name} -->" in text, name
    for name in pages.plots.PICTURES:
        assert f"bench/results/{name}.svg" in text, name
