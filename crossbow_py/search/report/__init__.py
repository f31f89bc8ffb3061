"""The records of a search: on the terminal, in search.json, in TensorBoard and in pictures."""
