"""The loop: the only code that runs an epoch.

`loop` runs epochs over the `engine`, which runs steps; `feed` gives batches, `steps` computes
losses, `options` are the settings, `checks` refuses what cannot work; `stepwise`, `user_steps` and
`keeping` serve `training.trainer`.
"""
