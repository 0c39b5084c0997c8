"""Samples from stores or cubes, as batches.

`sources` and `cube_source` read samples chunk by chunk, `opening` chooses between them, `views`
and `coordinate_features` add to samples, `ring/` gathers batches, `tensors` and `loaders`
make tensors, `handover` and `augmentation` finish batches, `unbatch` makes Datasets of them.
"""
