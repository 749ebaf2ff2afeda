"""One port to an inference engine; its HTTP client, its launcher and the embedded engine."""
