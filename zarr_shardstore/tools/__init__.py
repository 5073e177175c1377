"""Floor 5: work on whole stores. It moves bytes and changes metadata, and decodes nothing."""
