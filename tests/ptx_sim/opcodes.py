"""Imports every instruction family, which fills the opcode table of `translate`."""

from . import (
    ops_bulk,
    ops_control,
    ops_convert,
    ops_float,
    ops_int,
    ops_matrix,
    ops_mbarrier,
    ops_memory,
    ops_print,
    ops_tcgen05,
)

FAMILIES = (ops_int, ops_float, ops_convert, ops_memory, ops_control, ops_mbarrier, ops_bulk, ops_matrix, ops_tcgen05)
CALLS = (ops_print,)
