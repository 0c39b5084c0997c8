"""From a request to shards: request, plan, windows, shards.

`request` checks what a user wants, `plan` counts (`counting`, `extractor`, `windows`), `layout` and
`shards` write, `engines` run the tasks on processes or dask. `identity/` tells whether a call is
that of an earlier store.
"""
