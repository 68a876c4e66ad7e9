"""What mixfl may change of the process it runs in: memory, the cache of compiled programs, JAX."""
