"""The adapter to ``handshake``: manifests become publications, leases messages, and its errors ours."""
