"""Floor 3, the only one that waits: drivers, backends, versions, commits."""
