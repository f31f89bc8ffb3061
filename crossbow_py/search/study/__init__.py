"""A search as its worker processes share it: trials, claims of segments, and the storage they are kept in."""
