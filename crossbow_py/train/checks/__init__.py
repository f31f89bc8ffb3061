"""Checks before training: each refuses a mistake in one sentence."""
