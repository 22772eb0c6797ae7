"""What runs on a GPU only, as far as a CPU can show it: tuning, hardware counters, launch gaps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import cute_sparse_mla
from bench import cli, counters, gaps, tune
from bench.harness import Run
from bench.implementations import Ours
from bench.loading import git_commit
from bench.report import read_jsonl
from bench.shapes import plain_shape
from cute_sparse_mla import config, env

from . import full, side_by_side

ROOT = Path(__file__).resolve().parents[1]

CPU = torch.device("cpu")
NO_TILELANG = not env.is_installed("tilelang")


# -- tuning --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(NO_TILELANG, reason="asks what the SM90 kernels take")
@pytest.mark.parametrize(("heads", "tokens"), [(8, (1, 2, 4, 8)), (64, (1,)), (128, (1,))])
def test_only_what_the_kernels_honour_is_tried(
    heads: int, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "capability", lambda device: (9, 0))
    problem = plain_shape(f"64,128,{heads},576,64").problem()
    names = [ours.name for ours in tune.candidates(problem, CPU)]
    assert names == ["ours", *(f"ours:tokens_per_tile={n}" for n in tokens)]


def test_classes_cover_the_table_once() -> None:
    found = tune.classes()
    assert len({(c.D, c.heads, c.K, c.S_kv) for c in found}) == len(found) == 40
    one = tune.classes([plain_shape("4096,70000,12,512,2112")])[0]
    assert (one.heads, one.K[0], one.S_kv[0]) == ((9, 16), 1025, 16_385)


def row(impl: str, which: str, ms: float, ok: bool = True) -> dict:
    return {"impl": impl, "pass": which, "ms": ms, "ok": ok}


def times(impl: str, fwd: float, bwd: float, ok: bool = True) -> list[dict]:
    return [row(impl, "fwd", fwd), row(impl, "bwd", bwd, ok)]


def test_a_config_replaces_the_tables_where_it_is_faster_on_every_kind_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, run = tune.classes([plain_shape("4096,8192,8,576,2048")])[0], Run(CPU)
    good, mixed, wrong = ("ours:tokens_per_tile=2", "ours:tokens_per_tile=8", "ours:tokens_per_tile=4")
    by_rows = {
        "random": times("ours", 2, 8) + times(good, 2, 7) + times(mixed, 2, 9) + times(wrong, 1, 1, ok=False),
        "text": times("ours", 2, 8) + times(good, 2, 7) + times(mixed, 1, 2) + times(wrong, 1, 1, ok=False),
    }
    found = tune.verdict(what, "the table's", by_rows, run)
    assert found["changes"] and found["best"] == "tokens_per_tile=2"
    assert found["of_table"] == {"tokens_per_tile=2": 0.9, "tokens_per_tile=8": 0.574}
    assert "would change to tokens_per_tile=2" in tune.describe(found)
    same = tune.verdict(what, "the table's", {"random": times("ours", 2, 8) + times(good, 2, 7.9)}, run)
    assert not same["changes"] and "the table stays" in tune.describe(same)

    monkeypatch.setattr(config, "MEASURED", tmp_path / "configs.json")
    config.MEASURED.write_text("[]")
    tune.write_table([found], "sm90")
    monkeypatch.setattr(config, "_measured", config.read_measured())
    problem = plain_shape("300,8000,7,576,2048").problem()
    filled, chosen = config.choose("sm90", problem, config.SparseAttentionConfig())
    assert filled.tokens_per_tile == 2 and filled.bwd_threads == 384
    assert chosen.figure.endswith("forward / backward ms on random rows 2 / 7, text rows 2 / 7")
    elsewhere, _ = config.choose("sm90", plain_shape("300,8000,9,576,2048").problem(), config.SparseAttentionConfig())
    assert elsewhere.tokens_per_tile is None


@pytest.mark.parametrize("flag", ["--tune", "--gaps"])
def test_tuning_and_gaps_need_a_gpu(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.console([flag, "--device", "cpu"]) == 2
    assert "need a GPU" in capsys.readouterr().err


# -- counters ------------------------------------------------------------------------------------------------------

RAW = {
    "gpu__time_duration.sum": ("nsecond", "8,000,000"),
    "lts__t_sectors_op_red.sum": ("sector", "604,000,000"),
    "smsp__issue_active.avg.pct_of_peak_sustained_elapsed": ("%", "34.56"),
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": ("inst", "1.234"),
    "dram__bytes_read.sum": ("byte", "n/a"),
}


def csv_text() -> str:
    """As the tool prints it: a line of its own, names, units, one launch."""
    units, values = zip(*RAW.values(), strict=True)
    lines = [("ID", "Kernel Name", *RAW), ("", "", *units), ("0", "sparse_mla_bwd_kernel", *values)]
    return "==PROF== Connected\n" + "".join(",".join(f'"{word}"' for word in line) + "\n" for line in lines)


def test_counters_become_a_row_beside_the_floors() -> None:
    values = list(counters.measured(csv_text()))
    assert len(values) == 1
    found = counters.row_of(values[0], plain_shape("4096,8192,64,576,2048"), "bwd", Run(CPU))
    assert found["ms"] == 8.0 and found["floors_ms"] == {"matrix": 3.74, "gather": 1.067, "adds": 5.02}
    assert found["l2_gb"] == {"red": 19.328} and found["l2_tbps"] == {"red": 2.416}
    assert found["percent_of_peak"] == {"issue_slots": 34.6} and found["stalls"] == {"gmma": 1.23}
    assert found["dram_gb"] == {} and json.dumps(found)
    assert "red 2.416" in counters.describe(found)


def test_counters_that_the_tool_does_not_know_are_left_out() -> None:
    names = "Device NVIDIA H200\n----\ngpu__time_duration   Counter  nanosecond\nsmsp__issue_active Counter cycle\n"
    assert counters.known_metrics(names) == ["gpu__time_duration.sum", counters.PERCENT["issue_slots"]]


def test_counters_without_a_gpu_or_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(cute_sparse_mla.UnsupportedError, match="ncu gave no counters"):
        list(counters.measured("==ERROR== no permission"))
    assert counters.main(["--pass", "fwd+bwd"]) == 2
    assert "must be of fwd, bwd" in capsys.readouterr().err


# -- gaps ----------------------------------------------------------------------------------------------------------


def test_gaps_are_told_beyond_the_kernels() -> None:
    text = gaps.describe(
        {"pass": "bwd", "impl": "ours", "kernels": 4, "kernels_ms": 8.0, "replay_ms": 8.01, "queued_ms": 8.02,
         "idle_ms": 8.1, "host_ms": 0.2},
    )  # fmt: skip
    assert gaps.busy([(3, 5), (0, 2), (1, 2.5), (4, 4.5)]) == 4.5
    assert "4 kernels 8 ms; replay +10 us, queued +20 us, idle +100 us; host 200 us" in text


@pytest.mark.sm90
def test_gaps_on_a_gpu() -> None:
    from bench.harness import Settings

    settings = Settings(torch.device("cuda"), reps=3)
    rows = gaps.rows(plain_shape("256,512,16,576,128"), Ours(), settings, Run(settings.device))
    assert [row["pass"] for row in rows] == ["fwd", "bwd"]
    assert all(0 < row["kernels_ms"] <= row["idle_ms"] and row["kernels"] >= 1 for row in rows)


def test_sanitizers_end_with_the_command() -> None:
    """A tool left over would share the GPU with whatever is timed next."""
    program = """
