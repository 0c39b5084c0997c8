"""Define a cube, in one place: its dims, data, label, masks and the roles of its coordinates.

`opening` opens what a user passes. `variables` says which variables are data (bounds are not),
`coordinates` which are time, latitude and longitude. `reader` reads blocks. `chunks/` decodes zarr
chunks.
"""
