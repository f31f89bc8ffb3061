"""Many models from one call: every member has its own seed, samples, optimizer and end. Also a command."""
