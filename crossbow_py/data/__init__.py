"""Data: sources, the order of samples, augmentation, and the feeds that give batches to learners."""
