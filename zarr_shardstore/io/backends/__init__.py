"""One backend for each kind of base store."""
