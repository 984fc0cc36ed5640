"""One example of every event, for the tests of whatever takes them all."""

from kvflow import events
from kvflow.report import TransferReport

REPORT = TransferReport(
    request_id="request-1",
    nbytes=4096,
    descriptors=3,
    reads=2,
    read_bytes=8192,
    merged=0.25,
    transport="cma",
    plane="nixl",
    timings_s={
        "handshake": 0.5,
        "bind": 0.0001,
        "queue": 0.001,
        "post": 0.02,
        "wire": 0.03,
        "scatter": 0.004,
        "fence": 0.000005,
        "total": 1 / 3,
    },
)
PEER = "prefill-0/1/" + "0" * 32

EVENTS = {
    "worker.opened": events.WorkerOpened("tcp://127.0.0.1:5000", "nixl", 1024, 65536),
    "plane.omitted": events.PlaneOmitted("nixl", "transport_unavailable", "NIXL is not installed", "Install it."),
    "worker.drained": events.WorkerDrained(1, 2, 1, 30.0),
    "worker.closed": events.WorkerStopped(2, 1),
    "offer.admitted": events.OfferAdmitted("request-1", 4, 30.0),
    "offer.refused": events.OfferRefused("request-1", "capacity_exceeded", "no room", "Wait."),
    "peer.connected": events.PeerConnected(
        PEER, "tcp://127.0.0.1:5000", 0.25, transport="cma", transport_known_by="addresses", plane="nixl"
    ),
    "layers.omitted": events.LayersOmitted("prefill-0", "target", "layers.4", "fewer drafts are accepted", "Serve it."),
    "peer.measured": events.PeerMeasured(
        peer="prefill-0/1/abc",
        gb_per_s=41.2,
        nbytes=1 << 26,
        source_memory="VRAM",
        target_memory="VRAM",
        transport="rc_mlx5",
        plane="nixl",
    ),
    "peer.slow": events.PeerSlow(
        peer="prefill-0/1/abc",
        gb_per_s=0.5,
        transport="cuda_ipc",
        plane="nixl",
        detail="GPUs without NVLink",
        remedy="Check it.",
    ),
    "peer.dropped": events.PeerDropped(PEER, "peer_lost", "silent for 20 s"),
    "breaker.opened": events.BreakerOpened("tcp://127.0.0.1:5000", 3, 0.5),
    "breaker.closed": events.BreakerClosed("tcp://127.0.0.1:5000"),
    "consumer.rejected": events.ConsumerRejected(PEER, "malformed", "not a message"),
    "reader.reset": events.ReaderReset("quarantine_s_max", 1000, 3, 0.02, 0.06),
    "lease.ended": events.LeaseEnded("request-1", "released", 1.5),
    "transfer.started": events.TransferStarted(7, "request-1"),
    "transfer.retried": events.TransferRetried(7, "request-1", PEER),
    "transfer.completed": events.TransferCompleted(7, "request-1", REPORT, "", "prefill-0"),
    "transfer.failed": events.PullFailed(
        7,
        "request-1",
        "peer_lost",
        "wire",
        PEER,
        "gone",
        quarantined=True,
        cause="peer_closed",
        remedy="Look whether it runs.",
        local_request_id="cmpl-1",
        nbytes=1024,
        nbytes_wanted=4096,
        transport="cma",
        plane="nixl",
        ticket_age_s=1.5,
        timings_s={"handshake": 0.25, "queue": 0.001, "wire": 0.03, "total": 1 / 3},
        remote_engine_id="prefill-0",
    ),
    "prefix.fetched": events.PrefixFetched(
        "kept:cmpl-1", "cmpl-2", "tcp://decode-0:5600", 4096, 3072, 0.0004, 0.02, 1 << 28
    ),
    "transfer.traced": events.TransferTraced(
        7,
        "request-1",
        (PEER,),
        (events.TracedGroup(0, 0, 0, 1, 2, 2048, 3, 3, staged=False, pairs=((4, 9, 2),)),),
        ((0, 0.001, 0.002, 4096, 6),),
    ),
    "transfer.quiesced": events.TransferQuiesced(7, "request-1"),
}
