"""``kvflow ticket``: what is shown of a good ticket, and one line with a code for everything else."""

import io
import json
import time
from types import SimpleNamespace

import msgspec
import pytest

from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE
from kvflow.leases.tickets import RankAddress
from kvflow.rendezvous.issuer import TicketMint
from kvflow.tools.cli import main
from kvflow.tools.cli import ticket as command
from tests.helpers.loops import looped

SECRET = "the secret of the test cluster"
RANKS = [RankAddress(rank, f"{rank:032x}", f"tcp://10.0.0.{rank}:7000", public_key="ab" * 32) for rank in range(2)]


def minted(request_id="request-1", *, signed_at=None, ranks=RANKS, block_ids=((3, 4, -1), (7,)), **how):
    wall = time.time if signed_at is None else lambda: signed_at
    mint = TicketMint("prefill-0", ranks, cluster_secret=SECRET, wall_clock=wall, **how)
    return mint.offer(request_id, block_ids=block_ids, num_tokens=48)[0]


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)


@pytest.fixture
def stdin(monkeypatch):
    def give(data):
        data = data if isinstance(data, bytes) else data.encode()
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))

    return give


def run_json(capsys, *arguments):
    status = main(["ticket", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_a_ticket_is_shown_with_its_engine_ranks_blocks_and_expiry(capsys):
    status, shown = run_json(capsys, minted().to_params()["kvflow"])
    assert (status, shown["signature"]) == (0, "valid")
    (grant,) = shown["grants"]
    assert (grant["engine_id"], grant["request_id"], grant["lease_s"]) == ("prefill-0", "request-1", 30.0)
    assert [(rank["rank"], rank["endpoint"]) for rank in grant["ranks"]] == [
        (0, "tcp://10.0.0.0:7000"),
        (1, "tcp://10.0.0.1:7000"),
    ]
    assert grant["groups"][0] == {"blocks": 3, "absent": 1, "tokens": 48, "block_size": None}
    assert 0 < grant["expires_in_s"] <= 30


@pytest.mark.parametrize(
    "wrap", [str, lambda text: {"kvflow": text}, lambda text: {"kv_transfer_params": {"kvflow": text}}]
)
@pytest.mark.parametrize("way", ["argument", "file", "stdin"])
def test_a_ticket_is_read_in_every_form_from_everywhere(capsys, tmp_path, stdin, wrap, way):
    wrapped = wrap(minted().to_params()["kvflow"])
    given = wrapped if isinstance(wrapped, str) else json.dumps(wrapped)
    arguments = []
    if way == "argument":
        arguments = [given]
    elif way == "file":
        (tmp_path / "params.json").write_text(given + "\n")
        arguments = ["--file", str(tmp_path / "params.json")]
    else:
        stdin(given)
    assert main(["ticket", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "signature  valid\n" in printed
    assert "engine   'prefill-0'\n" in printed
    assert "3 blocks, 1 of them absent; 48 tokens" in printed


def test_without_a_secret_nothing_is_claimed_about_the_signature(monkeypatch, capsys):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    status, shown = run_json(capsys, minted().to_params()["kvflow"])
    assert (status, shown["signature"]) == (0, "not checked")


def test_another_secret_is_a_finding(monkeypatch, capsys):
    monkeypatch.setenv(SECRET_VARIABLE, "the secret of another cluster")
    assert main(["ticket", minted().to_params()["kvflow"]]) == 1
    assert "signature  wrong" in capsys.readouterr().out


def test_a_key_of_ones_own_needs_no_list_of_keys_here(monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    assert run_json(capsys, minted().to_params()["kvflow"])[0] == 0


def test_a_secret_that_is_too_short_is_named(monkeypatch, capsys):
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    status, shown = run_json(capsys, minted().to_params()["kvflow"])
    assert (status, shown["error"]["code"]) == (1, "config_invalid")


def test_a_ticket_that_has_expired_is_a_finding(capsys):
    text = minted(signed_at=time.time() - 100).to_params()["kvflow"]
    assert main(["ticket", text]) == 1
    assert " s ago by this clock, unless a reader has renewed it" in capsys.readouterr().out


def test_an_old_ticket_of_what_is_kept_is_no_finding(capsys):
    mint = TicketMint("prefill-0", RANKS, cluster_secret=SECRET, wall_clock=lambda: 1000.0, block_sizes=[16])
    kept, _ = mint.keep("kept", block_ids=[[3]], num_tokens=16, digests=[[b"content"]])
    assert main(["ticket", kept.to_params()["kvflow"]]) == 0
    assert "expires  when its engine ends it" in capsys.readouterr().out


def test_an_old_ticket_of_what_is_still_computed_is_no_finding(capsys):
    mint = TicketMint("prefill-0", RANKS, cluster_secret=SECRET, wall_clock=lambda: 1000.0)
    ticket, _ = mint.offer_progressive("open", [[]], 16)
    assert main(["ticket", ticket.to_params()["kvflow"]]) == 0
    assert "its blocks may not all be computed" in capsys.readouterr().out


def test_a_ticket_without_a_time_is_no_finding():
    figures = command._figures(minted().grants[0], 0.0)
    untimed = msgspec.structs.replace(figures, issued_at=None, expires_in_s=None)
    assert "does not say when it was signed" in command._expiry(untimed)


def test_control_characters_of_a_name_do_not_reach_the_terminal(capsys):
    assert main(["ticket", minted("\x1b[2J\nsignature  valid").to_params()["kvflow"]]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed.count("\nsignature") == 0


def test_many_ranks_are_counted_and_not_all_shown(capsys):
    ranks = [RankAddress(rank, f"{rank:032x}", "tcp://10.0.0.1:7000") for rank in range(40)]
    assert main(["ticket", minted(ranks=ranks).to_params()["kvflow"]]) == 0
    assert "and 24 more ranks" in capsys.readouterr().out


TEXT = minted().to_params()["kvflow"]


@looped(
    "given, code",
    [
        ("", "ticket_invalid"),
        ("nonsense", "ticket_invalid"),
        ("kvf3", "ticket_invalid"),
        ("kvf3.!!!!", "ticket_invalid"),
        (TEXT[:-9], "ticket_invalid"),
        ("kvf9" + TEXT[4:], "release_mismatch"),
        ("{", "ticket_invalid"),
        ("{}", "ticket_invalid"),
        ('{"kvflow": 7}', "ticket_invalid"),
        ('{"kvflow": {"grants": [1]}}', "ticket_invalid"),
        ('{"kv_transfer_params": null}', "ticket_invalid"),
        ('{"\\u001b": 1}', "ticket_invalid"),
        ('{"a":' * 100_000, "ticket_invalid"),
        (b"\xff\xfe", "ticket_invalid"),
        (b'{"\xff": 1}', "ticket_invalid"),
    ],
)
def test_what_is_no_ticket_ends_with_a_code(stdin, capsys, given, code):
    stdin(given)
    assert main(["ticket", "--json"]) == 1
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["code"] == code
    assert error["remedy"]
    assert printed.err.count("\n") == 1
    assert "\x1b" not in printed.err


def test_input_without_an_end_is_not_read_to_its_end(monkeypatch, capsys):
    class Endless(io.RawIOBase):
        taken = 0

        def read(self, size):
            self.taken += size
            return b"k" * size

    endless = Endless()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=endless))
    assert main(["ticket"]) == 1
    assert endless.taken == command.INPUT_BYTES_MAX + 1
    assert "ticket_invalid" in capsys.readouterr().err
