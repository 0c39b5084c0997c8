"""Mergeable sums over cells: exact in any order and on any number of workers.

`moments` are count, mean and spread; `fields` the same at every place of a field; `quantiles` come
from histograms.
"""
