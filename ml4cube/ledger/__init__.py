"""Files that appear complete, or not at all: for stores, predictions and snapshots.

`folders` and `locations` are where files lie, `manifest` lists those of a store. `targets` checks
where stores will be, `overwriting` what may be replaced there. `draft` is the interface of an
unfinished store, which is on disk (`local`), behind a URL (`remote`) or goes into a zarr store
(`in_zarr`); `opening` opens the right one. No cube, sample or model is known here.
"""
