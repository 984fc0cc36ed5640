"""``kvflow layout`` prints the figures of a cache, and refuses what it cannot describe."""

import json
import re
import subprocess
import sys

import pytest

from kvflow.models import names
from kvflow.tools.cli import main
from tests.helpers.loops import looped


def shown(capsys, *arguments):
    """Return the printed report, decoded."""
    assert main(["layout", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@looped("model", names())
@looped("layout", ["auto", "BLHNC"])
def test_every_bundled_model_is_shown(capsys, model, layout):
    report = shown(capsys, model, "--layout", layout, "--tp", "2", "--rank", "1")
    assert report["nbytes"] == 1024 * report["bytes_per_block"]
    for group in report["groups"]:
        assert group["content_bytes"] + group["padding_bytes"] == report["bytes_per_block"]
        assert group["padding_bytes"] >= 0


def test_figures_of_gpt_oss_agree_with_the_published_packed_allocation(capsys):
    report = shown(capsys, "gpt-oss-20b", "--cross-layers")
    assert (report["layout"], report["tensors"], report["positions"]) == ("BLHNC", 1, 12)
    assert report["bytes_per_block"] == 393216
    assert [group["page_bytes"] for group in report["groups"]] == [[32768], [32768]]
    assert [group["layer_stride"] for group in report["groups"]] == [32768, 32768]


def test_blocks_of_a_model_with_states_are_enlarged(capsys):
    report = shown(capsys, "qwen3-next")
    assert report["enlarged"]
    assert {group["block_size"] for group in report["groups"]} == {1056}
    assert not shown(capsys, "llama-3.1-8b")["enlarged"]


@looped(
    "arguments, field, value",
    [
        (("--blocks", "7"), "num_blocks", 7),
        (("--kv", "split"), "kv", "split"),
        (("--block-size", "32"), "bytes_per_block", 2 * 12 * 2 * 16 * 12 * 64 * 2),
        (("--layout", "BLNHC"), "layout", "BLNHC"),
    ],
)
def test_options_reach_the_plan(capsys, arguments, field, value):
    assert shown(capsys, "gpt-2", *arguments)[field] == value


def test_a_config_may_come_from_a_path(capsys, tmp_path):
    config = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_path = shown(capsys, str(tmp_path))
    assert by_path["model"] == tmp_path.name
    assert by_path["layers"] == shown(capsys, "gpt-2")["layers"]


@looped(
    "arguments, said",
    [
        (("gpt-5",), "'gpt-5' is neither a bundled model nor a file or folder"),
        (("gpt-2", "--tp", "3", "--rank", "5"), "--rank is 5, but --tp is 3 [spec_invalid] Give --rank from 0 to 2"),
        (("deepseek-v4-style", "--block-size", "16"), "multiple of 128"),
        (("deepseek-v4-style", "--layout", "LBNHC"), "Use a layout with blocks outermost"),
        ((".",), "config.json cannot be read"),
        (("gpt-oss-20b", "--dcp", "2"), "--dcp is 2, which does not divide --tp 1"),
        (("gpt-oss-20b", "--tp", "2", "--dcp", "2", "--dcp-interleave", "3"), "dcp_interleave is 3"),
    ],
)
def test_bad_input_is_told_and_ends_with_status_2(capsys, arguments, said):
    assert main(["layout", *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.startswith("kvflow layout: ")
    assert printed.out == ""


@looped("arguments", [("--layout", "NHD"), ("--blocks", "0"), ("--blocks", "many")])
def test_a_wrong_flag_ends_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["layout", "gpt-2", *arguments])
    assert "usage: kvflow layout" in capsys.readouterr().err


def test_neither_torch_nor_nixl_is_loaded():
    program = "import sys; from kvflow.tools.cli import main; main(['layout', 'gpt-2']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = done.stdout.splitlines()[-1].split()
    assert "kvflow.layout.describe" in loaded
    assert not {"torch", "nixl"} & set(loaded)


def test_ranks_that_divide_tokens_are_shown(capsys):
    report = shown(capsys, "gpt-oss-20b", "--tp", "16", "--rank", "3", "--dcp", "2", "--dcp-interleave", "16")
    assert (report["dcp_rank"], report["dcp_size"], report["dcp_interleave"]) == (1, 2, 16)
    tokens = {group["kind"]: (group["block_size"], group["block_tokens"]) for group in report["groups"]}
    assert tokens == {"full": (16, 32), "sliding": (16, 16)}
    assert main(["layout", "gpt-oss-20b", "--tp", "16", "--rank", "3", "--dcp", "2"]) == 0
    assert re.search(r"tokens +of groups \d divided: rank 1 of 2, 1 at a time", capsys.readouterr().out)


@looped("flag", ["--tp", "--dcp", "--dcp-interleave", "--block-size"])
def test_a_number_below_its_bound_is_refused_with_its_flag(capsys, flag):
    with pytest.raises(SystemExit) as ended:
        main(["layout", "gpt-oss-20b", flag, "0"])
    assert ended.value.code == 2
    assert f"argument {flag}: 0 is below 1" in capsys.readouterr().err


def test_a_name_of_the_hub_is_answered_with_the_closest_bundled_model(capsys):
    assert main(["layout", "meta-llama/Llama-3.1-8B"]) == 2
    message = capsys.readouterr().err
    assert "download its config.json and give the path. Did you mean llama-3.1-8b? Known are deepseek-v3, " in message


def test_a_guess_is_made_on_request_only_and_said(capsys, tmp_path):
    path = tmp_path / "config.json"
    plain = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    path.write_text(json.dumps({"model_type": "novel", **plain}))
    assert main(["layout", str(path)]) == 2
    assert "--guess" in capsys.readouterr().err
    assert main(["layout", str(path), "--guess"]) == 0
    assert "guessed: 2 full of 2 KV heads of 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "alike", "divided"), [("LBNHC", 32, 512), ("LBHNC", 32, 32), ("BLHNC", 1, 32), ("BHLNC", 1, 1)]
)
def test_descriptors_of_an_equal_engine_and_of_twice_the_ranks(capsys, layout, alike, divided):
    arguments = ("llama-3.1-8b", "--tp", "4", "--layout", layout)
    assert shown(capsys, *arguments)["peer"] == {"tp_size": 4, "descriptors": alike}
    assert shown(capsys, *arguments, "--peer-tp", "8")["peer"] == {"tp_size": 8, "descriptors": divided}


def test_descriptors_of_an_engine_that_reads_several_ranks(capsys):
    arguments = ("deepseek-v3", "--tp", "4", "--dcp", "4", "--peer-tp", "1")
    # Each rank has a quarter of the tokens of each of 61 layers.
    assert shown(capsys, *arguments, "--dcp-interleave", "16")["peer"] == {"tp_size": 1, "descriptors": 61}
