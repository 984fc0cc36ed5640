"""``python -m tests.fuzz``: give invalid bytes to all that takes any. See docs/contributing/faults.md."""

import argparse
import asyncio
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads torch, whose threads spin

from tests.world.measuring import sample

from .dialer import KINDS, lie
from .fuzzed import fuzzed
from .listener import attack
from .processes import SECRET, Died, apart
from .targets import TARGETS, Finding, drawn, run
from .tcp import attack as attack_tcp
from .tcp import lie as lie_over_tcp

HONEST_S = 1.0
"""What an honest handshake, or an honest read over TCP, may take beside the attack, as the worst of all."""

GROWTH_MAX = {"listening": 0.05, "dialing": 0.15, "exporting over TCP": 0.25, "reading over TCP": 0.05}
"""Of resident memory, after a fifth of the input. Every lie that reaches NIXL is another peer. A peer that was met and
removed leaves 0.5 KB in UCX, one with wrong metadata at most 5 KB: "Known limits" in the architecture page. An exporter
over TCP is a process of 45 MiB, and some reads need 4 MiB each."""

UNANSWERED_MAX = 0.001
"""Of the conversations: on a busy machine ZeroMQ may give up a handshake after 5.5 s, and then nobody is answered."""

FILES_MORE_MAX = 16
"""Descriptors of files that connections under way have."""

PROGRESS_S = 30.0
MIB = 1 << 20


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--frames", type=int, default=1_000_000, help="mutated messages to a listener; 0 for none")
    parser.add_argument("--lies", type=int, default=10_000, help="of each kind, to a worker that dials; 0 for none")
    parser.add_argument("--alone", type=int, default=100_000, help="inputs of each target alone; 0 for none")
    parser.add_argument("--tcp-frames", type=int, default=1_000_000, help="to a TCP exporter; 0 for none")
    parser.add_argument("--tcp-answers", type=int, default=100_000, help="to a reader over TCP; 0 for none")
    parser.add_argument("--tcp-encryption", choices=("off", "tls"), default="off", help="of both")
    parser.add_argument("--first", type=int, default=0, help="number of the first input: others than last time")
    parser.add_argument("--honest-s", type=float, default=HONEST_S, help="bound of the worst honest handshake")
    parser.add_argument("--target", choices=TARGETS, help="replay: this target")
    parser.add_argument("--number", type=int, help="replay: this input of it")
    parser.add_argument("--hex", help="replay: these bytes")
    return parser.parse_args()


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def progress():
    """Return what tells how far something is, now and then."""
    said_at = time.monotonic()

    def tell(done, total):
        nonlocal said_at
        if time.monotonic() - said_at > PROGRESS_S:
            said_at = time.monotonic()
            say(f"  {done} of {total}")

    return tell


def replay(options):
    """Give one input to its target, and let whatever it raises be seen."""
    data = bytes.fromhex(options.hex) if options.hex else drawn(options.target, options.seed, options.number)
    say(data.hex())
    say(TARGETS[options.target][0](data))


def alone(options):
    """Drive each target in this process."""
    for name in TARGETS:
        words, seconds = run(name, options.seed, range(options.first, options.first + options.alone))
        most = ", ".join(f"{word} {count}" for word, count in sorted(words.items(), key=lambda each: -each[1])[:5])
        say(f"{name} alone: {options.alone} inputs, {options.alone / seconds:.0f} per second: {most}")


def memory(part, warm, end):
    """Say how resident memory grew, and return what is wrong with it."""
    growth = end / warm - 1
    say(f"  resident memory {warm / MIB:.0f} MiB after a fifth, {end / MIB:.0f} MiB at the end: {growth:+.1%}")
    return [f"{part}: memory grew by {growth:.1%}"] if growth > GROWTH_MAX[part] else []


