"""Forward of sparse MLA on SM100: one tile of 64 query rows a CTA, or of 128 a pair of CTAs; persistent.

    s = sm_scale q k     lse = ln sum exp(s)     out = sigmoid(lse - sink) sum exp(s - lse) v     over the valid slots

`q [B, S, H, D]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]` -> `out [B, S, H, 512]`, `lse [B, S, H]`. Online softmax
over blocks of 64 slots (Milakov and Gimelshein 2018), O rescaled only when a maximum grows by more than 2^8 (as in
FlashAttention-4). How columns and lanes are split is told in `plan.py`, what a row is in `heads.py`.

Pipeline of blocks i and i + 1, time down; a name behind > is the barrier that announces it:

    index                gather                mma                    softmax                  epilogue
    rows i  >rows_ready  q, slots i >slot_full Q to tensor memory
    rows i + 1                                 S = Q K i     >s_ready                          (tile before)
                         slots i + 1                                  S to registers >s_free
                                               S = Q K i + 1          halves summed, masked
                                                                      maximum, P i >p_ready
                                               O += P i V i >pv_done  S i + 1 ...
                         slots i + 2           >slot_free
    next tile            next q, slots         last P V      >o_ready sums >stats_ready
                                               next Q, Q K 0          S 0 ...                  lse       >stats_free
                                                                                               O / l, out     >o_free

A slot has all columns of a pair's CTA, or half of a single CTA's; then the products of two blocks alternate by slot.
"""

from typing import Any  # noqa: I001

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.typing import AddressSpace

from ..scales import LN_2, LOG2_E
from . import ptx
from .heads import ROWS_PER_CTA, heads_first, split
from .plan import (
    BLOCK_K, D_V, FLOOR, HALF, ITEM, OUT_PIECES, PIECE, PIECES, RESCALE_AT, ROLE,
    ROW_STAGES, SLOT, SLOTS, SPAN, TAIL_STAGES, THREADS, TMEM_COLUMNS, WARP, Plan,
)  # fmt: skip

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
INDEX_DTYPES = {"int32": Int32, "int64": Int64}
# Run-time arguments, in order; see `launch.py` for their meaning.
POINTERS = ("q", "kv", "indices", "bits", "lengths", "positions", "chosen", "sink", "out", "lse")
SIZES = (
    "B", "S", "S_kv", "G", "K", "heads_per_group", "token_tiles", "kv_rows",
    "row_b", "row_s", "row_g", "causal", "has_length", "has_positions", "wanted",
)  # fmt: skip
STRIDES = (
    "q_b", "q_s", "q_h", "kv_row", "i_b", "i_s", "i_g", "i_k", "n_b", "n_s", "n_g", "p_b", "p_s", "sink_h",
)  # fmt: skip
SCALES = ("scale_log2",)
STEP = 16  # K of one tensor-core instruction
STEPS = SPAN // STEP
STEP_COLUMNS = STEP * ITEM // 4  # tensor-memory columns of a step of q
HALF_K = BLOCK_K // 2
KEYS = HALF_K // 2  # keys of a row that one softmax thread owns
P_BYTES = ROWS_PER_CTA * BLOCK_K * ITEM
K_MAJOR = dict(leading=16, stride=8 * SPAN * ITEM)
RESCALE_COLUMNS = 32
PAIR_BARRIER, ROW_BARRIER, OUT_BARRIER = 1, 5, 7  # named barriers: first numbers


