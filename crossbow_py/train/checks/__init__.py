"""What is looked for before anything is trained, and refused in one sentence."""
