"""Mergeable sums over cells: exact in any order and on any number of workers.

Read `mergeable`, the protocol of all. `moments` computes count, mean and spread of a variable,
`fields` those of every entry of a field (level, pixel, month), `quantiles` reads quantiles from
histograms, `pairs` has the sums that metrics follow from.
"""
