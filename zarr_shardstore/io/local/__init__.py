"""Shard files on a local disk: system calls, locks, open and cached files."""
