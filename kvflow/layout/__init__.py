"""Pure description of caches: specs, groups, placement, components, manifests."""
