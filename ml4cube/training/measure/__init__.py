"""Measure epochs and validation passes, exactly on any number of ranks.

`scores` computes losses and metrics of batches, `means` adds them up, `summary` is what trainers
print.
"""
