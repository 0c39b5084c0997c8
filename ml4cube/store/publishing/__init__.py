"""Publish a store: it appears at its path complete, or not at all.

`targets` checks where stores will be, `overwriting` what may be replaced there. `draft` is the
interface of an unfinished store, which is on disk (`local`), behind a URL (`remote`) or goes into a
zarr store (`in_zarr`). `opening` opens the right one.
"""
