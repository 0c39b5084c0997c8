"""Sums over the compared cells, block by block, which merge.

Read `block_sums`, then `scoring`, then `named_sums`.
"""
