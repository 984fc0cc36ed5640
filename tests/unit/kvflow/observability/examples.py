"""One example of every event, for the tests of whatever takes them all."""

from kvflow.cache.leases import LeaseEnded
from kvflow.observability import events as shell
from kvflow.transfer import events as transfer
from kvflow.transfer.report import TransferReport

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
    "worker.opened": shell.WorkerOpened("tcp://127.0.0.1:5000", "nixl", 1024, 65536),
    "plane.omitted": shell.PlaneOmitted("nixl", "NIXL is not installed"),
    "calibration.ignored": shell.CalibrationIgnored("/etc/kvflow.json", "nixl", "loopback"),
    "worker.drained": shell.WorkerDrained(1, 2, 1, 30.0),
    "worker.closed": shell.WorkerClosed(2, 1),
    "offer.admitted": shell.OfferAdmitted("request-1", 4, 30.0),
    "offer.refused": shell.OfferRefused("request-1", "capacity_exceeded", "no room", "Wait."),
    "peer.connected": shell.PeerConnected(
        PEER, "tcp://127.0.0.1:5000", 0.25, transport="cma", transport_known_by="addresses", plane="nixl"
    ),
    "peer.dropped": shell.PeerDropped(PEER, "peer_lost", "silent for 20 s"),
    "breaker.opened": shell.BreakerOpened("tcp://127.0.0.1:5000", 3, 0.5),
    "breaker.closed": shell.BreakerClosed("tcp://127.0.0.1:5000"),
    "reader.rejected": shell.ReaderRejected(PEER, "malformed", "not a message"),
    "reader.reset": shell.ReaderReset("quarantine_s_max", 1000, 3, 0.02, 0.06),
    "lease.ended": LeaseEnded("request-1", "released", 1.5),
    "transfer.started": transfer.TransferStarted(7, "request-1"),
    "transfer.retried": transfer.TransferRetried(7, "request-1", PEER),
    "transfer.completed": transfer.TransferCompleted(7, "request-1", REPORT),
    "transfer.failed": transfer.TransferFailed(
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
    ),
    "transfer.quiesced": transfer.TransferQuiesced(7, "request-1"),
}
