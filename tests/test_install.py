"""What is installed, what importing does, and the command line: each in a fresh interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
from cute_sparse_mla.hopper.launch import TILELANG_VERSIONS
from cute_sparse_mla.sm100.launch import DSL_VERSIONS

from bench import tables
from cute_sparse_mla import check

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("cute_sparse_mla", "hopper", "sm100", "bench", "pyproject.toml", "README.md", "LICENSE")
# Folders of a checkout and where they stand once installed.
MAPPED = {name: f"cute_sparse_mla/{name}" for name in ("hopper", "sm100", "bench")}


def python(code: str, *flags: str, path: Path = ROOT, cwd: Path | str = "/") -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds the package at `path`, in another folder."""
    environment = os.environ | {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def output(code: str, *flags: str, path: Path = ROOT) -> str:
    run = python(code, *flags, path=path)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.strip()


def copied_sources(to: Path) -> Path:
    """The sources alone, without what builds and tools leave in a checkout."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(source, to / name)
    return to


# -- import --------------------------------------------------------------------------------------------------------


def test_import_is_light() -> None:
    """No CUDA context, no kernel language, under a second beside torch."""
    code = f"""
import sys, time
import torch
before = set(sys.modules)  # torch itself imports cuda.bindings where they are installed
start = time.perf_counter()
import cute_sparse_mla
seconds = time.perf_counter() - start
assert cute_sparse_mla.__file__.startswith({str(ROOT)!r}), cute_sparse_mla.__file__
heavy = {{"tilelang", "tvm", "tvm_ffi", "cutlass", "cuda", "matplotlib"}} & (set(sys.modules) - before)
assert not heavy, heavy
assert not [name for name in sys.modules if name.startswith(("cute_sparse_mla.hopper", "cute_sparse_mla.bench"))]
assert not torch.cuda.is_initialized()
print(seconds)
"""
    # The best of a few: another process may have the cores.
    seconds = min(float(output(code)) for _ in range(2))
    assert seconds < 1.0


def test_import_works_without_any_optional_dependency() -> None:
    """tilelang, cutlass, numpy and triton cannot be imported; the reference runs."""
    output("""
import sys
for name in ("tilelang", "cutlass", "triton", "numpy"):
    sys.modules[name] = None
import warnings
warnings.simplefilter("ignore")
import torch, cute_sparse_mla
q, kv = torch.zeros(1, 2, 4, 64).bfloat16(), torch.zeros(1, 3, 1, 64).bfloat16()
rows = torch.zeros(1, 2, 3, dtype=torch.int32)
out, lse = cute_sparse_mla.fwd(q, kv, rows, d_v=32)
assert abs(float(lse[0, 0, 0]) - 1.0986123) < 1e-6
for capability, extra in (((9, 0), "hopper"), ((10, 0), "blackwell")):
    q, kv = torch.zeros(1, 2, 4, 576).bfloat16(), torch.zeros(1, 3, 1, 576).bfloat16()
    answer = cute_sparse_mla.explain(q, kv, rows, capability=capability)
    assert f"pip install 'cute_sparse_mla[{extra}]'" in answer.reason, answer.reason
""")


def test_every_combination_of_missing_packages() -> None:
    """What a missing package is needed for names its install command; everything else is as if it were there."""
    output("""
import importlib.util, itertools, sys, warnings
warnings.simplefilter("ignore")
import torch, cute_sparse_mla
installs = {"tilelang": "cute_sparse_mla[hopper]", "cutlass": "cute_sparse_mla[blackwell]",
            "cudnn": "cute_sparse_mla[cudnn]", "flash_mla": "FlashMLA"}
here = {name for name in installs if importlib.util.find_spec(name)}
asked = {"tilelang": dict(capability=(9, 0)), "cutlass": dict(capability=(10, 0)),
         "cudnn": dict(capability=(10, 0), backend="cudnn"), "flash_mla": dict(capability=(9, 0), backend="flash_mla")}
q, kv = torch.zeros(2, 4, 576).bfloat16(), torch.zeros(3, 1, 576).bfloat16()
rows = torch.zeros(2, 3, dtype=torch.int32)
for hidden in itertools.chain.from_iterable(itertools.combinations(installs, n) for n in range(5)):
    for name in hidden:
        sys.modules[name] = None
    for name, options in asked.items():
        answer = cute_sparse_mla.explain(q, kv, rows, **options)
        present = name in here and name not in hidden
        assert answer.ok == present, (hidden, name, answer.reason)
        assert present or (f"'{name}'" in answer.reason and installs[name] in answer.reason), answer.reason
    cute_sparse_mla.fwd(q, kv, rows)
    for name in hidden:
        del sys.modules[name]
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_import() -> None:
    """A data loader's worker, forked after the import, can use the package; so can its parent."""
    said = output("""
import os, torch, cute_sparse_mla
def work():
    q, kv = torch.ones(1, 2, 4, 64).bfloat16(), torch.ones(1, 3, 1, 64).bfloat16()
    return float(cute_sparse_mla.fwd(q, kv, torch.zeros(1, 2, 3, dtype=torch.int32), d_v=32)[0].sum())
pid = os.fork()
if pid == 0:
    os._exit(0 if work() == 256 else 1)
assert os.waitpid(pid, 0)[1] == 0 and work() == 256 and not torch.cuda.is_initialized()
print("both")
""")
    assert said == "both"


def test_public_names() -> None:
    import cute_sparse_mla

    assert sorted(cute_sparse_mla.__all__) == cute_sparse_mla.__all__
    for name in cute_sparse_mla.__all__:
        assert getattr(cute_sparse_mla, name) is not None
    for call in (cute_sparse_mla.fwd, cute_sparse_mla.bwd, cute_sparse_mla.sparse_mla, cute_sparse_mla.explain):
        assert call.__doc__


# -- an uninstalled checkout ---------------------------------------------------------------------------------------


def test_checkout_without_installing(tmp_path: Path) -> None:
    """From another folder through PYTHONPATH, sub-packages included, each module under one name only."""
    tree = copied_sources(tmp_path)
    found = output(
        "import cute_sparse_mla, cute_sparse_mla.hopper, cute_sparse_mla.bench.cases as cases\n"
        "print(cute_sparse_mla.__file__, cute_sparse_mla.hopper.__file__, cases.__file__)",
        path=tree,
    ).split()
    assert [Path(f) for f in found] == [
        tree / "cute_sparse_mla/__init__.py", tree / "hopper/__init__.py", tree / "bench/cases.py"
    ]  # fmt: skip


def test_a_checkout_keeps_to_its_own_sub_packages(tmp_path: Path) -> None:
    """Beside an editable install of another checkout, which offers sub-packages of the same names."""
    tree = copied_sources(tmp_path)
    decoy = tmp_path / "decoy.py"
    decoy.write_text("")
    output(f"""
import importlib.util, sys
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("cute_sparse_mla."):
            return importlib.util.spec_from_file_location(name, {str(decoy)!r})
sys.meta_path.append(Editable)
import cute_sparse_mla.hopper
assert cute_sparse_mla.hopper.__file__ == {str(tree / "hopper" / "__init__.py")!r}, cute_sparse_mla.hopper.__file__
""", path=tree)  # fmt: skip


# -- command line --------------------------------------------------------------------------------------------------


def command(*words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *flags, "-m", "cute_sparse_mla", *words],
        cwd="/", env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("name", [None, "check", "bench", "explain", "warmup"])
def test_help(name: str | None) -> None:
    run = command(*([name] if name else []), "--help")
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert run.stdout.startswith("usage: cute_sparse_mla")
    if name is None:
        assert all(word in run.stdout for word in ("check", "bench", "explain", "warmup"))


@pytest.mark.parametrize(("words", "code", "text"), [
    (["explain", "--device", "cpu"], 0, "backend   reference"),
    (["explain", "--capability", "12.0", "--model", "v4-pro"], 0, "no kernels for compute capability 12.0"),
    (["explain", "--backend", "sm90", "--device", "cpu"], 1, "cannot run: backend 'sm90' needs"),
    (["explain", "--capability", "8.0", "--backend", "sm100"], 1, "cannot run: backend 'sm100' needs"),
    (["warmup", "--device", "cpu"], 0, "reference"),
    (["warmup", "--device", "cpu", "--backend", "sm90"], 2, "UnsupportedError: backend 'sm90' needs"),
    (["warmup", "--device", "cpu", "--heads", "500"], 2, "heads_per_group: must lie in 1..128; got 500"),
    (["warmup", "--device", "nowhere"], 2, "no such device here"),
    (["explain", "--backend", "fast", "--device", "cpu"], 1, "must be one of reference, sm90, sm100, "),
    (["check", "--device", "cpu", "--heads", "200"], 2, "heads: must lie in 1..128; got 200"),
    (["bench", "--device", "cpu", "--out", "/dev/null/rows.jsonl"], 2, "--out: cannot be written"),
    (["explain", "--model", "gpt2"], 2, "invalid choice"),
    (["explain", "--capability", "nine"], 2, "must be a compute capability such as 9.0"),
    (["nothing"], 2, "invalid choice"),
    ([], 2, "required"),
])  # fmt: skip
def test_answers_and_exit_codes(words: list[str], code: int, text: str) -> None:
    run = command(*words)
    assert run.returncode == code, run.stdout + run.stderr
    assert text in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_check_reports_an_impossible_backend_in_one_line() -> None:
    run = command("check", "--backend", "sm90", "--device", "cpu", "--heads", "8")
    assert run.returncode != 0 and "sm90" in run.stderr and "Traceback" not in run.stderr


def test_a_slow_pass_is_not_timed_for_long() -> None:
    """On a busy CPU a pass of the main job takes minutes: it is run again only while that took less than enough."""
    ran: list[int] = []

    def slow() -> None:
        time.sleep(0.03)
        ran.append(1)

    times = check._milliseconds(slow, 5, torch.device("cpu"), enough=0.05)
    assert len(ran) == len(times) == 2


def test_the_tested_versions_that_users_read() -> None:
    """What the kernels accept is what the README's table, made of the committed rows, says was tested."""
    table = tables.versions(tables.load())
    rows = {cells[1]: cells for cells in ([c.strip() for c in line.split("|")] for line in table.splitlines()[2:])}
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    for package, tested in (("tilelang", TILELANG_VERSIONS), ("nvidia-cutlass-dsl", DSL_VERSIONS)):
        assert set(rows[package][5].split(", ")) == set(tested)
        assert rows[package][3].startswith(f">={tested[0]}, <")
    assert all(rows[name][3].startswith(">=") for name in ("python", "torch", "nvidia-cudnn-frontend"))


# -- wheel and sdist -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """`(wheel, sdist)`; the wheel is built from the sdist, which therefore has all that a build needs."""
    tree = copied_sources(tmp_path_factory.mktemp("sources"))
    target = tmp_path_factory.mktemp("dist")
    run = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(tree)],
        cwd=target, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist


