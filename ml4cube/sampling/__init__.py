"""Cut samples from a cube and write them as shards.

Read in this order: `request` checks the arguments, `plan` counts windows (`counting`, `extractor`),
`layout`, `rescaling`, `cf_encoding` and `shards` write, `workers` runs the tasks in processes or on
dask. `identity/` tells whether a call is the one that made a store.
"""
