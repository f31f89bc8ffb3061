"""Data sets that live on the device: made into batches there, in the thread that asks."""
