"""The bank of replicas: K models of one architecture in one allocation, and what is derived from all of them."""
