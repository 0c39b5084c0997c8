"""Sums over the compared cells, block by block, which merge.

Read `scored_variable`, then `scored_tile`, then `score_sums`, then `named_sums`.
"""
