"""Adoption of files in place."""
