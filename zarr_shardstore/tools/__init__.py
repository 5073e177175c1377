"""Tools for whole stores: reports, conversions, translation of documents, checks and repair."""
