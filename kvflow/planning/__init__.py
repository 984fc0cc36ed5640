"""Plan transfers between two cache layouts. Pure."""
