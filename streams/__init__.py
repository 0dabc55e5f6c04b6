"""Events folded into summaries."""
