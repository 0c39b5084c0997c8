"""Values and arithmetic: numpy, cftime and the standard library only.

`grid`, `split_plan`, `sample_spec` and `missing` describe blocks, parts, samples and gaps. `sums/`
adds up cells; `statistics` and `scaling` are made of these sums. `distance/` measures how far cells
lie from one another. `shares` decides who reads which sample.
"""
