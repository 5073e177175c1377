"""References to chunks as bytes of stored objects, for readers that need no package."""
