"""Packs: trials that share a device, on the rows of one bank or side by side, and how wide packs are."""
