"""Clusters of dask on this machine."""

from __future__ import annotations

from typing import Any


def local_cluster(n_workers: int = 1, **options: Any) -> Any:
    """Start a cluster on loopback: threads of this process, one a worker, unless told otherwise."""
    from distributed import LocalCluster

    given = {"threads_per_worker": 1, "processes": False, "protocol": "tcp", "host": "127.0.0.1"}
    return LocalCluster(n_workers=n_workers, dashboard_address=None, **(given | options))
