"""The TCP data plane: an exporter that serves blocks, and connections that read them."""
