"""Which bytes of a sharded trainer go where in sharded engines: geometry, the plan, layouts, simulation. Pure."""
