"""Cache memory in torch: the allocator, views, and adopted tensors. No other package of the core imports torch."""
