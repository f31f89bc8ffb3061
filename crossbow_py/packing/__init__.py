"""Packs: trials and ensembles that share a device, and the search that chooses among trials."""
