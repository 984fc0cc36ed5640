"""``kvflow explain``: the counts are those of the planner, and every change does what is said of it."""

import asyncio
import json

import pytest

from kvflow.config import WorkerConfig
from kvflow.errors import SpecInvalid
from kvflow.planning.plan import plan_transfer
from kvflow.tools.cli import main
from kvflow.tools.cli.explain import Deployment, manifests_of, parse
from kvflow.worker.runtime import open_worker
from tests.helpers.loops import looped
from tests.unit.kvflow.worker.helpers import PATIENCE_S, SECRET, cache_of

MODEL = "llama-3.1-8b"


def explained(capsys, *arguments):
    assert main(["explain", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_equal_layouts_take_a_descriptor_for_each_layer_and_block(capsys):
    told = explained(capsys, MODEL, "--source", "layout=LBHNC", "--target", "layout=LBHNC", "--tokens", "1600")
    read = told["read"]
    assert (read["descriptors"], read["descriptors_consecutive"]) == (32 * 100, 32)
    assert read["nbytes"] == 1600 * 32 * 8 * 128 * 2 * 2
    assert read["link_s"] == read["nbytes"] * 8 / 100e9
    assert read["descriptors_s"] == pytest.approx(3200 * 3.6e-6)
    assert "layers" in told["groups"][0]["reason"]
    assert told["changes"][0]["fewer"] == 32
    assert told["changes"][0]["change"].startswith("both sides: layout=")


def test_the_change_that_is_named_has_the_count_that_is_named(capsys):
    sides = {"--source": "tp=2,layout=LBHNC", "--target": "tp=4,layout=BHLNC"}
    told = explained(capsys, MODEL, *(word for pair in sides.items() for word in pair))
    best = told["changes"][0]
    assert (best["change"], best["descriptors"]) == ("source: layout=BHLNC", 512)
    assert best["fewer"] == told["read"]["descriptors"] / 512
    again = explained(capsys, MODEL, "--source", "tp=2,layout=BHLNC", "--target", sides["--target"])
    assert again["read"]["descriptors"] == best["descriptors"]
    assert "No single change" not in json.dumps(again)


def test_a_plan_of_one_source_is_counted_as_the_planner_does(capsys):
    given = ["--source", "layout=BLHNC", "--target", "layout=LBHNC,block-size=32"]
    told = explained(capsys, "gemma-3-4b", *given, "--tokens", "64")
    (source,), (target,) = (manifests_of("gemma-3-4b", parse(text)) for text in given[1::2])
    plan = plan_transfer(source, target)
    assert told["read"]["descriptors"] == plan.descriptors([2] * len(target.groups))
    assert sum(group["descriptors"] for group in told["groups"]) == told["read"]["descriptors"]


def test_a_checkpoint_that_quantizes_its_cache_is_read_or_refused_by_name(capsys, tmp_path):
    keys = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    plain = 64 * 2 * 2 * 2 * 64 * 2
    for algo, nbytes in ((None, plain), ("FP8", plain // 2), ("NVFP4", plain // 2)):
        config = {**keys, "model_type": "llama", "quantization_config": {"kv_cache_quant_algo": algo}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if algo == "NVFP4":
            for command in ("explain", "layout"):
                assert main([command, str(tmp_path)]) == 2
                told = capsys.readouterr().err
                assert "kv_cache_quant_algo 'NVFP4'" in told
                assert "dtype= of kvflow explain" in told
        side = "dtype=uint8" if algo == "NVFP4" else "tp=1"
        told = explained(capsys, str(tmp_path), "--source", side, "--target", side, "--tokens", "64")
        assert told["read"]["nbytes"] == nbytes


def test_a_window_needs_its_last_blocks_only(capsys):
    short, long = (explained(capsys, "gemma-3-4b", "--tokens", tokens)["groups"] for tokens in ("4096", "40960"))
    grown = [after["nbytes"] / before["nbytes"] for before, after in zip(short, long, strict=True)]
    assert 10 in grown
    assert 1 in grown


def test_pipeline_stages_are_read_from_each(capsys):
    told = explained(capsys, MODEL, "--source", "tp=2,pp=2", "--target", "tp=1")
    assert told["read"]["source_ranks"] == 4
    assert {group["source"] for group in told["groups"]} == {0, 1, 2, 3}
    layers = [sum(len(group.layers) for group in each.groups) for each in manifests_of(MODEL, Deployment(pp=3))]
    assert layers == [11, 11, 10]


def test_the_text_says_why_and_which_change(capsys):
    assert main(["explain", MODEL, "--source", "layout=LBHNC", "--target", "layout=BHLNC"]) == 0
    printed = capsys.readouterr().out
    assert "why so many: group 0 of source rank 0 gives" in printed
    assert "merging stops at" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert "A single change makes it 10 times fewer, or better:" in printed


def test_what_cannot_be_better_says_so(capsys):
    assert main(["explain", MODEL, "--source", "layout=BHLNC", "--target", "layout=BHLNC", "--tokens", "1"]) == 0
    assert "No single change makes it fewer." in capsys.readouterr().out


@pytest.mark.usefixtures("cluster_member")
async def test_two_running_workers_are_explained(capsys):
    def config(engine_id):
        return WorkerConfig(engine_id=engine_id, cluster_secret=SECRET, transport="loopback")

    async with (
        asyncio.timeout(PATIENCE_S),
        open_worker(config("prefill-0"), cache_of()) as source,
        open_worker(config("decode-0"), cache_of()) as target,
    ):
        pair = ["--from", source.endpoint, "--from", target.endpoint, "--tokens", "8"]
        told = await asyncio.to_thread(explained, capsys, *pair)
        assert (told["source"], told["target"]) == (source.endpoint, target.endpoint)
        assert told["read"]["descriptors"] == 2
        assert await asyncio.to_thread(main, ["explain", *pair]) == 0
        assert "give the model and both deployments" in capsys.readouterr().out


@pytest.mark.usefixtures("cluster_member")
def test_a_worker_that_does_not_answer_is_a_failure(capsys):
    assert main(["explain", "--json", "--from", "127.0.0.1:1", "--from", "127.0.0.1:1"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "peer_lost"


def test_caches_that_do_not_fit_are_a_finding(capsys):
    assert main(["explain", "--json", MODEL, "--source", "dtype=float16", "--target", "dtype=bfloat16"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "layout_mismatch"
    assert "dtype" in error["message"]


@looped(
    "text",
    ["", "tp", "tp=", "tp=x", "tp=0", "pp=-1", "tp=1000", "layout=ABC", "kv=x", "size=3", "block-size=x", "tp=2;pp=1"],
)
def test_what_is_no_deployment_is_refused_with_a_remedy(capsys, text):
    with pytest.raises(SpecInvalid) as caught:
        parse(text)
    assert caught.value.remedy
    assert main(["explain", MODEL, "--source", text]) == 2


@looped("arguments", [[], [MODEL, "--from", "a:1", "--from", "b:1"], ["--from", "a:1"]])
def test_a_model_or_two_workers_must_be_given(capsys, arguments):
    assert main(["explain", *arguments]) == 2
    assert "give a model, or --from twice" in capsys.readouterr().err


def test_a_deployment_is_written_as_it_is_read():
    text = "tp=2,layout=LBHNC,block-size=32"
    assert str(parse(text)) == text
    assert str(Deployment()) == "tp=1"
