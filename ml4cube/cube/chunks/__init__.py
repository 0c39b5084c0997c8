"""Zarr chunks on this machine's disk, decoded without zarr-python's cost per read.

`opened` says which arrays may be read so, `backend` and `disk` read them, `codecs` decode.
"""
