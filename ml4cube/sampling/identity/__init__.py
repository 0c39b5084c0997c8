"""Whether this cube, callback and call are those of an earlier store.

`provenance` describes a call, `cube` and `callback` tell theirs apart.
"""
