"""Values and arithmetic: numpy, cftime and the standard library only.

`grid`, `split_plan` and `missing` describe blocks, parts and gaps. `sums/`
sums up cells; `statistics` and `scaling` are computed from these sums. `distance/` measures
distances between cells. `rank_shares` decides which sample each rank reads.
"""