class Forward:
    """The kernel of one plan."""

    def __init__(self, plan: Plan) -> None:
        plan.check()
        self.plan = plan
        self.dtype, self.index_dtype = DTYPES[plan.dtype], INDEX_DTYPES[plan.index_dtype]

    @cute.jit
    def __call__(self, pointers, sizes, strides, scales, ctas, stream):
        at, n, by = _named(POINTERS, pointers), _named(SIZES, sizes), _named(STRIDES, strides)
        plan = self.plan
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_map = self.heads_map(at["q"], n, plan.D, (by["q_b"], by["q_s"], by["q_h"]), load)
        token = Int64(n["G"] * n["heads_per_group"]) * D_V
        out_map = self.heads_map(at["out"], n, D_V, (token * n["S"], token, Int64(D_V)), store)
        kv_map = self.rows_map(at["kv"], n, by["kv_row"], load)
        self.kernel((q_map, kv_map, out_map), pointers, sizes, strides, scales[0]).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(plan.ctas, 1, 1),
            smem=plan.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def heads_map(self, address, n, columns, strides, op):
        """Tensor map of `[B, S, H, columns]` by boxes of 64 columns of a CTA's rows."""
        heads, tokens = self.plan.rows.box
        shape = (n["B"], n["S"], n["G"] * n["heads_per_group"], columns)
        extents, steps = heads_first(shape, strides, n["heads_per_group"])
        tensor = cute.make_tensor(
            cute.make_ptr(self.dtype, address, AddressSpace.gmem, assumed_align=16),
            cute.make_layout(extents, stride=(1, *(cute.assume(Int64(s), divby=8) for s in steps[1:]))),
        )
        box = (SPAN, heads, tokens)
        layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout(box, stride=(1, SPAN, SPAN * heads))
        )
        return cpasync.make_tiled_tma_atom(op, tensor, layout, box)[0]

    def rows_map(self, address, n, stride, op):
        """Tensor map of the rows of kv by 64 columns of one row."""
        rows = cute.make_tensor(
            cute.make_ptr(self.dtype, address, AddressSpace.gmem, assumed_align=16),
            cute.make_layout((self.plan.D, n["kv_rows"]), stride=(1, cute.assume(stride, divby=8))),
        )
        layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout((SPAN, 1), stride=(1, SPAN)))
        return cpasync.make_tiled_tma_atom(op, rows, layout, (SPAN, 1))[0]

    @cute.kernel
    def kernel(self, maps, pointers, sizes, strides, scale_log2):
        plan = self.plan
        pair = plan.pair
        at, n, by = _named(POINTERS, pointers), _named(SIZES, sizes), _named(STRIDES, strides)
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if pair else Int32(0)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = {name: base + area.start for name, area in plan.smem.items()}
        bar = {b.name: base + plan.barrier_offset(b.name) for b in plan.barriers}

        holder = ptx.shared(smem["tmem_address"], Int32, 16)
        if warp == ROLE["mma"].first:
            cute.arch.alloc_tmem(TMEM_COLUMNS, holder, is_two_cta=pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)
        if warp == ROLE["gather"].first:
            for tensor_map in maps:
                cpasync.prefetch_descriptor(tensor_map)
        if warp == ROLE["index"].first:
            with cute.arch.elect_one():
                for b in plan.barriers:
                    for stage in cutlass.range_constexpr(b.stages):
                        barrier = ptx.shared(bar[b.name] + 8 * stage, Int64, 8)
                        cute.arch.mbarrier_init(barrier, b.arrivals(plan.ctas))
                cute.arch.mbarrier_init_fence()
        self.sync_all()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, holder).toint()

        work = (block // plan.ctas, self.end(at, n, n["B"] * n["token_tiles"] * n["G"]), grid // plan.ctas)
        if warp < ROLE["epilogue"].first:
            self.softmax(at, n, by, smem, bar, tmem, rank, warp, work, scale_log2)
        elif warp < ROLE["mma"].first:
            self.epilogue(at, n, by, smem, bar, tmem, rank, warp, work, maps)
        elif warp == ROLE["mma"].first:
            if rank == 0:
                self.mma(at, n, by, smem, bar, tmem, work)
        elif warp == ROLE["index"].first:
            self.index(at, n, by, smem, bar, work)
        else:
            self.gather(at, n, by, smem, bar, rank, warp, work, maps)

        # A pair's CTAs signal each other: neither may leave, or free tensor memory, before the other is done.
        self.sync_all()
        if warp == ROLE["mma"].first:
            pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
            cute.arch.dealloc_tmem(pointer, TMEM_COLUMNS, is_two_cta=pair)

    @cute.jit
    def sync_all(self):
        if const_expr(self.plan.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def end(self, at, n, tiles):
        """One past the last tile: `tiles`, or 0 where the device chose another kernel of the call."""
        if n["wanted"] >= 0:
            if _global(at["chosen"], Int32)[0] != n["wanted"]:
                tiles = Int32(0)
        return tiles

    # -- facts of a tile that every role works out for itself -----------------------------------------------------

    @cute.jit
    def length(self, at, n, by, tile):
        """Slots of the tile's gather list that count."""
        length = n["K"]
        if n["has_length"] != 0:
            b, s, g = split(tile, n["token_tiles"], n["G"])
            offset = Int64(b) * by["n_b"] + Int64(s) * by["n_s"] + Int64(g) * by["n_g"]
            length = cutlass.max(0, cutlass.min(length, _global(at["lengths"], Int32)[offset]))
        return length

    @cute.jit
    def blocks(self, at, n, by, tile):
        """Blocks of a tile, at least one: an empty row runs through a block of invalid slots."""
        return cutlass.max(1, (self.length(at, n, by, tile) + BLOCK_K - 1) // BLOCK_K)

    # Does: reads indices, decides validity. Produces: rows_ready. Consumes: rows_free.
    @cute.jit
    def index(self, at, n, by, smem, bar, work):
        lane = cute.arch.lane_idx()
        first, tiles, step = work
        indices = _global(at["indices"], self.index_dtype)
        stage, phase = Int32(0), Int32(1)
        for tile in cutlass.range(first, tiles, step):
            length = self.length(at, n, by, tile)
            b, s, g = split(tile, n["token_tiles"], n["G"])
            start = Int64(b) * by["i_b"] + Int64(s) * by["i_s"] + Int64(g) * by["i_g"]
            row_base = Int64(b) * n["row_b"] + Int64(g) * n["row_g"]
            limit = Int64(n["S_kv"])
            if n["causal"] != 0:
                position = Int64(s) + n["S_kv"] - n["S"]
                if n["has_positions"] != 0:
                    offset = Int64(b) * by["p_b"] + Int64(s) * by["p_s"]
                    position = _global(at["positions"], Int64)[offset]
                limit = cutlass.min(position, limit - 1) + 1
            for block in cutlass.range(self.blocks(at, n, by, tile)):
                found = []
                for half in cutlass.range_constexpr(2):
                    slot = block * BLOCK_K + half * WARP + lane
                    row = Int64(-1)
                    if slot < length:
                        row = Int64(indices[start + Int64(slot) * by["i_k"]])
                    found.append(row)
                ptx.wait(bar["rows_free"] + 8 * stage, phase)
                for half in cutlass.range_constexpr(2):
                    valid = (found[half] >= 0) & (found[half] < limit)
                    row = row_base + found[half] * n["row_s"] if valid else Int64(n["kv_rows"])
                    ptx.store_words(smem["row_numbers"] + (stage * BLOCK_K + half * WARP + lane) * 4, [Int32(row)])
                    self.store_masks(at, n, smem, stage, half, lane, valid, tile, block * BLOCK_K + half * WARP + lane)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    ptx.arrive(bar["rows_ready"] + 8 * stage)
                stage, phase = _next(stage, phase, ROW_STAGES)

    @cute.jit
    def store_masks(self, at, n, smem, stage, half, lane, valid, tile, slot):
        """A word of 32 slots for each token of the tile: which slots the token selected."""
        tokens = self.plan.rows.tokens
        bits = Int32(1)
        if const_expr(tokens > 1):
            bits = Int32(0)
            if valid:
                bits = _global(at["bits"], Int32)[Int64(tile) * n["K"] + slot]
        for token in cutlass.range_constexpr(tokens):
            word = cute.arch.vote_ballot_sync(valid & ((bits >> token) & 1 != 0))
            if lane == 0:
                ptx.store_words(smem["slot_masks"] + ((stage * tokens + token) * 2 + half) * 4, [Int32(word)])

    # Does: loads q and gathered rows. Produces: slot_full. Consumes: rows_ready, slot_free.
    @cute.jit
    def gather(self, at, n, by, smem, bar, rank, warp, work, maps):
        plan = self.plan
        half = warp - ROLE["gather"].first
        first, tiles, step = work
        slot, slot_phase = Int32(0), Int32(1)
        stage, phase = Int32(0), Int32(0)
        tail, tail_phase = Int32(0), Int32(1)
        q_map, kv_map = ptx.descriptor(maps[0]), ptx.descriptor(maps[1])
        for tile in cutlass.range(first, tiles, step):
            b, s, g = split(tile, n["token_tiles"], n["G"])
            head, token = plan.rows.origin(s, rank)
            for part in cutlass.range_constexpr(plan.q_slots):
                full = bar["slot_full"] + 8 * slot
                ptx.wait(bar["slot_free"] + 8 * slot, slot_phase)
                with cute.arch.elect_one():
                    # Pieces: a span of the left half of the columns, the same of the right, the next span, ...
                    is_tail = part == 2
                    self.expect(full, rank, (1 if is_tail else 2) * PIECE)
                    for side in cutlass.range_constexpr(1 if is_tail else 2):
                        piece = half if is_tail else half * 2 + side
                        column = Int32(D_V) if is_tail else side * HALF + (2 * part + half) * SPAN
                        where = smem["slots"] + slot * SLOT + piece * PIECE
                        ptx.tensor_load(where, q_map, (column, head, token, g, b), full, plan.pair)
                slot, slot_phase = _next(slot, slot_phase, SLOTS)
            for _ in cutlass.range(self.blocks(at, n, by, tile)):
                ptx.wait(bar["rows_ready"] + 8 * stage, phase)
                numbers = smem["row_numbers"] + (stage * BLOCK_K + half * HALF_K) * 4
                for part in cutlass.range_constexpr(plan.slots_per_block):
                    ptx.wait(bar["slot_free"] + 8 * slot, slot_phase)
                    if const_expr(plan.tails_wait and part == plan.slots_per_block - 1):
                        ptx.wait(bar["tail_free"] + 8 * tail, tail_phase)
                    self.gather_slot(smem, bar, rank, half, slot, tail, part, numbers, kv_map)
                    slot, slot_phase = _next(slot, slot_phase, SLOTS)
                # The same lane has read the numbers.
                with cute.arch.elect_one():
                    ptx.arrive(bar["rows_free"] + 8 * stage)
                stage, phase = _next(stage, phase, ROW_STAGES)
                tail, tail_phase = _next(tail, tail_phase, TAIL_STAGES)

    @cute.jit
    def gather_slot(self, smem, bar, rank, half, slot, tail, part, numbers, kv_map):
        """This warp's half of the keys of a slot: all columns of a pair's CTA, half of a single CTA's."""
        plan = self.plan
        full = bar["slot_full"] + 8 * slot
        bytes_of = HALF_K * SPAN * ITEM
        has_tail = bool(plan.tail) and part == plan.slots_per_block - 1
        with cute.arch.elect_one():
            rows = []
            for quad in cutlass.range_constexpr(HALF_K // 4):
                rows.append(ptx.load_words(numbers + quad * 16, 4))
            # Of a pair, this warp number's tail is loaded in one of the CTAs.
            self.expect(full, rank, PIECES * bytes_of + has_tail * bytes_of // plan.ctas)
            for piece in cutlass.range_constexpr(PIECES):
                if const_expr(plan.pair):
                    column = rank * HALF + piece * SPAN
                else:
                    column = Int32(piece % 2 * HALF + (2 * part + piece // 2) * SPAN)
                where = smem["slots"] + slot * SLOT + piece * PIECE + half * bytes_of
                self.gather_rows(where, kv_map, column, rows, full)
            if const_expr(has_tail and plan.pair):
                if half == rank:
                    self.gather_rows(smem["tails"] + tail * bytes_of, kv_map, Int32(D_V), rows, full)
            elif const_expr(has_tail):
                where = smem["tails"] + (tail * 2 + half) * bytes_of
                self.gather_rows(where, kv_map, Int32(D_V), rows, full)

    @cute.jit
    def gather_rows(self, where, kv_map, column, rows, full):
        """One span of columns of this warp's keys."""
        for quad in cutlass.range_constexpr(len(rows)):
            target = where + quad * 4 * SPAN * ITEM
            ptx.gather4(target, kv_map, column, rows[quad], full, self.plan.pair)

    @cute.jit
    def expect(self, full, rank, size):
        """Of a pair, the even CTA's barrier waits for the bytes of both."""
        if const_expr(self.plan.pair):
            if rank == 0:
                ptx.arrive_expect(full, 2 * size)
        else:
            ptx.arrive_expect(full, size)

    # Does: Q to tensor memory, S = Q K^T, O += P V. Produces: s_ready, pv_done, o_ready, slot_free.
    # Consumes: slot_full, s_free, p_ready, o_free.
    @cute.jit
    def mma(self, at, n, by, smem, bar, tmem, work):
        plan = self.plan
        pair = plan.pair
        first, tiles, step = work
        slot, slot_phase, used = Int32(0), Int32(0), Int32(0)
        p, p_phase = Int32(0), Int32(0)
        tail = Int32(0)
        s_phase, o_phase = Int32(1), Int32(1)
        for tile in cutlass.range(first, tiles, step):
            blocks = self.blocks(at, n, by, tile)
            # P of the last block, which was waited for, says that no scores of the tile before still read Q.
            for part in cutlass.range_constexpr(plan.q_slots):
                ptx.wait(bar["slot_full"] + 8 * slot, slot_phase)
                self.copy_q(smem, bar, tmem, slot, part)
                slot, slot_phase = _next(slot, slot_phase, SLOTS)
            used = slot
            # Products of two blocks take turns slot by slot: P V frees slots early, Q K has the next S ready early.
            for i in cutlass.range(blocks + 1):
                if i < blocks:
                    ptx.wait(bar["s_free"], s_phase)
                    s_phase ^= 1
                    ptx.fence_after()
                for part in cutlass.range_constexpr(plan.slots_per_block):
                    if i < blocks:
                        slot, slot_phase = self.issue_scores(smem, bar, tmem, slot, slot_phase, tail, part)
                    if i > 0:
                        if const_expr(part == 0):
                            ptx.wait(bar["p_ready"] + 8 * p, p_phase)
                            if i == 1:
                                ptx.wait(bar["o_free"], o_phase)
                                o_phase ^= 1
                            ptx.fence_after()
                        self.values(smem, bar, tmem, used, part, p, i > 1)
                        used, _ = _next(used, Int32(0), SLOTS)
                if i < blocks:
                    tail, _ = _next(tail, Int32(0), TAIL_STAGES)
                if i > 0:
                    with cute.arch.elect_one():
                        ptx.commit(bar["pv_done"] + 8 * p, pair)
                    if i == blocks:
                        with cute.arch.elect_one():
                            ptx.commit(bar["o_ready"], pair)
                    p, p_phase = _next(p, p_phase, plan.p_buffers)

    @cute.jit
    def issue_scores(self, smem, bar, tmem, slot, slot_phase, tail, part):
        """S (+)= Q K^T over the next slot, once it is full; a block's last announces S. Returns the slot after it."""
        ptx.wait(bar["slot_full"] + 8 * slot, slot_phase)
        self.scores(smem, tmem, slot, tail, part)
        if const_expr(part == self.plan.slots_per_block - 1):
            with cute.arch.elect_one():
                ptx.commit(bar["s_ready"], self.plan.pair)
                if const_expr(self.plan.tails_wait):
                    ptx.commit(bar["tail_free"] + 8 * tail, self.plan.pair)
        return _next(slot, slot_phase, SLOTS)

    @cute.jit
    def copy_q(self, smem, bar, tmem, slot, part):
        """Two spans of each half of q's columns, or the tail for both halves, to tensor memory: 16 take 8 columns."""
        plan = self.plan
        is_tail = part == 2
        q = tmem + (plan.tmem["q_tail"].start if is_tail else plan.tmem["q"].start + part * SPAN)
        with cute.arch.elect_one():
            for span in cutlass.range_constexpr(1 if is_tail else 2):
                for k in cutlass.range_constexpr(STEPS):
                    source = ptx.operand(smem["slots"] + slot * SLOT + span * 2 * PIECE + k * STEP * ITEM, **K_MAJOR)
                    ptx.copy_to_tensor_memory(q + (span * STEPS + k) * STEP_COLUMNS, source, plan.pair)
            ptx.commit(bar["slot_free"] + 8 * slot, plan.pair)

    @cute.jit
    def scores(self, smem, tmem, slot, tail, part):
        """S (+)= Q K^T over one slot: the left half's part in lanes 0 to 63, the right half's in 64 to 127."""
        plan = self.plan
        rows, spans = ROWS_PER_CTA * plan.ctas, PIECES // plan.slots_per_block
        q = tmem + plan.tmem["q"].start + part * spans * STEPS * STEP_COLUMNS
        shape = ptx.shape(self.dtype, rows, 2 * BLOCK_K, False)
        how = dict(pair=plan.pair, a_in_tensor_memory=True)
        with cute.arch.elect_one():
            for span in cutlass.range_constexpr(spans):
                for k in cutlass.range_constexpr(STEPS):
                    b = ptx.operand(smem["slots"] + slot * SLOT + span * (SLOT // spans) + k * STEP * ITEM, **K_MAJOR)
                    a, fresh = q + (span * STEPS + k) * STEP_COLUMNS, part == 0 and span == 0 and k == 0
                    ptx.mma(tmem + plan.tmem["s"].start, a, b, shape, not fresh, **how)
            if const_expr(plan.tail and part == plan.slots_per_block - 1):
                shape = ptx.shape(self.dtype, rows, BLOCK_K, False)
                for k in cutlass.range_constexpr(STEPS):
                    at = smem["tails"] + tail * (plan.tail_keys * SPAN * ITEM) + k * STEP * ITEM
                    a = tmem + plan.tmem["q_tail"].start + k * STEP_COLUMNS
                    ptx.mma(tmem + plan.tmem["s_tail"].start, a, ptx.operand(at, **K_MAJOR), shape, k > 0, **how)

    @cute.jit
    def values(self, smem, bar, tmem, slot, part, p, accumulate):
        """O (+)= P V over one slot: 256 columns of V a product, of which each half of the lanes gets 128."""
        plan = self.plan
        o = tmem + plan.tmem["o"].start
        shape = ptx.shape(self.dtype, ROWS_PER_CTA * plan.ctas, HALF, True)
        with cute.arch.elect_one():
            for j in cutlass.range_constexpr(2 // plan.slots_per_block):
                for k in cutlass.range_constexpr(BLOCK_K // STEP):
                    a = ptx.operand(smem["p"] + p * P_BYTES + k * STEP * ITEM, **K_MAJOR)
                    at = smem["slots"] + slot * SLOT + j * (SLOT // 2) + k * STEP * SPAN * ITEM
                    b = ptx.operand(at, leading=PIECE, stride=8 * SPAN * ITEM)
                    more = accumulate if k == 0 else Boolean(True)
                    d = o + (part + j) * (HALF // 2)
                    ptx.mma(d, a, b, shape, more, pair=plan.pair, a_in_tensor_memory=False)
            ptx.commit(bar["slot_free"] + 8 * slot, plan.pair)

    # Does: softmax; a thread (warpgroup w, lane l of tensor memory) owns keys 32 (l // 64) + 16 w and 15 more of row
    # l % 64. Produces: s_free, p_ready, stats_ready. Consumes: s_ready, rows_ready, pv_done, stats_free.
    @cute.jit
    def softmax(self, at, n, by, smem, bar, tmem, rank, warp, work, scale_log2):
        plan = self.plan
        first, tiles, step = work
        lane = cute.arch.lane_idx()
        group, quadrant = warp // 4, warp % 4
        side = quadrant // 2
        row = quadrant % 2 * WARP + lane
        _, token = plan.rows.of(row, rank)
        s_phase = Int32(0)
        stage, phase = Int32(0), Int32(0)
        p, p_phase = Int32(0), Int32(1)
        stats_phase = Int32(1)
        parity = Int32(0)
        for tile in cutlass.range(first, tiles, step):
            top, total = Float32(FLOOR), Float32(0.0)
            for i in cutlass.range(self.blocks(at, n, by, tile)):
                ptx.wait(bar["rows_ready"] + 8 * stage, phase)
                at_mask = smem["slot_masks"] + ((stage * plan.rows.tokens + token) * 2 + side) * 4
                mask = ptx.load_words(at_mask, 1, Uint32)[0] >> Uint32(group * KEYS)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    ptx.arrive(bar["rows_free"] + 8 * stage)
                stage, phase = _next(stage, phase, ROW_STAGES)

                # Own keys of this half's sums, and those that the other half's thread of the same row owns.
                ptx.wait(bar["s_ready"], s_phase)
                s_phase ^= 1
                ptx.fence_after()
                columns = tmem + plan.tmem["s"].start + group * KEYS
                own = ptx.load_columns(columns + side * HALF_K, KEYS)
                given = ptx.load_columns(columns + (1 - side) * HALF_K, KEYS)
                if const_expr(plan.tail):
                    tail = ptx.load_columns(tmem + plan.tmem["s_tail"].start + group * KEYS, KEYS)
                cute.arch.fence_view_async_tmem_load()
                if const_expr(plan.tail):
                    own = [x + y for x, y in zip(own, tail, strict=True)]
                ptx.fence_before()
                self.arrive_pair(bar["s_free"])
                scores = self.exchange(smem, warp, lane, own, given)
                for key in cutlass.range_constexpr(KEYS):
                    scores[key] = scores[key] if (mask >> key) & 1 != 0 else -Float32.inf

                largest = self.row_maximum(smem, parity, group * 2 + side, quadrant, row, scores) * scale_log2
                parity ^= 1
                grown = largest > top + RESCALE_AT
                before = top
                top = largest if grown else top
                factor = cute.math.exp2(before - top, fastmath=True)
                part = Float32(0.0)
                for key in cutlass.range_constexpr(KEYS):
                    scores[key] = cute.math.exp2(scores[key] * scale_log2 - top, fastmath=True)
                    part += scores[key]
                total = total * factor + part

                # Of two buffers, these scores were announced behind the product that read this one.
                if const_expr(plan.p_buffers == 1):
                    ptx.wait(bar["pv_done"], p_phase)
                where = smem["p"] + p * P_BYTES + row * (BLOCK_K * ITEM)
                words = ptx.pack_halves(scores, self.dtype)
                for vector in cutlass.range_constexpr(2):
                    chunk = (side * 4 + group * 2 + vector) ^ (row % 8)
                    ptx.store_words(where + chunk * 16, words[4 * vector : 4 * vector + 4])
                cute.arch.fence_view_async_shared()
                grown_rows = cute.arch.vote_any_sync(grown)
                if (i > 0) & grown_rows:
                    # The product before this block's must be done with O; of a single buffer it is.
                    if const_expr(plan.p_buffers == 2):
                        ptx.wait(bar["pv_done"] + 8 * (p ^ 1), p_phase ^ p)
                    self.rescale(tmem, group, factor)
                self.arrive_pair(bar["p_ready"] + 8 * p)
                p, p_phase = _next(p, p_phase, plan.p_buffers)

            ptx.wait(bar["stats_free"], stats_phase)
            stats_phase ^= 1
            ptx.store_words(smem["sums"] + ((group * 2 + side) * ROWS_PER_CTA + row) * 4, [total])
            if warp < 2:  # one of the four threads of a row
                ptx.store_words(smem["maxima"] + row * 4, [top])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                ptx.arrive(bar["stats_ready"])

    @cute.jit
    def arrive_pair(self, barrier):
        """One arrival of this warp, on the even CTA's barrier."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.arrive(barrier, 0 if self.plan.pair else None)

    @cute.jit
    def exchange(self, smem, warp, lane, own, given):
        """Scores of the thread's own keys: its half's sums plus those of the other half's thread of the same row."""
        for vector in cutlass.range_constexpr(KEYS // 4):
            there = smem["exchange"] + (((warp ^ 2) * (KEYS // 4) + vector) * WARP + lane) * 16
            ptx.store_words(there, given[4 * vector : 4 * vector + 4])
        barrier = PAIR_BARRIER + warp // 4 * 2 + warp % 2
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARP)
        scores = []
        for vector in cutlass.range_constexpr(KEYS // 4):
            here = smem["exchange"] + ((warp * (KEYS // 4) + vector) * WARP + lane) * 16
            taken = ptx.load_words(here, 4, Float32)
            for key in cutlass.range_constexpr(4):
                scores.append(own[4 * vector + key] + taken[key])
        return scores

    @cute.jit
    def row_maximum(self, smem, parity, which, quadrant, row, scores):
        """Largest score of a row's block. Buffers alternate: a slow warp may still read the block before."""
        largest = scores[0]
        for key in cutlass.range_constexpr(1, KEYS):
            largest = cute.arch.fmax(largest, scores[key])
        at = smem["row_max"] + parity * (4 * ROWS_PER_CTA * 4) + row * 4
        ptx.store_words(at + which * (ROWS_PER_CTA * 4), [largest])
        cute.arch.barrier(barrier_id=ROW_BARRIER + quadrant % 2, number_of_threads=4 * WARP)
        for step in cutlass.range_constexpr(1, 4):
            other = at + (which ^ step) * (ROWS_PER_CTA * 4)
            largest = cute.arch.fmax(largest, ptx.load_words(other, 1, Float32)[0])
        return largest

    @cute.jit
    def rescale(self, tmem, group, factor):
        """This warpgroup's half of the columns of O times `factor`."""
        ptx.fence_after()
        start = tmem + self.plan.tmem["o"].start + group * (HALF // 2)
        for chunk in cutlass.range_constexpr(HALF // 2 // RESCALE_COLUMNS):
            columns = ptx.load_columns(start + chunk * RESCALE_COLUMNS, RESCALE_COLUMNS)
            cute.arch.fence_view_async_tmem_load()
            ptx.store_columns(start + chunk * RESCALE_COLUMNS, [c * factor for c in columns])
        cute.arch.fence_view_async_tmem_store()
        ptx.fence_before()

    # Does: out and lse of a tile; thread l reads lane l of O. Produces: o_free, stats_free.
    # Consumes: o_ready, stats_ready.
    @cute.jit
    def epilogue(self, at, n, by, smem, bar, tmem, rank, warp, work, maps):
        plan = self.plan
        first, tiles, step = work
        lane = cute.arch.lane_idx()
        quadrant = warp - ROLE["epilogue"].first
        side = quadrant // 2
        row = quadrant % 2 * WARP + lane
        head, token = plan.rows.of(row, rank)
        out_map = ptx.descriptor(maps[2])
        phase = Int32(0)
        for tile in cutlass.range(first, tiles, step):
            b, s, g = split(tile, n["token_tiles"], n["G"])
            ptx.wait(bar["stats_ready"], phase)
            total = Float32(0.0)
            for part in cutlass.range_constexpr(4):
                total += ptx.load_words(smem["sums"] + (part * ROWS_PER_CTA + row) * 4, 1, Float32)[0]
            top = ptx.load_words(smem["maxima"] + row * 4, 1, Float32)[0]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                ptx.arrive(bar["stats_free"])
            factor = self.statistics(at, n, by, head, s * plan.rows.tokens + token, b, g, side, total, top)

            ptx.wait(bar["o_ready"], phase)
            phase ^= 1
            ptx.fence_after()
            first_head, first_token = plan.rows.origin(s, rank)
            for span in cutlass.range_constexpr(HALF // SPAN):
                values = []
                for part in cutlass.range_constexpr(2):
                    column = plan.tmem["o"].start + span * SPAN + part * (SPAN // 2)
                    values += ptx.load_columns(tmem + column, SPAN // 2)
                cute.arch.fence_view_async_tmem_load()
                if const_expr(span == HALF // SPAN - 1):
                    ptx.fence_before()
                    self.arrive_pair(bar["o_free"])
                # The store before has read its source.
                if quadrant == 0:
                    with cute.arch.elect_one():
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=OUT_BARRIER, number_of_threads=ROLE["epilogue"].warps * WARP)
                words = ptx.pack_halves([v * factor for v in values], self.dtype)
                where = smem["out"] + side * PIECE + row * (SPAN * ITEM)
                for chunk in cutlass.range_constexpr(8):
                    ptx.store_words(where + (chunk ^ (row % 8)) * 16, words[4 * chunk : 4 * chunk + 4])
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=OUT_BARRIER, number_of_threads=ROLE["epilogue"].warps * WARP)
                if quadrant == 0:
                    with cute.arch.elect_one():
                        for part in cutlass.range_constexpr(OUT_PIECES):
                            place = (self.out_column(span, part), first_head, first_token, g, b)
                            ptx.tensor_store(out_map, smem["out"] + part * PIECE, place)
                        cute.arch.cp_async_bulk_commit_group()
        if quadrant == 0:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=False)

    def out_column(self, span: int, half: int) -> Int32:
        """First column of out in tensor-memory columns `64 * span` of one half of the lanes; see `values`."""
        if self.plan.pair:
            return Int32(half * HALF + span * SPAN)
        return Int32(span % 2 * HALF + (span // 2 * 2 + half) * SPAN)

    @cute.jit
    def statistics(self, at, n, by, head, token, b, g, side, total, top):
        """Stores lse of a real row; returns what its O is multiplied with."""
        lse, factor = -Float32.inf, Float32(0.0)
        real = (head < n["heads_per_group"]) & (token < n["S"])
        which = g * n["heads_per_group"] + head
        sink = -Float32.inf
        if real:
            sink = _global(at["sink"], Float32)[Int64(which) * by["sink_h"]]
        if total != 0.0:
            log2_sum = cute.math.log2(total, fastmath=True) + top
            lse = log2_sum * LN_2
            # sigmoid(lse - sink); an infinite power makes it 0, and a sink of -inf leaves 1.
            factor = Float32(1.0) / (total * (1.0 + cute.math.exp2(sink * LOG2_E - log2_sum, fastmath=True)))
        out = _global(at["lse"], Float32)
        if real & (side == 0):
            out[(Int64(b) * n["S"] + token) * (n["G"] * n["heads_per_group"]) + which] = lse
        return factor


def _named(names: tuple[str, ...], values: tuple) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def _global(address: Int64, kind: type) -> Any:
    """Global memory from `address` on, as a vector without end."""
    pointer = cute.make_ptr(kind, address, AddressSpace.gmem, assumed_align=kind.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(Int64(1 << 62), stride=1))


@cute.jit
def _next(index, phase, count: cutlass.Constexpr):
    """The following stage of a ring, and its phase."""
    index += 1
    if index == count:
        index = Int32(0)
        phase ^= 1
    return index, phase
