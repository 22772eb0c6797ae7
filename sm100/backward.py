"""Backward of sparse MLA on SM100: 64 query rows a CTA; persistent.

    p_hat = exp(s - lse)   P = w p_hat   dP = dout v   dS = p_hat (w dP + (dlse - w Delta))
    dq = sm_scale sum dS k               dkv[row] += sm_scale dS q, and P dout on the first 512 columns

`q [B, S, H, D]`, `dout [B, S, H, 512]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]` and the per-row `stats` of
`preprocess.py` -> `dq [B, S, H, D]`, and adds into fp32 `dkv [B, S_kv, G, D]`. How operands and lanes are laid out is
told in `backward_plan.py`, what a row is in `heads.py`.

Pipeline of one block of 64 slots, time down; a name behind > is the barrier that announces it:

    index                gather                mma                        softmax             epilogue
    rows i  >rows_ready  q, dout  >q_full
                         kv i     >kv_full     S, dP      >s_ready        to registers >s_free
    rows i + 1                                                            P, dS   >p_ready    (adds of block i - 1)
                                               dq += dS K >kv_free
                         kv i + 1              q^T dS, dout^T P of 128 columns of d
                                                          >dkv_ready                          to registers >dkv_free
                                               the next 128 columns                           sm_scale a + b, adds
                                               ...
                                               S, dP i + 1         >s_ready
                                               the last columns    >p_free
    next tile            q, dout               >q_free    >dq_ready                           sm_scale dq  >dq_free

P and dS are rounded once, dS unscaled: the two parts of dkv have an accumulator each and meet in registers.
"""

import cuda.bindings.driver as cuda  # noqa: I001
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from . import forward, ptx
from .backward_plan import CHUNK, CHUNKS, DKV_STAGES, SPANS, BackwardPlan
from .forward import HALF_K, KEYS, K_MAJOR, SIZES, STEP, STEPS, Forward, _global, _named, _next
from .heads import ROWS_PER_CTA, split
from .plan import (
    BLOCK_K, D_V, HALF, ITEM, PIECE, ROLE, ROW_STAGES, SPAN, THREADS, TMEM_COLUMNS, WARP,
)  # fmt: skip

# Run-time arguments, in order; see `launch.py` for their meaning.
POINTERS = ("q", "kv", "indices", "bits", "lengths", "positions", "dout", "stats", "dq", "dkv")
STRIDES = (*forward.STRIDES[:-1], "do_b", "do_s", "do_h")
# Of scores in powers of two; of P and of dS before they are rounded; of dq and dkv. See `scales`.
SCALES = ("scale_log2", "p_scale", "ds_scale", "unit")
MN_STEP = STEP * SPAN * ITEM  # bytes of 16 rows of a span
P_BARRIER = 8  # named barrier of the softmax warps


