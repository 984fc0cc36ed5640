"""The ruler: two processes, real NIXL, and every figure beside its ceiling from the same run."""
