"""The NIXL data plane: one NIXL agent behind the `Backend` protocol."""
