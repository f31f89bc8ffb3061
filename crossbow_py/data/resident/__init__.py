"""Data sets that live on the device: batches are made there, in the thread that asks for them."""
