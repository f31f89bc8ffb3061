"""Launchers of our own: jobs that run in processes elsewhere, of which each is a command line and nothing else."""
