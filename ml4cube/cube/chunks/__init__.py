"""Zarr chunks, decoded without zarr-python's cost per read.

`lazy_zarr` finds the arrays for which this is possible, `stored` and `backend` read them from their
`files`, `codecs` decodes, and `blocks` chooses the blocks to read.
"""
