"""Small PTX programs for tests: registers declared, array addresses in %d0, %d1 ... in the order given."""

from __future__ import annotations

import numpy as np

from .launch import Launch, tensor_entry
from .machine import Report

HEADER = """.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({params})
{{
.reg .pred %p<32>;
.reg .b16 %h<64>;
.reg .b32 %r<512>;
.reg .b64 %d<128>;
{loads}
{body}
ret;
}}
"""


def ptx(body: str, arrays: int, target: str = "sm_100a") -> str:
    params = ", ".join(f".param .u64 a{i}" for i in range(arrays))
    loads = "\n".join(f"ld.param.u64 %d{i}, [a{i}];" for i in range(arrays))
    return HEADER.format(params=params, loads=loads, body=body, target=target)


def launch(
    body: str,
    arrays: dict[str, np.ndarray],
    grid: int = 1,
    block: int = 32,
    cluster: int = 1,
    shared: int = 4096,
    target: str = "sm_100a",
) -> Launch:
    params = b"".join(a.ctypes.data.to_bytes(8, "little") for a in arrays.values())
    return Launch(
        ptx(body, len(arrays), target),
        "kernel",
        (grid, 1, 1),
        (block, 1, 1),
        (cluster, 1, 1),
        shared,
        params,
        [tensor_entry(name, a) for name, a in arrays.items()],
    )


GEOMETRY = ("grid", "block", "cluster", "shared", "target")


def run(body: str, arrays: dict[str, np.ndarray], **options: object) -> Report:
    """Run a PTX body on numpy arrays, in place. Options are the keywords of `launch` and those of `Machine`."""
    geometry = {name: options.pop(name) for name in GEOMETRY if name in options}
    return launch(body, arrays, **geometry).run(**options)


def aligned(shape: tuple | int, dtype: object, alignment: int = 128) -> np.ndarray:
    """A zeroed array whose address is a multiple of `alignment`."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


# Address of this thread's element i of 4 bytes in array n: ADDRESS.format(n=, d=destination register number).
LANE = """mov.u32 %r0, %tid.x;
mul.wide.u32 %d100, %r0, 4;
"""


def lane_address(array: int, target: int) -> str:
    return f"add.s64 %d{target}, %d{array}, %d100;\n"


def unary(operations: str, inputs: list[np.ndarray], width: int = 32, out: int = 1) -> list[np.ndarray]:
    """Run `operations` on inputs in %r1, %r2 ... (64 bits: %d11, %d12 ...); results are %r100 ... (%d50 ...)."""
    size = width // 8
    arrays = {f"in{i}": x.copy() for i, x in enumerate(inputs)}
    arrays |= {f"out{i}": np.zeros(32, f"u{size}") for i in range(out)}
    body = f"mov.u32 %r0, %tid.x;\nmul.wide.u32 %d100, %r0, {size};\n"
    source, target = ("%r{}", "%r{}") if width == 32 else ("%d1{}", "%d{}")
    first = 100 if width == 32 else 50
    for i in range(len(inputs)):
        body += lane_address(i, 60 + i) + f"ld.global.b{width} {source.format(i + 1)}, [%d{60 + i}];\n"
    body += operations
    for i in range(out):
        body += lane_address(len(inputs) + i, 80 + i)
        body += f"st.global.b{width} [%d{80 + i}], {target.format(first + i)};\n"
    run(body, arrays)
    return [arrays[f"out{i}"] for i in range(out)]
