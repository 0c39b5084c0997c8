"""The sample store: its layout, encoding and files. No cube is known here.

`format` defines layout and metadata, `shard_encoding` and `precision` turn samples into bytes.
Where its files lie, and how it appears whole, is the business of `ml4cube.ledger`.
"""
