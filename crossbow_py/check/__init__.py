"""The command `check`: what this machine's device can be trusted with."""
