"""Arrays that grow: a writer of frames, and slabs that many writers append."""