def listening(options):
    """Attack a listening worker; return the bounds that were missed."""
    say(f"{options.frames} mutated messages to a listening worker, CURVE and default limits:")

    async def run_it():
        async with apart(fuzzed, "nixl", SECRET) as worker:
            return await attack(worker, options.frames, options.seed, first=options.first, tell=progress())

    found = asyncio.run(run_it())
    honest = sorted(found.honest)
    say(
        f"  {found.mutated} mutated messages in {found.conversations} conversations, "
        f"{found.mutated / found.seconds:.0f} per second; {found.raw} connections without CURVE"
    )
    say(
        f"  the worker took {found.received} messages, those of the honest and first words included, and refused "
        f"{found.invalid} of them"
    )
    say(f"  {found.unanswered} conversations had no last word within a minute, and are not counted above")
    say(
        f"  {len(honest)} honest handshakes meanwhile: median {honest[len(honest) // 2] * 1e3:.0f} ms, "
        f"worst {honest[-1] * 1e3:.0f} ms"
    )
    missed = memory("listening", found.rss_warm, found.rss_end)
    if found.mutated < options.frames or found.received < found.mutated:
        missed.append(f"listening: only {min(found.mutated, found.received)} mutated messages were judged")
    if found.unanswered > UNANSWERED_MAX * found.conversations:
        missed.append(f"listening: {found.unanswered} conversations had no last word")
    if honest[-1] > options.honest_s:
        missed.append(f"listening: an honest handshake took {honest[-1]:.2f} s")
    return missed


def dialing(options):
    """Lie to a worker that dials; return the bounds that were missed."""
    say(f"{options.lies} of each to a worker that dials, over NIXL: {', '.join(KINDS)}:")

    async def run_it():
        async with apart(fuzzed, "nixl", SECRET) as worker:
            return await lie(worker, options.lies, options.seed, first=options.first, tell=progress())

    found = asyncio.run(run_it())
    for kind, words in found.said.items():
        say(f"  {kind}: " + ", ".join(f"{word} {count}" for word, count in words.most_common(6)))
    say(f"  {sum(words.total() for words in found.said.values()) / found.seconds:.0f} per second")
    return memory("dialing", found.rss_warm, found.rss_end)


def exporting(options):
    """Attack an exporter of the TCP data plane; return the bounds that were missed."""
    part = "exporting over TCP"
    say(
        f"{options.tcp_frames} frames of readers that lie to an exporter over TCP, encryption {options.tcp_encryption}:"
    )
    found = asyncio.run(
        attack_tcp(
            options.tcp_frames,
            options.seed,
            encryption=options.tcp_encryption,
            first=options.first,
            tell=progress(),
        )
    )
    honest = found.honest
    say(
        f"  {found.frames} frames in {found.conversations} conversations, {found.turned_away} of them turned away, "
        f"{found.frames / found.seconds:.0f} per second; {found.answered} were answered"
    )
    say(f"  the exporter took {found.requests} requests, the honest included, and refused {found.invalid} frames")
    say(
        f"  {len(honest)} honest reads meanwhile: median {honest[len(honest) // 2] * 1e3:.0f} ms, "
        f"worst {honest[-1] * 1e3:.0f} ms, no wrong byte"
    )
    say(f"  descriptors of files: {found.warm['files']} after a fifth, {found.end['files']} at the end")
    missed = memory(part, found.warm["rss"], found.end["rss"])
    if found.frames < options.tcp_frames:
        missed.append(f"{part}: only {found.frames} frames were said")
    if found.end["threads"] < found.warm["threads"]:
        missed.append(f"{part}: a thread has ended")
    if found.end["files"] > found.warm["files"] + FILES_MORE_MAX:
        missed.append(f"{part}: descriptors of files are left")
    if honest[-1] > options.honest_s:
        missed.append(f"{part}: an honest read took {honest[-1]:.2f} s")
    return missed


def reading(options):
    """Lie to a reader over TCP; return the bounds that were missed."""
    say(f"{options.tcp_answers} answers of exporters that lie to a reader over TCP:")
    found = lie_over_tcp(
        options.tcp_answers,
        options.seed,
        encryption=options.tcp_encryption,
        first=options.first,
        rss=lambda: sample("self").rss,
        tell=progress(),
    )
    rate = found.answers / found.seconds
    say(f"  {found.answers} answers over {found.connections} connections, {rate:.0f} per second")
    say("  reads: " + ", ".join(f"{word} {count}" for word, count in found.said.most_common()))
    return memory("reading over TCP", found.rss_warm, found.rss_end)


def main():
    options = arguments()
    if options.target:
        replay(options)
        return 0
    missed, begun_at = [], time.monotonic()
    try:
        if options.alone:
            alone(options)
        if options.frames:
            missed += listening(options)
        if options.lies:
            missed += dialing(options)
        if options.tcp_frames:
            missed += exporting(options)
        if options.tcp_answers:
            missed += reading(options)
    except (Finding, Died, ExceptionGroup) as found:
        missed.append(f"seed {options.seed}: {found}")
        for each in getattr(found, "exceptions", ()):
            missed.append(str(each))
    say(f"{time.monotonic() - begun_at:.0f} s")
    for each in missed:
        say(f"MISSED: {each}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
