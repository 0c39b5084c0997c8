"""Limits of memory that the system sets, behind errors that do not say so."""

from __future__ import annotations

import resource

# What Python and the loader of libraries say where a process gets no more memory.
_SIGNS = ("can't start new thread", "failed to map segment", "Cannot allocate memory", "bad alloc")


def memory_limit(error: Exception) -> str:
    """Say which limit of memory is behind an error; nothing if none is."""
    if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in _SIGNS):
        return ""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = ""
    if allowed != resource.RLIM_INFINITY:
        limit = f" (ulimit -v: {allowed // 2**20} MB)"
    return (
        f"; this process gets no more memory or threads{limit}: raise the limit, or use fewer "
        "processes and smaller samples or blocks"
    )
