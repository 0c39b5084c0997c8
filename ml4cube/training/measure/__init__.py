"""Measure epochs and validation passes, exactly on any number of ranks.

`means` weights batches, `scores` sums losses and metrics, `validation` collects those of a training
epoch or a validation pass and reduces them to a row of the History.
"""
