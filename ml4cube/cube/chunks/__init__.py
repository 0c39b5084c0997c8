"""Zarr chunks on local disk, decoded without zarr-python's cost per read.

`lazy_zarr` finds the arrays for which this is possible, `backend` and `disk` read them, `codecs`
decodes, and `blocks` chooses the blocks to read.
"""
