"""Which key belongs to which array, and what users see of the metadata."""
