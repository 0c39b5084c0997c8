"""Train on several ranks.

`dist` starts ranks and communicates, `strategy` and `fsdp` distribute the model, `unshared_data`
notices ranks that train on the same samples, `exact_validation` counts every sample once.
`polling` decides when ranks communicate, `clock` measures how long they wait, `signals` catches
SIGTERM.
"""
