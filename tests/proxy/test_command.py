"""``kvflow proxy`` as a process, and its command line."""

import asyncio
import signal
import socket
import sys

import aiohttp
import msgspec
import pytest

from kvflow.tools.cli import build_parser, main
from kvflow.tools.proxy import ProxyConfig
from tests.helpers.loops import looped

from .upstream import DECODED, PREFILLED, open_upstream

PROGRAM = "import sys; from kvflow.tools.cli import main; sys.exit(main(sys.argv[1:]))"
PATIENCE_S = 60.0
SERVERS = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")


async def start(*arguments):
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        "proxy",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_says_where_it_listens_answers_and_stops_when_it_is_told_to(number, tmp_path):
    log = tmp_path / "proxy.jsonl"
    async with asyncio.timeout(PATIENCE_S), open_upstream(PREFILLED) as prefill, open_upstream(DECODED) as decode:
        servers = ("--prefill", f"{prefill.url}/", "--decode", decode.url)
        process = await start(*servers, "--listen", "127.0.0.1:0", "--log", str(log))
        line = (await process.stdout.readline()).decode()
        assert line.startswith("listening at http://127.0.0.1:")
        url = f"{line.split()[-1]}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json={"prompt": "a"}) as answer:
            assert answer.status == 200
        process.send_signal(number)
        assert await process.communicate() == (b"", b"")
        assert process.returncode == 0
    assert '"request.answered"' in log.read_text()


@pytest.mark.processes
async def test_it_ends_where_another_listens():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        async with asyncio.timeout(PATIENCE_S):
            process = await start(*SERVERS, "--listen", f"127.0.0.1:{other.getsockname()[1]}")
            _, said = await process.communicate()
    assert process.returncode == 1
    assert b"cannot listen on 127.0.0.1" in said


@looped(
    "arguments",
    [
        (),
        ("--prefill", "http://127.0.0.1:1"),
        ("--prefill", "127.0.0.1:8100", "--decode", "http://127.0.0.1:2"),
        ("--prefill", "http://127.0.0.1:1/v1", "--decode", "http://127.0.0.1:2"),
        ("--prefill", "http://127.0.0.1:99999", "--decode", "http://127.0.0.1:2"),
        ("--prefill", "http://", "--decode", "http://127.0.0.1:2"),
        (*SERVERS, "--listen", "8000"),
        (*SERVERS, "--prefill-timeout-s", "0"),
        (*SERVERS, "--prefill-timeout-s", "inf"),
        (*SERVERS, "--requests-max", "0"),
        (*SERVERS, "--body-bytes-max", "1.5"),
        (*SERVERS, "--body-rate-min", "many"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["proxy", *arguments])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_every_setting_is_a_flag_with_its_own_default():
    options = build_parser().parse_args(["proxy", *SERVERS])
    settings = {field.name: field.default for field in msgspec.structs.fields(ProxyConfig) if not field.required}
    del settings["keepers"]  # which ``--keeper`` gives one by one
    assert {name: getattr(options, name) for name in settings} == settings


def test_several_servers_are_taken_and_a_slash_is_not():
    options = build_parser().parse_args(["proxy", *SERVERS, "--decode", "https://[::1]:3/"])
    assert options.prefill == ["http://127.0.0.1:1"]
    assert options.decode == ["http://127.0.0.1:2", "https://[::1]:3"]


def test_a_keeper_is_a_server_with_its_control_endpoint(capsys):
    parse = build_parser().parse_args
    options = parse(["proxy", *SERVERS, "--keeper", "http://127.0.0.1:2/=tcp://decode-0:5600"])
    assert options.keeper == [("http://127.0.0.1:2", "tcp://decode-0:5600")]
    for wrong in ("http://127.0.0.1:2", "http://127.0.0.1:2=decode-0", "decode=tcp://decode-0:5600"):
        with pytest.raises(SystemExit):
            parse(["proxy", *SERVERS, "--keeper", wrong])
    assert "error: " in capsys.readouterr().err
    assert main(["proxy", *SERVERS, "--keeper", "http://127.0.0.1:3=tcp://decode-0:5600"]) == 2
    said = "--keeper names http://127.0.0.1:3, which is none of the --decode servers: http://127.0.0.1:2"
    assert said in capsys.readouterr().err
