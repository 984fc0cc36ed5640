"""The data plane: how bytes get from a producer's blocks into a consumer's."""
