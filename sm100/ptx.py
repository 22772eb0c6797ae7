"""Single instructions with plain integer addresses: shared memory in bytes, tensor memory as `lane << 16 | column`.

They go through CuTe DSL's NVVM operations. Only gather4 is inline PTX: the DSL's operation for it lowers to another
spelling than the one that known-good kernels use. Function names are those of the PTX ISA where it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int16, Int32, Int64, Uint8, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, llvm, nvvm, vector
from cutlass.cute.typing import AddressSpace
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.experimental import primitives

SHARED_CLUSTER, TENSOR = 7, 6  # LLVM address spaces
# The bit of a shared-memory address that tells the two CTAs of a pair apart.
PEER_BIT = 0x1000000
PAIR = 0b11  # both CTAs of a pair, as a multicast mask

fence_after = lambda: primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)  # noqa: E731
fence_before = lambda: primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)  # noqa: E731


def _value(x: Any, kind: type = Int32) -> ir.Value:
    return kind(x).ir_value()


def shared(address: Int32, kind: type = Uint8, align: int = 16) -> cute.Pointer:
    """A pointer to shared memory of this CTA (or, with a mapped address, of the cluster)."""
    return cute.make_ptr(kind, address, AddressSpace.smem, assumed_align=align)


def tensor_memory(address: Int32) -> ir.Value:
    return llvm.inttoptr(llvm.PointerType.get(TENSOR), _value(address))


# Barriers -------------------------------------------------------------------------------------------------------------


def wait(barrier: Int32, parity: Int32) -> None:
    cute.arch.mbarrier_wait(shared(barrier, Int64, 8), parity)


def wait_cluster(barrier: Int32, parity: Int32) -> None:
    """Wait for arrivals of the whole cluster: what its threads wrote before is seen."""
    llvm.inline_asm(
        None, [_value(barrier), _value(parity)],
        "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1, 10000000; "
        "@!done bra AGAIN; }",
        "r,r", has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip


def arrive(barrier: Int32, rank: Any = None) -> None:
    """One arrival on this CTA's barrier, or on that of the cluster's CTA `rank`."""
    scope = None if rank is None else nvvm.MemScopeKind.CLUSTER
    cute.arch.mbarrier_arrive(shared(barrier, Int64, 8), None if rank is None else Int32(rank), scope=scope)


def arrive_expect(barrier: Int32, size: int) -> None:
    cute.arch.mbarrier_arrive_and_expect_tx(shared(barrier, Int64, 8), size)


def commit(barrier: Int32, pair: bool, multicast: bool | None = None) -> None:
    """One arrival when this thread's earlier work, of a pair or of one CTA, is done; by multicast in both CTAs."""
    mask = Int16(PAIR) if (pair if multicast is None else multicast) else None
    group = primitives.CTAGroup.CTA_2 if pair else primitives.CTAGroup.CTA_1
    primitives.tcgen05_commit(shared(barrier, Int64, 8).to_llvm_ptr(), multicast_mask=mask, group=group)


# Tensor maps ----------------------------------------------------------------------------------------------------------


@dsl_user_op
def descriptor(atom: cute.CopyAtom, *, loc: Any = None, ip: Any = None) -> cute.Pointer:
    """Address of the tensor map that a TMA atom owns."""
    if "Load" in type(atom.op).__name__ or "G2S" in type(atom.op).__name__:
        atom_value = atom._unpack(tma_bar_ptr=shared(Int32(0), Int64, 8), loc=loc, ip=ip)
    else:
        atom_value = atom._unpack(loc=loc, ip=ip)
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    address = cute_nvgpu.get_tma_desc_addr(kind, atom_value, loc=loc, ip=ip).toint(loc=loc, ip=ip)
    return cute.make_ptr(Uint8, address, AddressSpace.generic, assumed_align=64, loc=loc, ip=ip)


