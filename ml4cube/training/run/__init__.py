"""The loop: the only code that runs an epoch.

`loop` runs epochs over the `engine`, which runs steps; `feed` gives batches, `supervised` is the
usual step, `snapshot` saves and resumes (`changes`: what may differ then, `identity`: what data and
losses are). `trainer_state` and `user_steps` serve `training.trainer`.
"""
