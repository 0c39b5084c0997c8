"""The sample store: its layout, encoding and files. No cube is known here.

`format` owns layout and metadata, `encoding` and `precision` turn samples into bytes, `folders` and
`locations` say where files lie. `publishing/` makes stores complete or absent.
"""