import os, signal, subprocess, threading, time
from unittest.mock import patch
from tests import sanitize

started = subprocess.Popen
with patch.object(subprocess, "Popen", lambda command, **options: started(("sleep", "60"), **options)):
    signal.signal(signal.SIGTERM, sanitize.end)
    threading.Thread(target=sanitize.watched, args=("memcheck", 0, 50), daemon=True).start()
    while not sanitize.RUNNING:
        time.sleep(0.01)
    print(*sanitize.RUNNING, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 143, done.stderr
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # init may take a moment to collect it
            os.killpg(int(done.stdout), 0)
            time.sleep(0.1)


def test_full_runs_parts_and_leaves_out_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAKELEVEL", "1")  # as within `make full`
    monkeypatch.setenv("MAKEFLAGS", "w -- ARGS=others")
    monkeypatch.setattr(full, "PARTS", {"help": 0, "no-such-target": 0, "parallel-h200": 99})
    out = tmp_path / "full.jsonl"
    assert full.main(["--out", str(out)]) == 1
    rows = read_jsonl(out)
    assert [(row["part"], row["ok"]) for row in rows] == [("help", True), ("no-such-target", False)]
    assert rows[0]["said"].startswith("clean") and "no-such-target" in rows[1]["said"]
    assert "parallel-h200: left out, needs 99 Hopper GPUs" in capsys.readouterr().out
    assert full.missing("parallel-h200", 99, None) == ""


def test_the_commit_of_a_file_is_of_the_checkout_that_tracks_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(("git", *who, *words), cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    folder = tmp_path / "peer"
    folder.mkdir()
    tracked, copied = folder / "tracked.py", tmp_path / "copied.py"
    for file in (tracked, copied):
        file.touch()
    git("init", "-q")
    assert git_commit(tracked) is None  # no commit yet
    git("add", "peer")
    git("commit", "-q", "-m", "one")
    assert git_commit(tracked) == git_commit(folder) == git("rev-parse", "--short=12", "HEAD").strip()
    assert git_commit(copied) is None
    assert git_commit(tmp_path / "missing" / "file.py") is None


def test_tests_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(5))\n"
        "def test_numbers(n):\n"
        "    if n == 3: pytest.skip('three')\n"
        "def test_wrong(): assert 1 + 1 == 3\n"
    )
    arguments = ["--jobs", "2", "--chunk", "4", "test_some.py"]
    assert side_by_side.main([*arguments, "-k", "numbers"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 passed, 1 skipped of 5 in ")
    assert side_by_side.main(arguments) == 1
    out = capsys.readouterr().out
    assert "assert (1 + 1) == 3" in out
    assert out.splitlines()[-1].startswith("1 failed, 4 passed, 1 skipped of 6 in ")
    assert side_by_side.main([*arguments, "-k", "none_such"]) == 0
    with pytest.raises(SystemExit, match="no_such_file"):
        side_by_side.main(["no_such_file.py"])
