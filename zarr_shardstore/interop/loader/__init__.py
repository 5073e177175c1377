"""Loader of batches for training, as fast as the storage delivers them."""
