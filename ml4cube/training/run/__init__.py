"""The loop: the only code that runs an epoch.

`loop` runs epochs over the `engine`, which runs steps; `feed` gives batches, `supervised_step` is
the usual step, `snapshot` saves and resumes (`resume_changes`: what may differ then).
`trainer_state` and `user_steps` serve `training.trainer`.
"""