class Backward(Forward):
    """The kernel of one plan. Slots, lengths and masks are the forward's roles and helpers."""

    def __init__(self, plan: BackwardPlan) -> None:
        super().__init__(plan)

    @cute.jit
    def __call__(
        self,
        pointers: tuple[(Int64,) * len(POINTERS)],
        sizes: tuple[(Int32,) * len(SIZES)],
        strides: tuple[(Int64,) * len(STRIDES)],
        scales: tuple[(Float32,) * len(SCALES)],
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        at, n, by = _named(POINTERS, pointers), _named(SIZES, sizes), _named(STRIDES, strides)
        load = cpasync.CopyBulkTensorTileG2SOp()
        q_map = self.heads_map(at["q"], n, self.plan.D, (by["q_b"], by["q_s"], by["q_h"]), load)
        dout_map = self.heads_map(at["dout"], n, D_V, (by["do_b"], by["do_s"], by["do_h"]), load)
        kv_map = self.rows_map(at["kv"], n, by["kv_row"], load)
        self.kernel((q_map, kv_map, dout_map), pointers, sizes, strides, scales).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), smem=self.plan.smem_bytes, stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, maps, pointers, sizes, strides, scales):
        plan = self.plan
        at, n, by = _named(POINTERS, pointers), _named(SIZES, sizes), _named(STRIDES, strides)
        # Row numbers are indices, -1 for an invalid slot: kv and dkv number their rows differently.
        plain = {**n, "row_b": Int32(0), "row_s": Int32(1), "row_g": Int32(0), "kv_rows": Int32(-1)}
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = {name: base + area.start for name, area in plan.smem.items()}
        smem["exchange"] = smem["p"]
        bar = {b.name: base + plan.barrier_offset(b.name) for b in plan.barriers}

        holder = ptx.shared(smem["tmem_address"], Int32, 16)
        if warp == ROLE["mma"].first:
            cute.arch.alloc_tmem(TMEM_COLUMNS, holder)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == ROLE["gather"].first:
            for tensor_map in maps:
                cpasync.prefetch_descriptor(tensor_map)
        if warp == ROLE["index"].first:
            with cute.arch.elect_one():
                for b in plan.barriers:
                    for stage in cutlass.range_constexpr(b.stages):
                        barrier = ptx.shared(bar[b.name] + 8 * stage, Int64, 8)
                        cute.arch.mbarrier_init(barrier, b.arrivals(1))
                cute.arch.mbarrier_init_fence()
        ptx.fence_before()
        self.sync_all()
        ptx.fence_after()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, holder).toint()

        tiles = n["B"] * n["token_tiles"] * n["G"]
        part = block % plan.parts
        work = (block // plan.parts, tiles, grid // plan.parts)
        if warp < ROLE["epilogue"].first:
            self.softmax(at, n, by, smem, bar, tmem, part, warp, work, scales)
        elif warp < ROLE["mma"].first:
            self.epilogue(at, n, by, smem, bar, tmem, warp, work, scales[-1])
        elif warp == ROLE["mma"].first:
            self.mma(at, n, by, smem, bar, tmem, work)
        elif warp == ROLE["index"].first:
            self.index(at, plain, by, smem, bar, work)
        else:
            self.gather(at, n, by, smem, bar, part, warp, work, maps)

        ptx.fence_before()
        self.sync_all()
        ptx.fence_after()
        if warp == ROLE["mma"].first:
            cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, holder), TMEM_COLUMNS)

    # Does: loads q, dout and gathered rows. Produces: q_full, kv_full. Consumes: rows_ready, q_free, kv_free.
    @cute.jit
    def gather(self, at, n, by, smem, bar, part, warp, work, maps):
        plan = self.plan
        half = warp - ROLE["gather"].first
        first, tiles, step = work
        q_phase, kv_phase = Int32(1), Int32(1)
        stage, phase = Int32(0), Int32(0)
        q_map, kv_map, dout_map = (ptx.descriptor(m) for m in maps)
        for tile in cutlass.range(first, tiles, step):
            b, s, g = split(tile, n["token_tiles"], n["G"])
            at_rows = (*plan.rows.origin(s, part), g, b)
            # The tile before leaves its chunks of q and dout one by one, the second half of them after its last KV.
            self.load_chunks(smem, bar, half, q_map, dout_map, at_rows, q_phase, (0, CHUNKS // 2))
            row_base = b * n["row_b"] + g * n["row_g"]
            for i in cutlass.range(self.blocks(at, n, by, tile)):
                ptx.wait(bar["rows_ready"] + 8 * stage, phase)
                ptx.wait(bar["kv_free"], kv_phase)
                kv_phase ^= 1
                numbers = smem["row_numbers"] + (stage * BLOCK_K + half * HALF_K) * 4
                with cute.arch.elect_one():
                    rows = []
                    for quad in cutlass.range_constexpr(HALF_K // 4):
                        found = ptx.load_words(numbers + quad * 16, 4)
                        rows.append([row_base + i * n["row_s"] if i >= 0 else n["kv_rows"] for i in found])
                    ptx.arrive_expect(bar["kv_full"], HALF_K * plan.D * ITEM)
                    for span in cutlass.range(plan.D // SPAN, unroll=1):
                        where = smem["kv"] + span * PIECE + half * (HALF_K * SPAN * ITEM)
                        self.gather_rows(where, kv_map, Int32(span * SPAN), rows, bar["kv_full"])
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    ptx.arrive(bar["rows_free"] + 8 * stage)
                stage, phase = _next(stage, phase, ROW_STAGES)
                if i == 0:
                    self.load_chunks(smem, bar, half, q_map, dout_map, at_rows, q_phase, (CHUNKS // 2, CHUNKS))
            q_phase ^= 1

    @cute.jit
    def load_chunks(self, smem, bar, half, q_map, dout_map, at_rows, phase, chunks: cutlass.Constexpr):
        """64 rows of q (first gather warp) and dout (second), a range of chunks of columns; q's tail with the last."""
        for chunk in cutlass.range_constexpr(*chunks):
            full = bar["q_full"] + 8 * chunk
            ptx.wait(bar["q_free"] + 8 * chunk, phase)
            with cute.arch.elect_one():
                if half == 0:
                    self.load_heads(smem["q_dout"], q_map, self.chunk_spans(chunk, self.plan.D), at_rows, full)
                else:
                    self.load_heads(smem["q_dout"] + PIECE, dout_map, self.chunk_spans(chunk, D_V), at_rows, full)

    def chunk_spans(self, chunk: int, columns: int) -> range:
        """Spans of 64 columns that a chunk stands for; the last chunk has the tail."""
        return range(chunk * CHUNK // SPAN, columns // SPAN if chunk == CHUNKS - 1 else (chunk + 1) * CHUNK // SPAN)

    @cute.jit
    def load_heads(self, where, tensor_map, spans: cutlass.Constexpr, at_rows, full):
        """64 rows of q or dout: every second piece from `where` on."""
        ptx.arrive_expect(full, len(spans) * PIECE)
        for span in cutlass.range_constexpr(spans.start, spans.stop):
            ptx.tensor_load(where + span * 2 * PIECE, tensor_map, (Int32(span * SPAN), *at_rows), full, False)

    # Does: all products. Produces: s_ready, kv_free, dkv_ready, p_free, q_free, dq_ready.
    # Consumes: q_full, kv_full, s_free, p_ready, dkv_free, dq_free.
    @cute.jit
    def mma(self, at, n, by, smem, bar, tmem, work):
        plan = self.plan
        first, tiles, step = work
        q_phase, block_phase, p_phase, dq_phase = Int32(0), Int32(0), Int32(0), Int32(1)
        ring = (Int32(0), Int32(1))
        for tile in cutlass.range(first, tiles, step):
            blocks = self.blocks(at, n, by, tile)
            self.scores(smem, bar, tmem, block_phase, q_phase, True)
            q_phase ^= 1
            block_phase ^= 1
            for i in cutlass.range(blocks):
                ptx.wait(bar["p_ready"], p_phase)
                p_phase ^= 1
                last = i == blocks - 1
                for chunk in cutlass.range(CHUNKS, unroll=1):
                    # The next block's scores come before the last chunk: its softmax runs under these products' adds.
                    if (chunk == CHUNKS - 1) & (i < blocks - 1):
                        self.scores(smem, bar, tmem, block_phase, q_phase, False)
                        block_phase ^= 1
                    self.dkv(smem, bar, tmem, smem["q_dout"] + chunk * (4 * PIECE), False, ring)
                    ring = _next(*ring, DKV_STAGES)
                    if chunk == 0:
                        if i == 0:
                            ptx.wait(bar["dq_free"], dq_phase)
                            dq_phase ^= 1
                            ptx.fence_after()
                        self.dq(smem, bar, tmem, i > 0, last)
                    if last & ((chunk < CHUNKS - 1) | (not plan.tail)):
                        with cute.arch.elect_one():
                            ptx.commit(bar["q_free"] + 8 * chunk, False)
                if const_expr(plan.tail):
                    self.dkv(smem, bar, tmem, smem["q_dout"] + (SPANS - 1) * (2 * PIECE), True, ring)
                    ring = _next(*ring, DKV_STAGES)
                    if last:
                        with cute.arch.elect_one():
                            ptx.commit(bar["q_free"] + 8 * (CHUNKS - 1), False)
                with cute.arch.elect_one():
                    ptx.commit(bar["p_free"], False)

    @cute.jit
    def scores(self, smem, bar, tmem, phase, q_phase, fresh: cutlass.Constexpr):
        """S = q K^T in lanes 0 to 63, dP = dout V^T in 64 to 127; S of the tail by keys, as in the forward."""
        plan = self.plan
        ptx.wait(bar["kv_full"], phase)
        ptx.wait(bar["s_free"], phase ^ 1)
        ptx.fence_after()
        for chunk in cutlass.range(CHUNKS, unroll=1):
            if const_expr(fresh):
                ptx.wait(bar["q_full"] + 8 * chunk, q_phase)
            for part in cutlass.range_constexpr(CHUNK // SPAN):
                span = chunk * (CHUNK // SPAN) + part
                with cute.arch.elect_one():
                    self.score_span(smem["q_dout"] + span * (2 * PIECE), smem["kv"] + span * PIECE, tmem, span > 0)
        with cute.arch.elect_one():
            if const_expr(plan.tail):
                shape = ptx.shape(self.dtype, ROWS_PER_CTA, BLOCK_K, False)
                for k in cutlass.range_constexpr(STEPS):
                    a = ptx.operand(smem["q_dout"] + SPANS * 2 * PIECE + k * STEP * ITEM, **K_MAJOR)
                    b = ptx.operand(smem["kv"] + SPANS * PIECE + k * STEP * ITEM, **K_MAJOR)
                    d = tmem + plan.tmem["s_tail"].start
                    ptx.mma(d, a, b, shape, k > 0, pair=False, a_in_tensor_memory=False)
            ptx.commit(bar["s_ready"], False)

    @cute.jit
    def score_span(self, heads, keys, tmem, accumulate):
        """64 columns of q and dout, and of K."""
        shape = ptx.shape(self.dtype, 2 * ROWS_PER_CTA, BLOCK_K, False)
        for k in cutlass.range_constexpr(STEPS):
            a = ptx.operand(heads + k * STEP * ITEM, **K_MAJOR)
            b = ptx.operand(keys + k * STEP * ITEM, **K_MAJOR)
            more = accumulate if k == 0 else Boolean(True)
            ptx.mma_rows(tmem + self.plan.tmem["s"].start, a, b, shape, more)

    @cute.jit
    def dq(self, smem, bar, tmem, accumulate, last):
        """dq (+)= dS K: of each product's columns, the first half goes to lanes 0 to 63."""
        plan = self.plan
        for j in cutlass.range(2, unroll=1):
            with cute.arch.elect_one():
                keys = smem["kv"] + j * (HALF // SPAN * PIECE)
                self.dq_columns(smem["ds"], keys, tmem + plan.tmem["dq"].start + j * (HALF // 2), HALF, accumulate)
        with cute.arch.elect_one():
            if const_expr(plan.tail):
                keys = smem["kv"] + SPANS * PIECE
                self.dq_columns(smem["ds"], keys, tmem + plan.tmem["dq_tail"].start, SPAN, accumulate)
            ptx.commit(bar["kv_free"], False)
        if last:
            with cute.arch.elect_one():
                ptx.commit(bar["dq_ready"], False)

    @cute.jit
    def dq_columns(self, ds, keys, d, width: cutlass.Constexpr, accumulate):
        """`width` columns of d, of which each half of the lanes gets one half."""
        shape = ptx.shape(self.dtype, ROWS_PER_CTA, width, True)
        for k in cutlass.range_constexpr(STEPS):
            a = ptx.operand(ds + k * STEP * ITEM, **K_MAJOR)
            b = ptx.operand(keys + k * MN_STEP, **mn_major(PIECE))
            more = accumulate if k == 0 else Boolean(True)
            ptx.mma(d, a, b, shape, more, pair=False, a_in_tensor_memory=False)

    @cute.jit
    def dkv(self, smem, bar, tmem, spans, is_tail: cutlass.Constexpr, ring):
        """q^T dS + dout^T P, 128 columns of d by 64 keys. The tail's lanes 64 to 127 count, the others repeat."""
        stage, phase = ring
        ptx.wait(bar["dkv_free"] + 8 * stage, phase)
        ptx.fence_after()
        shape = ptx.shape(self.dtype, CHUNK, BLOCK_K, True, True)
        with cute.arch.elect_one():
            for operand, offset in (("ds", 0), ("p", PIECE))[: 1 if is_tail else 2]:
                for k in cutlass.range_constexpr(ROWS_PER_CTA // STEP):
                    a = ptx.operand(spans + offset + k * MN_STEP, **mn_major(2 * PIECE))
                    b = ptx.operand(smem[operand] + k * MN_STEP, **mn_major(PIECE))
                    d = tmem + self.plan.tmem["dkv"].start + stage * BLOCK_K
                    ptx.mma_rows(d, a, b, shape, operand == "p" or k > 0)
            ptx.commit(bar["dkv_ready"] + 8 * stage, False)

    # Does: P and dS; a thread (warpgroup w, lane l of tensor memory) owns keys 32 (l // 64) + 16 w and 15 more of row
    # l % 64; stores dq. Produces: s_free, p_ready, dq_free. Consumes: s_ready, rows_ready, p_free, dq_ready.
    @cute.jit
    def softmax(self, at, n, by, smem, bar, tmem, part, warp, work, scales):
        plan = self.plan
        first, tiles, step = work
        lane = cute.arch.lane_idx()
        group, quadrant = warp // 4, warp % 4
        side = quadrant // 2
        row = quadrant % 2 * WARP + lane
        head, token = plan.rows.of(row, part)
        s_phase, p_phase, dq_phase = Int32(0), Int32(1), Int32(0)
        stage, phase = Int32(0), Int32(0)
        scale_log2, p_scale, ds_scale, unit = scales
        for tile in cutlass.range(first, tiles, step):
            lse, w, offset = self.statistics(at, n, tile, head, token)
            p_factor, ds_factor, offset = w * p_scale, w * ds_scale, offset * ds_scale
            for _ in cutlass.range(self.blocks(at, n, by, tile)):
                ptx.wait(bar["rows_ready"] + 8 * stage, phase)
                at_mask = smem["slot_masks"] + ((stage * plan.rows.tokens + token) * 2 + side) * 4
                mask = ptx.load_words(at_mask, 1, Uint32)[0] >> Uint32(group * KEYS)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    ptx.arrive(bar["rows_free"] + 8 * stage)
                stage, phase = _next(stage, phase, ROW_STAGES)

                # Own keys of S or dP, and those that the thread of the same row in the other half of the lanes owns.
                ptx.wait(bar["s_ready"], s_phase)
                s_phase ^= 1
                ptx.fence_after()
                columns = tmem + plan.tmem["s"].start + group * KEYS
                own = ptx.load_columns(columns + side * HALF_K, KEYS)
                given = ptx.load_columns(columns + (1 - side) * HALF_K, KEYS)
                tail = [Float32(0.0)] * KEYS
                if const_expr(plan.tail):
                    tail = ptx.load_columns(tmem + plan.tmem["s_tail"].start + group * KEYS, KEYS)
                cute.arch.fence_view_async_tmem_load()
                ptx.fence_before()
                self.arrive_warp(bar["s_free"])

                # The exchange, P and dS lie where the block before had its P and dS.
                ptx.wait(bar["p_free"], p_phase)
                p_phase ^= 1
                taken = self.exchange(smem, warp, lane, [Float32(0.0)] * KEYS, given)
                cute.arch.barrier(barrier_id=P_BARRIER, number_of_threads=ROLE["softmax"].warps * WARP)
                for key in cutlass.range_constexpr(KEYS):
                    s = (own[key] if side == 0 else taken[key]) + tail[key]
                    dp = taken[key] if side == 0 else own[key]
                    p = cute.math.exp2(s * scale_log2 - lse, fastmath=True)
                    p = p if (mask >> key) & 1 != 0 else Float32(0.0)
                    own[key] = p_factor * p
                    taken[key] = p * (ds_factor * dp + offset)
                self.store_operand(smem["p"], row, side * 4 + group * 2, own)
                self.store_operand(smem["ds"], row, side * 4 + group * 2, taken)
                cute.arch.fence_view_async_shared()
                self.arrive_warp(bar["p_ready"])
            ptx.wait(bar["dq_ready"], dq_phase)
            dq_phase ^= 1
            self.store_dq(at, n, bar, tmem, tile, part, group, side, row, unit)

    @cute.jit
    def store_operand(self, where, row, chunk, values):
        """16 keys of a row, rounded, as two 16-byte chunks of a swizzled piece."""
        words = ptx.pack_halves(values, self.dtype)
        for vector in cutlass.range_constexpr(2):
            there = where + row * (BLOCK_K * ITEM) + ((chunk + vector) ^ (row % 8)) * 16
            ptx.store_words(there, words[4 * vector : 4 * vector + 4])

    @cute.jit
    def statistics(self, at, n, tile, head, token):
        """(lse in base 2, w, dlse - w Delta) of a row; of a padded one, values that make P and dS zero."""
        b, s, g = split(tile, n["token_tiles"], n["G"])
        token = s * self.plan.rows.tokens + token
        lse, w, offset = Float32.inf, Float32(0.0), Float32(0.0)
        if (head < n["heads_per_group"]) & (token < n["S"]):
            heads = n["G"] * n["heads_per_group"]
            row = (Int64(b) * n["S"] + token) * heads + g * n["heads_per_group"] + head
            plane = Int64(n["B"]) * n["S"] * heads
            stats = _global(at["stats"], Float32)
            lse, w, offset = stats[row], stats[row + plane], stats[row + 2 * plane]
        return lse, w, offset

    @cute.jit
    def arrive_warp(self, barrier):
        """One arrival of this warp."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.arrive(barrier)

    # Does: adds dkv. Lane l of tensor memory is column l of a chunk of d. Produces: dkv_free.
    # Consumes: dkv_ready, rows_ready.
    @cute.jit
    def epilogue(self, at, n, by, smem, bar, tmem, warp, work, unit):
        plan = self.plan
        first, tiles, step = work
        lane = cute.arch.lane_idx()
        quadrant = warp - ROLE["epilogue"].first
        lanes = tmem + (quadrant * WARP << 16)
        stage, phase = Int32(0), Int32(0)
        ring = (Int32(0), Int32(0))
        row_bytes = n["G"] * (plan.D * 4)
        for tile in cutlass.range(first, tiles, step):
            b, _, g = split(tile, n["token_tiles"], n["G"])
            # The first of the four columns that this lane adds to, in row 0 of the batch entry and group.
            target = at["dkv"] + Int64(b) * n["S_kv"] * row_bytes + g * (plan.D * 4)
            target += Int64(quadrant * WARP + lane // 4 * 4) * 4
            for _ in cutlass.range(self.blocks(at, n, by, tile)):
                ptx.wait(bar["rows_ready"] + 8 * stage, phase)
                # Of 8 keys, and columns of tensor memory, lane l has two: 2 (l % 4) and the next.
                numbers = smem["row_numbers"] + (stage * BLOCK_K + lane % 4 * 2) * 4
                rows = []
                for eight in cutlass.range_constexpr(BLOCK_K // 8):
                    rows += ptx.load_words(numbers + eight * 8 * 4, 2)
                self.arrive_warp(bar["rows_free"] + 8 * stage)
                stage, phase = _next(stage, phase, ROW_STAGES)
                for chunk in cutlass.range(CHUNKS, unroll=1):
                    self.add_chunk(bar, lanes, target + chunk * (CHUNK * 4), row_bytes, rows, ring, unit)
                    ring = _next(*ring, DKV_STAGES)
                if const_expr(plan.tail):
                    # Lanes 0 to 63 have columns that another chunk has added.
                    if quadrant < 2:
                        ptx.wait(bar["dkv_ready"] + 8 * ring[0], ring[1])
                        self.arrive_warp(bar["dkv_free"] + 8 * ring[0])
                    else:
                        self.add_chunk(bar, lanes, target + (D_V - SPAN) * 4, row_bytes, rows, ring, unit)
                    ring = _next(*ring, DKV_STAGES)

    @cute.jit
    def add_chunk(self, bar, lanes, target, row_bytes, rows, ring, unit):
        """Adds a chunk of the block's dkv: of each key, lane l has columns l // 4 + (0, 8, 16, 24) of the warp's 32.

        They stand side by side in the workspace (`columns_of`), so an addition of a warp is four whole lines.
        """
        stage, phase = ring
        ptx.wait(bar["dkv_ready"] + 8 * stage, phase)
        ptx.fence_after()
        for half in cutlass.range_constexpr(2):
            column = lanes + self.plan.tmem["dkv"].start + stage * BLOCK_K + half * HALF_K
            # Register 4 i + 2 j + k: row l // 4 + 8 j, key 8 i + 2 (l % 4) + k.
            low, high = (ptx.load_fragments(column + (first << 16), HALF_K) for first in (0, WARP // 2))
            cute.arch.fence_view_async_tmem_load()
            if const_expr(half == 1):
                ptx.fence_before()
                self.arrive_warp(bar["dkv_free"] + 8 * stage)
            for key in cutlass.range_constexpr(HALF_K // 4):
                at = key // 2 * 4 + key % 2
                row = rows[half * (HALF_K // 4) + key]
                values = [x * unit for x in (low[at], low[at + 2], high[at], high[at + 2])]
                ptx.add_global(target + Int64(row) * row_bytes, values, row >= 0)

    @cute.jit
    def store_dq(self, at, n, bar, tmem, tile, part, group, side, row, unit):
        """dq of a tile, half of the columns a warpgroup: lanes 0 to 63 have the first half of each product's."""
        plan = self.plan
        ptx.fence_after()
        b, s, g = split(tile, n["token_tiles"], n["G"])
        head, token = plan.rows.of(row, part)
        token += s * plan.rows.tokens
        real = (head < n["heads_per_group"]) & (token < n["S"])
        which = (Int64(b) * n["S"] + token) * (n["G"] * n["heads_per_group"]) + g * n["heads_per_group"] + head
        target = at["dq"] + which * (plan.D * ITEM)
        # Of product j's 256 columns of d, tensor memory has 128 for each half of the lanes: one warpgroup a product.
        for x in cutlass.range_constexpr(0, HALF // 2, WARP):
            there = target + (group * HALF + side * (HALF // 2) + x) * ITEM
            self.store_columns(tmem + plan.tmem["dq"].start + group * (HALF // 2) + x, WARP, there, real, unit)
        if const_expr(plan.tail):
            width = SPAN // 4
            there = target + (D_V + side * (SPAN // 2) + group * width) * ITEM
            self.store_columns(tmem + plan.tmem["dq_tail"].start + group * width, width, there, real, unit)
        ptx.fence_before()
        self.arrive_warp(bar["dq_free"])

    @cute.jit
    def store_columns(self, column, count: cutlass.Constexpr, target, real, unit):
        """`count` columns of a row of dq."""
        values = ptx.load_columns(column, count)
        cute.arch.fence_view_async_tmem_load()
        words = ptx.pack_halves([v * unit for v in values], self.dtype)
        if real:
            for vector in cutlass.range_constexpr(count * ITEM // 16):
                ptx.store_global(target + vector * 16, words[4 * vector : 4 * vector + 4])


def mn_major(leading: int) -> dict[str, int]:
    """Strides of a swizzled operand whose rows are K: spans of MN lie `leading` bytes apart."""
    return dict(leading=leading, stride=8 * SPAN * ITEM)
