"""Tables and pictures from result rows: made-up rows in, figures out; measuring replaces what it measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import cute_sparse_mla
from bench import cli, pages, plots, suites, tables, timing
from bench.harness import ROW_FIELDS, input_bytes, work
from bench.shapes import ALL_MODELS, draw, model_shape

H200 = "NVIDIA H200"


def made_up(device: str = H200) -> list[dict[str, Any]]:
    """A row for everything that the suites measure: 1 ms a pass for every 1e12 FLOP."""
    rows: list[dict[str, Any]] = []
    for suite in suites.SUITES:
        for part in suites.parts(suite):
            for shape in part.shapes:
                for impl in part.implementations:
                    for which in part.passes:
                        flops, _ = work(shape.problem(), which)
                        row = dict.fromkeys(ROW_FIELDS) | {
                            "run": "r", "suite": suite, "impl": impl, "pass": which, "model": shape.name,
                            "tp": shape.tp, "T": shape.T, "S_kv": shape.S_kv, "H": shape.H, "D": shape.D, "K": shape.K,
                            "ok": True, "rows": shape.rows, "ms": flops / 1e12, "tflops": 1000.0, "peak_mb": 1500.0,
                            "input_mb": 500.0, "device": device, "versions": {"torch": "2.x"},
                            "union": {"2": 1.5, "4": 2.0, "8": 2.5, "16": 3.0},
                        }  # fmt: skip
                        rows.append(row)
        rows.append({"suite": suite, "device": device, "seconds": 12.5})
    return [*rows, {"suite": "floors", "device": device, "what": "product", "tflops": 780.0}]


@pytest.fixture(scope="module")
def results() -> tables.Results:
    return replace(tables.load(), measured=made_up())


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_are_whole(results: tables.Results, name: str) -> None:
    lines = tables.TABLES[name](results).splitlines()
    if name == "measured-in":
        assert "v4 12, layers 12" in lines[0] and "torch 2.x" in lines[0]
        return
    columns = lines[0].count("|")
    assert len(lines) > 3 and all(line.count("|") == columns for line in lines)
    measured = [line for line in lines if "GB200, pr" not in line]
    if name in ("layers", "groups", "models", "other-forms"):
        assert not any(f" {tables.DASH} " in line for line in measured), "made-up rows leave no gap"


def test_the_v4_table_has_its_conventions(results: tables.Results) -> None:
    lines = tables.v4(results).splitlines()
    measured = [line for line in lines if "H200, measured" in line]
    assert len(measured) == 3 * 4 and sum("padded to 128 in memory" in line for line in measured) == 3
    first = [cell.strip() for cell in measured[0].strip("|").split("|")]
    # 4 T K H D FLOP and 2 D (T K + 2 T H) bytes in so many us.
    us = 4 * 4096 * 640 * 64 * 512 / 1e12 * 1e3
    tbps = 2 * 512 * (4096 * 640 + 2 * 4096 * 64) / us / 1e6
    assert first[3:6] == [f"{us:.0f}", "1000", f"{tbps:.2f}"] and first[7] == "1000" and first[-1] == "2000"
    published = [line for line in lines if "GB200, published" in line]
    assert len(published) == 3 * 3 + 1 and "| 859 " in published[0] and "| 2733 | 2114 |" in published[0]
    assert sum("GB200, predicted" in line for line in lines) == 9


def test_a_measured_gb200_stands_beside_the_predicted_one(results: tables.Results) -> None:
    both = replace(results, measured=[*results.measured, *made_up("NVIDIA GB200")])
    lines = tables.v4(both).splitlines()
    assert (
        sum("GB200, measured" in line for line in lines) == 12 and sum("H200, measured" in line for line in lines) == 12
    )


def test_rows_that_missed_are_not_shown(results: tables.Results) -> None:
    missed = [row | {"ok": False} if row.get("suite") == "layers" else row for row in results.measured]
    assert len(tables.layers(replace(results, measured=missed)).splitlines()) == 2


@pytest.mark.parametrize("name", plots.PICTURES)
def test_pictures(results: tables.Results, name: str) -> None:
    text = plots.PICTURES[name](results)
    ElementTree.fromstring(text)
    assert text.count("<polyline") >= 4 and "nothing measured" not in text


def test_pages_without_rows_are_empty_not_wrong() -> None:
    nothing = replace(tables.load(), measured=[])
    for made in (*tables.TABLES.values(), *plots.PICTURES.values()):
        assert "nan" not in made(nothing)


def test_measuring_replaces_a_suite_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pages.jsonl"
    old = [{"suite": suite, "device": device, "n": 0} for suite in ("v4", "heads") for device in (H200, "GB200")]
    file.write_text("".join(json.dumps(row) + "\n" for row in old))
    said = []

    def run(words: Sequence[str]) -> int:
        said.append(list(words))
        Path(words[words.index("--out") + 1]).write_text(json.dumps({"suite": "v4", "device": H200, "n": 1}) + "\n")
        return 1

    monkeypatch.setattr(tables, "PAGES", file)
    monkeypatch.setattr(cli, "console", run)
    monkeypatch.setattr(pages, "matrix_product", lambda device: {"suite": "floors", "device": H200, "tflops": 1.0})
    assert pages.measure(["v4"], ["--peer", "x=y"]) is False
    assert said[0][:2] == ["--suite", "v4"] and said[0][-2:] == ["--peer", "x=y"]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [(row["suite"], row["device"], row.get("n")) for row in rows]
    assert kept == [("v4", "GB200", 0), ("heads", H200, 0), ("heads", "GB200", 0), ("floors", H200, None),
                    ("v4", H200, 1), ("v4", H200, None)]  # fmt: skip
    assert rows[-1]["seconds"] >= 0


def test_the_matrix_product_is_a_rate() -> None:
    assert pages.matrix_product(torch.device("cpu"), 64)["tflops"] >= 0


def test_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- figures: v4 -->\nold\n<!-- end -->\nb\n<!-- figures: peers -->\n<!-- end -->\n")
    monkeypatch.setattr(pages, "PAGES", (page,))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages.plots, "PICTURES", {})
    assert pages.main(["--check"]) == 1 and "out of date: page.md" in capsys.readouterr().err
    assert pages.main([]) == 0 and pages.main(["--check"]) == 0
    text = page.read_text()
    assert "old" not in text and text.startswith("a\n<!-- figures: v4 -->\n| T |") and "<!-- end -->\nb\n" in text
    with pytest.raises(SystemExit):
        pages.main(["--peer", "x=y"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        pages.main(["--measure"])
    assert "--measure needs a GPU" in capsys.readouterr().err


PUBLISHED_PEAK_MB = 2114.0  # of 4096 tokens and 64 heads, on a GB200


def test_the_committed_peak_is_below_the_published_one() -> None:
    figures = [f for f in tables.v4_figures(tables.load(), [4096]) if f.heads == 64 and not f.form]
    assert [f.peak for f in figures if f.where == "GB200, published"] == [PUBLISHED_PEAK_MB]
    measured = [f.peak for f in figures if f.where == "H200, measured"]
    assert len(measured) == 1 and measured[0] is not None and measured[0] < PUBLISHED_PEAK_MB


@pytest.mark.sm90
def test_peak_memory_of_the_v4_contract() -> None:
    """`max_memory_allocated` of forward and backward, the call's tensors included, is what the table says."""
    torch.cuda.empty_cache()
    others = torch.cuda.memory_allocated()
    inputs = draw(model_shape(ALL_MODELS["v4-flash"], 4096, 4096), torch.device("cuda"))

    def both() -> tuple[torch.Tensor, ...]:
        out, lse = cute_sparse_mla.fwd(inputs.q, inputs.kv, inputs.indices, d_v=512, **inputs.options)
        gradients = cute_sparse_mla.bwd(inputs.q, inputs.kv, out, inputs.dout, inputs.indices, lse, **inputs.options)
        return out, lse, *gradients

    both()
    torch.cuda.reset_peak_memory_stats()
    results = both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - others) / 1e6
    assert len(results) == 5 and peak < PUBLISHED_PEAK_MB
    del results
    extra = timing.peak_extra_mb(both, inputs.q.device)
    assert extra is not None and peak == pytest.approx(extra + input_bytes(inputs) / 1e6, rel=0.01)