def expected_files() -> dict[str, Path]:
    """Every file that an installation must have, by its place in it."""
    patterns: dict[str, tuple[str, ...]] = {"cute_sparse_mla": ("*.py", "py.typed", "data/*.pt", "data/*.json")}
    patterns |= {name: ("*.py",) for name in MAPPED}
    files = {}
    for folder, kinds in patterns.items():
        for kind in kinds:
            for file in (ROOT / folder).rglob(kind):
                place = MAPPED.get(folder, folder) / file.relative_to(ROOT / folder)
                files[place.as_posix()] = file
    return files


def test_wheel_contents_equal_the_tree(distributions: tuple[Path, Path]) -> None:
    """Name for name and byte for byte, and nothing else but metadata."""
    expected = expected_files()
    assert {"cute_sparse_mla/hopper/__init__.py", "cute_sparse_mla/bench/cases.py", "cute_sparse_mla/py.typed"} <= set(
        expected
    )
    with zipfile.ZipFile(distributions[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == set(expected)
        for name, file in expected.items():
            assert wheel.read(name) == file.read_bytes(), name
        metadata = {name.partition(".dist-info/")[2] for name in wheel.namelist() if ".dist-info/" in name}
        assert metadata >= {"METADATA", "entry_points.txt", "licenses/LICENSE"}
        entry = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "cute-sparse-mla = cute_sparse_mla.cli:main" in wheel.read(entry).decode()


def test_sdist_has_what_a_build_needs(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {file.relative_to(ROOT).as_posix() for file in expected_files().values()}
    assert needed | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_version_and_requirements(distributions: tuple[Path, Path]) -> None:
    """A CPU user is asked for torch only; each architecture's package is an extra of its own."""
    import cute_sparse_mla

    with zipfile.ZipFile(distributions[0]) as wheel:
        metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA"))).decode()
    assert f"Version: {cute_sparse_mla.__version__}\n" in metadata
    required = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    plain = [line for line in required if "extra ==" not in line]
    assert [line.partition(">")[0] for line in plain] == ["torch"]
    of_extra = {extra: [r for r in required if f'extra == "{extra}"' in r] for extra in ("hopper", "blackwell")}
    assert any(r.startswith("tilelang") for r in of_extra["hopper"])
    assert not any("cutlass" in r for r in of_extra["hopper"])
    assert any(r.startswith("nvidia-cutlass-dsl") for r in of_extra["blackwell"])
    assert not any("tilelang" in r for r in of_extra["blackwell"])


def test_an_unpacked_wheel_works(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(distributions[0]) as wheel:
        wheel.extractall(tmp_path)
    found = output(
        "import cute_sparse_mla, cute_sparse_mla.hopper, cute_sparse_mla.bench.cases as cases\n"
        "from pathlib import Path\n"
        "inputs = cases.BASE.but(S=2, H=2, K=4).inputs()\n"
        "assert cute_sparse_mla.fwd(inputs.q, inputs.kv, inputs.indices)[0].shape == (1, 2, 2, 512)\n"
        "print(cute_sparse_mla.hopper.__file__, cases.__file__)",
        path=tmp_path,
    ).split()
    assert [Path(f) for f in found] == [
        tmp_path / "cute_sparse_mla/hopper/__init__.py", tmp_path / "cute_sparse_mla/bench/cases.py"
    ]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-m", "cute_sparse_mla", "explain", "--device", "cpu"],
        cwd="/", env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0 and "reference" in run.stdout, run.stderr
