"""Data: sources and downloads, sample order, augmentation, and the feeds that give batches to learners."""
