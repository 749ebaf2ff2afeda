"""A small torch inference engine that speaks SGLang's HTTP routes."""
