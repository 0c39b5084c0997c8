"""Samples from stores or cubes, as batches.

`sources` gives samples chunk by chunk (`shard_files`, `cube_source`), `ring/` gathers batches,
`views`, `lead` and `coordinate_features` add to samples, `tensors` and `loaders` make tensors,
`delivery` gives batches their last form.
"""
