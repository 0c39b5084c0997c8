"""Mergeable sums over cells: exact in any order and on any number of workers.

`moments` computes count, mean and spread of a variable, `fields` those of every entry of a field
(level, pixel, month), `quantiles` reads quantiles from histograms.
"""
