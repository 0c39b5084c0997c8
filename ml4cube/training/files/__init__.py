"""Files that survive a kill: `checkpoint` writes whole files and verifies them when read."""