def gather4(
    target: Int32, source: cute.Pointer, column: Int32, rows: Sequence[Int32], barrier: Int32, pair: bool
) -> None:
    """Four rows of a 2-D tensor map, `box` columns each; of a pair, the even CTA's barrier gets the bytes."""
    group = "cta_group::2" if pair else "cta_group::1"
    if pair:
        barrier = barrier & ~PEER_BIT
    llvm.inline_asm(
        None,
        [_value(target), _value(source.toint(), Int64), _value(column), *map(_value, rows), _value(barrier)],
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes."
        + group + " [$0], [$1, {$2, $3, $4, $5, $6}], [$7];",
        "r,l,r,r,r,r,r,r", has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip


def tensor_load(target: Int32, source: cute.Pointer, at: Sequence[Int32], barrier: Int32, pair: bool) -> None:
    """One box of a tensor map; of a pair, the even CTA's barrier gets the bytes."""
    group = nvvm.CTAGroupKind.CTA_2 if pair else None
    if pair:
        barrier = barrier & ~PEER_BIT
    space = llvm.PointerType.get(SHARED_CLUSTER)
    nvvm.cp_async_bulk_tensor_shared_cluster_global(
        llvm.inttoptr(space, _value(target)) if pair else shared(target, align=128).to_llvm_ptr(),
        source.to_llvm_ptr(), list(map(_value, at)), shared(barrier, Int64, 8).to_llvm_ptr(), [],
        group=group, is_cta_only=None if pair else True,
    )  # fmt: skip


def tensor_store(target: cute.Pointer, source: Int32, at: Sequence[Int32]) -> None:
    pointer = shared(source, align=128).to_llvm_ptr()
    nvvm.cp_async_bulk_tensor_global_shared_cta(target.to_llvm_ptr(), pointer, list(map(_value, at)))


# Tensor core ----------------------------------------------------------------------------------------------------------


def operand(address: Int32, *, leading: int, stride: int) -> Any:
    """Shared-memory operand with a 128-byte swizzle; LBO and SBO in bytes."""
    swizzle = primitives.Tcgen05SmemSwizzle.SWIZZLE_128B
    return primitives.Tcgen05SmemDesc.build(address, leading, stride, layout=swizzle)


def shape(dtype: type, m: int, n: int, b_mn_major: bool, a_mn_major: bool = False) -> Any:
    return primitives.Tcgen05InstrDesc.build(
        c_dtype=Float32, a_dtype=dtype, b_dtype=dtype, m_dim=m, n_dim=n,
        a_major=int(a_mn_major), b_major=int(b_mn_major),
    )  # fmt: skip


def mma(d: Int32, a: Any, b: Any, instruction: Any, accumulate: Any, *, pair: bool, a_in_tensor_memory: bool) -> None:
    """D (+)= A B for 16 columns of K, over the pair or weight-stationary over one CTA."""
    a = tensor_memory(a) if a_in_tensor_memory else a
    kind = primitives.Tcgen05MMAKind.F16
    if pair:
        primitives.tcgen05_mma(kind, primitives.CTAGroup.CTA_2, tensor_memory(d), a, b, instruction, accumulate)
    else:
        primitives.tcgen05_mma_ws(kind, tensor_memory(d), a, b, instruction, accumulate)


def mma_rows(d: Int32, a: Any, b: Any, instruction: Any, accumulate: Any) -> None:
    """D (+)= A B for 16 columns of K, a lane a row, over one CTA."""
    kind, group = primitives.Tcgen05MMAKind.F16, primitives.CTAGroup.CTA_1
    primitives.tcgen05_mma(kind, group, tensor_memory(d), a, b, instruction, accumulate)


def copy_to_tensor_memory(target: Int32, source: Any, pair: bool) -> None:
    """128 rows of 32 bytes."""
    group = primitives.CTAGroup.CTA_2 if pair else primitives.CTAGroup.CTA_1
    primitives.tcgen05_cp(primitives.Tcgen05CpShape.SHAPE_128X256B, tensor_memory(target), source, group=group)


def load_columns(address: Int32, count: int) -> list[Float32]:
    """`count` 32-bit columns of the warp's lanes, one register each; wait::ld before use.

    In loads of 32 or 4 columns, the sizes that known-good kernels use.
    """
    width = 32 if count % 32 == 0 else 4
    found = []
    for start in range(0, count, width):
        out = primitives.tcgen05_ld("32x32b", tensor_memory(address + start), num=width)
        words = [vector.extract(out, dynamic_position=[], static_position=[i]) for i in range(width)]
        found += [Float32(llvm.bitcast(T.f32(), word)) for word in words]
    return found


def load_fragments(address: Int32, columns: int) -> list[Float32]:
    """16 lanes by `columns` columns, as matrix fragments: lane l's register 4 i + 2 j + k is row l // 4 + 8 j, column
    8 i + 2 (l % 4) + k; wait::ld before use.
    """
    out = primitives.tcgen05_ld("16x256b", tensor_memory(address), num=columns // 8)
    words = [vector.extract(out, dynamic_position=[], static_position=[i]) for i in range(columns // 2)]
    return [Float32(llvm.bitcast(T.f32(), word)) for word in words]


def store_columns(address: Int32, values: Sequence[Float32]) -> None:
    """The values in 32-bit columns of the warp's lanes, a multiple of 32; wait::st before others read."""
    for start in range(0, len(values), 32):
        words = [llvm.bitcast(T.i32(), v.ir_value()) for v in values[start : start + 32]]
        packed = vector.from_elements(T.vector(32, T.i32()), words)
        primitives.tcgen05_st("32x32b", tensor_memory(address + start), packed)


# Shared memory --------------------------------------------------------------------------------------------------------


def load_words(address: Int32, count: int, kind: type = Int32) -> list[Any]:
    """`count` consecutive 32-bit words, read as one vector."""
    if count == 1:
        return [kind(llvm.load(kind.mlir_type, shared(address, kind, 4).to_llvm_ptr(), alignment=4))]
    pointer = shared(address, kind, 4 * count).to_llvm_ptr()
    out = llvm.load(T.vector(count, kind.mlir_type), pointer, alignment=4 * count)
    return [kind(vector.extract(out, dynamic_position=[], static_position=[i])) for i in range(count)]


def store_words(address: Int32, values: Sequence[Any]) -> None:
    """Consecutive 32-bit words of one type, written as one vector."""
    kind = type(values[0])
    if len(values) == 1:
        llvm.store(values[0].ir_value(), shared(address, kind, 4).to_llvm_ptr(), alignment=4)
        return
    packed = vector.from_elements(T.vector(len(values), kind.mlir_type), [v.ir_value() for v in values])
    llvm.store(packed, shared(address, kind, 4 * len(values)).to_llvm_ptr(), alignment=4 * len(values))


def atomic_or(address: Int32, bits: Uint32) -> Uint32:
    """Set bits of a word; returns it as it was."""
    return cute.arch.atomic_or(shared(address, Uint32, 4), bits)


def atomic_add(address: Int32, value: Int32) -> Int32:
    """Add to a word; returns it as it was."""
    return cute.arch.atomic_add(shared(address, Int32, 4), value)


def atomic_min(address: Int32, value: Int32) -> None:
    """Lower a word to a value."""
    cute.arch.atomic_min(shared(address, Int32, 4), value)


def in_other(address: Int32, rank: Int32) -> Int32:
    """A shared-memory address of CTA `rank` of a pair, as an address of the cluster in the other CTA."""
    space = llvm.PointerType.get(SHARED_CLUSTER)
    return Int32(llvm.ptrtoint(T.i32(), nvvm.mapa(space, shared(address).to_llvm_ptr(), _value(1 - rank))))


def store_cluster(address: Int32, values: Sequence[Any]) -> None:
    """Four consecutive 32-bit words of one type, to an address of the cluster."""
    kind = type(values[0])
    packed = vector.from_elements(T.vector(len(values), kind.mlir_type), [v.ir_value() for v in values])
    pointer = llvm.inttoptr(llvm.PointerType.get(SHARED_CLUSTER), _value(address))
    llvm.store(packed, pointer, alignment=4 * len(values))


def pack_halves(values: Sequence[Float32], dtype: type) -> list[Uint32]:
    """Pairs of fp32 rounded to 16 bits, the first in the low half."""
    words = []
    for low, high in zip(values[::2], values[1::2], strict=True):
        pair = vector.from_elements(T.vector(2, T.f32()), [low.ir_value(), high.ir_value()])
        rounded = llvm.fptrunc(T.vector(2, dtype.mlir_type), pair)
        words.append(Uint32(llvm.bitcast(T.i32(), rounded)))
    return words


# Global memory --------------------------------------------------------------------------------------------------------


def add_quad(address: Int64, values: Sequence[Float32], wanted: Boolean) -> None:
    """Four consecutive fp32 added in one instruction, if wanted; the address is a multiple of 16."""
    _put_quad("red.relaxed.gpu.global.add.v4.f32", address, values, wanted)


def store_quad(address: Int64, values: Sequence[Float32], wanted: Boolean) -> None:
    """The same, stored."""
    _put_quad("st.global.v4.f32", address, values, wanted)


def _put_quad(instruction: str, address: Int64, values: Sequence[Float32], wanted: Boolean) -> None:
    llvm.inline_asm(
        None, [_value(address, Int64), *(v.ir_value() for v in values), _value(wanted)],
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p " + instruction + " [$0], {$1, $2, $3, $4}; }",
        "l,f,f,f,f,r", has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip


def load_quad(address: Int64) -> list[Float32]:
    """Four consecutive fp32; the address is a multiple of 16."""
    return _load_global(address, 4, Float32)


def load_halves(address: Int64, count: int, dtype: type) -> list[Float32]:
    """Consecutive elements of 16 bits, as fp32; the address is a multiple of the `count` elements' size."""
    return [x.to(Float32) for x in _load_global(address, count, dtype)]


def _load_global(address: Int64, count: int, kind: type) -> list[Any]:
    size = count * kind.width // 8
    pointer = cute.make_ptr(kind, address, AddressSpace.gmem, assumed_align=size).to_llvm_ptr()
    out = llvm.load(T.vector(count, kind.mlir_type), pointer, alignment=size)
    return [kind(vector.extract(out, dynamic_position=[], static_position=[i])) for i in range(count)]


def store_global(address: Int64, words: Sequence[Uint32]) -> None:
    """Four consecutive 32-bit words; the address is a multiple of 16."""
    packed = vector.from_elements(T.vector(len(words), T.i32()), [w.ir_value() for w in words])
    pointer = cute.make_ptr(Uint32, address, AddressSpace.gmem, assumed_align=16).to_llvm_ptr()
    llvm.store(packed, pointer, alignment=16)
