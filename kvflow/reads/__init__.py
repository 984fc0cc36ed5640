"""Read blocks from peers: pulls become rank reads, and rank reads become chunks that a data plane moves.

``contract`` defines a rank read, its answer, and the interface between a worker and its data planes.

- ``scheduler``, ``pulls``, ``report``: on the event loop. They decide what follows from the answers to rank reads,
  apply deadlines, and compute reports. They do no I/O.
- ``thread``: the read thread of a worker and its lock; makes the data planes that the settings name. ``core``: all
  that this thread decides, without a thread.
- ``lanes``: chooses the next chunk and the next check, and records what is in flight.
- ``prepared``, ``bounds``: check descriptor lists and pairs, bind pairs to descriptors, estimate what a post costs.
- ``backend``: the interface of a data plane, and what it publishes. ``planes`` chooses one for each peer.
- ``nixl``, ``tcp``, ``loopback``: the data planes.
- ``serving``: which blocks an exporter may serve, and under which lease.
- ``staging``: staging buffers, who has which, and the strided copies out of them.
- ``device``: copies between host and device memory.
"""
