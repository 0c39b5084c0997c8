"""How ranks work together.

`dist` knows the process group, `strategy` and `sharding` lay the model out, `polling` says when
ranks ask one another, `sharing` who trains on what, `clock` and `signals` measure time and notice
SIGTERM.
"""
