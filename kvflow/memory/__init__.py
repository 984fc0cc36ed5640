"""Cache memory in torch: the packed allocator and the views on it. The only package of the core that imports torch."""
