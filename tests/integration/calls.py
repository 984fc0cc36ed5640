"""Every call of a worker, as an engine would make it."""

from functools import partial

from kvflow import errors

BLOCKS = [[0, 1], [2, 3]]


def calls_of(worker, ticket, grant, cache):
    """Return the public calls of an asyncio or threaded worker by name, but for ``endpoint`` and ``close``."""
    every = {
        "offer": ("another", BLOCKS, 8),
        "offer_when_possible": ("another", BLOCKS, 8),
        "keep": ("kept", BLOCKS, 8, [[b"first", b"second"], [b"first", b"second"]]),
        "offer_progressive": ("open", [[], []], 8),
        "advance": ("open", 4, [[0], [2]]),
        "seal": ("open", [[1], [3]]),
        "find": (worker.endpoint, [b"first", b"second"]),
        "read_manifest": (worker.endpoint,),
        "admit": (grant,),
        "revoke": ("r",),
        "wait_offer": ("r",),
        "read_ticket": (ticket.to_params(),),
        "pull": (ticket, BLOCKS),
        "start_pull": (ticket, BLOCKS),
        "pull_many": ([(ticket, BLOCKS)],),
        "hold": (ticket,),
        "release": (ticket,),
        "quiesced": ("r",),
        "drain": (0,),
        "check": (),
        "allow_keys": ([],),
        "snapshot": (),
        "record_refusal": ("ticket_invalid", "as told"),
        "finished": (),
        "wait_finished": (0,),
        "suspend": (),
        "resume": (cache,),
    }
    calls = {
        name: partial(getattr(type(worker), name), worker, *given)
        for name, given in every.items()
        if hasattr(worker, name)
    }
    calls["rank_address"] = lambda: worker.rank_address
    public = {name for name in vars(type(worker)) if not name.startswith("_")} - {"endpoint", "close"}
    assert calls.keys() == public, "a call was added, and is to be tried here"
    return calls


def refusals(calls, run):
    """Make every call in the way of ``run``; return the codes of what they raise, and who is named as remedy."""
    codes = {}
    for name, call in calls.items():
        try:
            run(call)
        except errors.KvflowError as error:
            codes[name] = f"{error.code}, see run_worker" if "run_worker" in error.remedy else error.code
        else:
            codes[name] = "nothing"
    return codes
