"""Cut samples from a cube and write them as shards.

Read in this order: `sampled_cube` binds a user's arguments to a cube (`selection`, `parts`,
`reading`), `tiling` says how it is divided, `planning` counts windows (`counting`, `outcomes`,
`samples`), `layout`, `rescaling`, `cf_encoding` and `shards` write. `identity/` tells whether a
call is the one that made a store.
"""
