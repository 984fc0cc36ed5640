"""A tiny engine and router around kvflow: a deterministic hybrid transformer, served by separate processes."""
