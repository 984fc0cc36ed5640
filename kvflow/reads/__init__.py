"""Read blocks from peers: pulls become rank reads, and rank reads become chunks that a data plane moves.

``contract`` defines a rank read, its answer, and the interface between a worker and its data planes; ``backend`` the
interface of one data plane. ``scheduler`` and ``report`` run on the event loop, ``core`` on the read thread.
"""
