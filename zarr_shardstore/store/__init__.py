"""Classes for users: the stores, their options and the codec pipeline."""
