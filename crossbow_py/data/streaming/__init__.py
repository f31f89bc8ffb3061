"""Data sets too large for the device: worker processes load samples ahead of the learners that take them."""
