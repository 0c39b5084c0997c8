"""What a cube is, once: its dims, data, label, masks and the roles of its coordinates.

`opening` takes what a user gives, `variables` and `coordinates` say what is in it, `roles` knows
masks and labels, `reader` reads blocks of it. `chunks/` decodes zarr chunks on this machine's disk.
"""
