"""Where prompts come from, and what became of them."""
