"""Groups of samples: producer, engine pool and the three topologies."""
