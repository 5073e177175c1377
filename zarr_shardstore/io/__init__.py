"""The only floor that waits: drivers, the update queue, caches, backends."""
