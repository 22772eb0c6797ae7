"""Run a command where a GPU is, as if there were none: `python -m tests.ptx_sim.without_gpu python -m tests.fuzz ...`.

A torch with CUDA brings its runtime and driver into every process before TileLang looks for them. So the stand-in
(`cuda_driver_shim.c`) is loaded ahead of both, and `capture_tilelang.prepare` takes it from there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import capture_tilelang


def main(command: list[str]) -> int:
    """The command's exit status."""
    with tempfile.TemporaryDirectory(prefix="ptx_sim_") as folder:
        library = Path(folder) / "libstand_in.so"
        capture_tilelang.build(library)
        loaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "LD_PRELOAD": ":".join(loaded)}
        return subprocess.run(command, env=os.environ | hidden | {capture_tilelang.LOADED: str(library)}).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
