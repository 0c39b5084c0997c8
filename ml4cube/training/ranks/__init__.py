"""Train on several ranks.

`dist` joins or starts ranks, `environment` says which rank and device this process is, `world`
communicates, `failures` tells the others of an error. `strategy` and `fsdp` distribute the model,
`unshared_data` notices ranks that train on the same samples, `exact_validation` counts every sample
once. `requests` is what ranks ask of all, `clock` measures how long they wait, `signals` catches
SIGTERM.
"""
