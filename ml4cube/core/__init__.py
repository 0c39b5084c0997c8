"""Values and arithmetic: numpy, cftime and the standard library only.

`grid`, `split_plan`, `sample_spec` and `missing` describe blocks, parts, samples and gaps. `sums/`
sums up cells; `statistics` and `scaling` are computed from these sums. `distance/` measures
distances between cells. `rank_shares` decides which sample each rank reads.
"""
