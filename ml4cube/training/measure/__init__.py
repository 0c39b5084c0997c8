"""What an epoch and a validation measure, exact on any number of ranks.

`means` knows what a loss divides by, `scores` holds means and metrics, `validation` a pass, `rows`
an epoch's row.
"""
