"""A CPU simulator of the PTX that attention kernels for sm_90a and sm_100a use. See README.md beside this file."""
