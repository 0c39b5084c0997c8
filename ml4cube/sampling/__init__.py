"""Cut samples from a cube and write them as shards.

Read in this order: `request` checks the arguments, `tiling` says how a cube is divided, `plan`
counts windows (`counting`, `outcomes`, `samples`), `layout`, `rescaling`, `cf_encoding` and
`shards` write. `identity/` tells whether a call is the one that made a store.
"""
