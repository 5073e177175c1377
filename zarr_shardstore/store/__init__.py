"""Classes that users hold: the stores, batches and the codec pipeline."""
