"""The loop: the only code that runs an epoch.

A `loop` has an `engine`, which takes optimizer steps, and one `run_state`, which says how far the
run is. `feed` gives training batches, `validation` passes over validation data, `steps` computes
losses, `snapshot` saves and resumes (`run_id`: the same run?). `trainer_runs`, `trainer_state` and
`user_steps` serve `training.trainer`.
"""
