"""What a soak says at its end, and what it must not say."""

from kvflow.worker.producer import ENDED_MAX

from .measuring import MIB, Growth

GROWTH_MAX = 0.05
JUDGED = ("reader", "producer")
"""Processes that live as long as the soak."""
DOCUMENTED = {
    "completed",
    "cancelled",
    "killed",  # with its reader
    "stale_lease",
    "peer_lost",
    "peer_unavailable",
    "transfer_cancelled",
    "worker_closed",
}
EXPECTED = ("completed", "cancelled", "stale_lease")
"""Without each of these a soak has shown little."""


def tell(soak, of_round):
    """Return a table of everything; of ``of_round`` pulls in a round."""
    tally = soak.tally
    columns = ("MiB, warm", "at the end", "growth", "bytes/pull", "files", "threads", "core s")
    lines = [
        f"{soak.pulls:,} pulls in {soak.took_s:.1f} s, {soak.pulls / soak.took_s:.0f} per second",
        f"ended: {counts(tally.ends)}",
        f"given up: {counts(tally.aborts)}; after up to {tally.turns_max} turns of the loop, waiting at",
        *(f"    {times:7,}  {point}" for point, times in tally.points.most_common()),
        f"of these, offers that were followed: {counts(tally.followed)}; offered again: {counts(tally.again)}",
        f"meanwhile: {counts(soak.restarts)}",
        f"wrong words: {tally.wrong}; words written after the end: {tally.late}",
        f"{soak.undisturbed:,} pulls that nobody disturbed; of these were not delivered: {len(soak.unexplained)}",
        *tally.examples,
        f"{'':24}" + "".join(f"{column:>11}" for column in columns),
    ]
    for name, samples in soak.samples.items():
        growth, last = Growth(samples, of_round), samples[-1]
        lines.append(
            f"{name:24}{growth.before / MIB:11.1f}{growth.after / MIB:11.1f}{growth.share:11.1%}"
            f"{growth.bytes_per_pull:11.0f}{last.descriptors.total():11}{last.threads:11}{last.cpu_s:11.1f}"
        )
    return "\n".join(lines)


def missed(soak):
    """List the bounds that were missed, those of memory not among them."""
    tally = soak.tally
    checks = [
        (tally.wrong == 0, f"{tally.wrong} wrong words were delivered"),
        (tally.late == 0, f"{tally.late} words were written into blocks after the end of their pull"),
        (not soak.unexplained, f"pulls that nobody disturbed: {soak.unexplained[:5]}"),
        (not soak.unreleased, f"leases that no reader gave back: {soak.unreleased[:5]}"),
        (not soak.unsteady, f"files and threads: {soak.unsteady[:5] + soak.unsteady[-1:]}"),
        (soak.blocks_left == 0, f"{soak.blocks_left} blocks were never given back"),
        (set(tally.ends) <= DOCUMENTED, f"ends: {sorted(set(tally.ends) - DOCUMENTED)}"),
        *((tally.ends[end] > 0, f"no pull ended as {end}") for end in EXPECTED),
    ]
    return [text for kept, text in checks if not kept]


def grown(soak, of_round):
    """List the processes whose memory has grown too much."""
    shares = {name: Growth(soak.samples[name], of_round).share for name in JUDGED}
    return [f"memory of the {name} grew by {share:.1%}" for name, share in shares.items() if share > GROWTH_MAX]


def unbounded(memory):
    """List how much a producer has grown since its bounded tables were full; ``memory``: after so many offers."""
    full = min((offers for offers in memory if offers >= ENDED_MAX), default=max(memory))
    share = memory[max(memory)] / memory[full] - 1
    text = f"memory grew by {share:.1%} between {full:,} and {max(memory):,} offers"
    return [text] if share > GROWTH_MAX else []


def counts(counter):
    return ", ".join(f"{count:,} {name}" for name, count in counter.most_common())
