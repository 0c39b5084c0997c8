"""What a cube is, once: its dims, data, label, masks and the roles of its coordinates.

`opening` opens what a user passes, `variables` and `coordinates` classify its content, `roles`
identifies masks and labels, `reader` reads blocks of it. `chunks/` decodes zarr chunks on local
disk.
"""
