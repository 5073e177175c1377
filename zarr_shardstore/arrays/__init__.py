"""The array of each key, and the metadata that users see."""
