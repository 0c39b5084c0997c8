"""Train on several ranks.

`dist` joins or starts ranks, `environment` says which rank and device this process is, `world`
communicates, `failures` tells the others of an error. `strategy` and `fsdp` distribute the model,
`shared_data` says which samples a rank gets. `requests` is what ranks ask of all, also on SIGTERM.
"""
