"""The bridge to ``handshake``: manifests as publications, leases as messages, its errors as ours."""
