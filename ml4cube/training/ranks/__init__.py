"""Train on several ranks.

`dist` starts ranks and communicates, `strategy` and `sharding` distribute the model, `sharing` the
training data. `polling` decides when ranks communicate, `clock` measures how long they wait,
`signals` catches SIGTERM.
"""
