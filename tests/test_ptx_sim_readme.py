"""The simulator's guide: its example is copied out and run as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .ptx_sim import capture_cute

README = Path(__file__).parent / "ptx_sim" / "README.md"
REASON = capture_cute.available()


@pytest.mark.skipif(REASON is not None, reason=f"CuTe DSL capture: {REASON}")
def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)
    script = tmp_path / "example.py"
    script.write_text(code)
    root = Path(__file__).resolve().parents[1]
    # A fresh process: this one has chosen its runtime already.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")} | {"PYTHONPATH": "."}
    done = subprocess.run([sys.executable, script], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warp instructions []" in done.stdout
