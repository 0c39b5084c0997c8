"""The sample store: its layout, encoding and files. No cube is known here.

`format` defines the layout, `metadata` says what the samples are, `shard_encoding` and `precision`
turn samples into bytes. Where its files lie, and how it appears whole, is the business of
`ml4cube.ledger`.
"""
