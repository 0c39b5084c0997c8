"""The sample store: its layout, encoding and files. No cube is known here.

`format` defines layout and metadata, `shard_encoding` and `precision` turn samples into bytes,
`folders` and `locations` write files to disk, URLs and zarr stores. `publishing/` makes a store
appear whole.
"""
