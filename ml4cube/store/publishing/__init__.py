"""How a store comes to its path complete, or not at all.

`targets` says where stores will stand, `draft` what a store under way is, `drafts` which kind is
for which place (`local`, `remote`, `in_zarr`), `overwriting` what may be replaced.
"""
