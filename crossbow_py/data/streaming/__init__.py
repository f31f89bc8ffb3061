"""Data sets too large for the device: samples made by worker processes, ahead of the learners that take them."""
