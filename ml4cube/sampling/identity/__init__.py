"""Decide whether a call is the one that made a store.

`provenance` describes a call; `cube` and `callback` each state and apply one rule for when theirs
are the same.
"""
