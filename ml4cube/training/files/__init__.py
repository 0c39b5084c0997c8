"""Files that survive a kill: weights and snapshots.

`checkpoint` writes whole files, `snapshot` saves and resumes a run, `description` says of which run
a snapshot is, `shard_files` holds shares of models cut over ranks.
"""
