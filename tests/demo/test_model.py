"""The model is deterministic, its tokens vary, and a wrong byte in the cache shows in them."""

import pytest
import torch

import kvflow
from kvflow.tools.demo.model import ModelShape, PagedKV, TinyModel

NUM_BLOCKS = 96
NUM_TOKENS = 16
TEXT = (b"kvflow moves the KV cache of a large language model from one worker to another. " * 8)[:600]


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the engines do
    yield TinyModel(ModelShape())
    torch.set_num_threads(threads)


class Request:
    """One request over a cache of its own, with blocks in an order of its own."""

    def __init__(self, model, prompt, *, layout="BHLNC", kv="content", seed=0):
        self.cache = kvflow.allocate(model.shape.specs(), num_blocks=NUM_BLOCKS, layout=layout, kv=kv)
        self.model, self.prompt = model, prompt
        self.pages = {name: PagedKV(view, model.shape.head_size) for name, view in self.cache.views.items()}
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed))
        rows = order.reshape(len(self.cache.groups), -1)
        self.tables = {name: row for row, group in zip(rows, self.cache.groups, strict=True) for name in group.layers}
        self.first = model.forward(list(prompt), 0, self.pages, self.tables)

    def decode(self):
        tokens = [self.first]
        while len(tokens) < NUM_TOKENS:
            position = len(self.prompt) + len(tokens) - 1
            tokens.append(self.model.forward(tokens[-1:], position, self.pages, self.tables))
        return tokens

    def corrupt(self, layer, block):
        """Shift the keys and values of one block of one layer by one channel."""
        for role in ("k", "v"):
            page = self.cache.component(layer, role)[self.tables[layer][block]]
            page.copy_(page.roll(1, -1))


def test_groups_are_one_of_each_kind(model):
    groups = kvflow.plan_groups(model.shape.specs())
    assert [(group.kind, len(group.layers)) for group in groups] == [("full", 8), ("sliding", 8)]


def test_tokens_depend_neither_on_layout_nor_on_block_ids(model):
    expected = Request(model, TEXT[:300]).decode()
    assert Request(model, TEXT[:300], layout="LBNHC", kv="split", seed=1).decode() == expected
    assert Request(TinyModel(ModelShape()), TEXT[:300], layout="BLHNC", seed=2).decode() == expected


def test_tokens_vary_within_and_between_prompts(model):
    outputs = [Request(model, prompt).decode() for prompt in (b"a", b"hello", TEXT[:40], TEXT[:300], TEXT[1:301])]
    assert min(len(set(tokens)) for tokens in outputs) >= NUM_TOKENS // 4
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)


@pytest.mark.parametrize("layer", ["layers.0", "layers.1", "layers.8", "layers.15"])
def test_a_corrupted_block_shows_in_the_tokens(model, layer):
    request = Request(model, TEXT[:300])
    expected = request.decode()
    request = Request(model, TEXT[:300])
    request.corrupt(layer, 300 // model.shape.block_size)
    assert request.decode() != expected


def test_a_block_behind_the_window_is_not_read(model):
    request = Request(model, TEXT[:300])
    expected = request.decode()
    request = Request(model, TEXT[:300])
    sliding = request.cache.groups[1]
    hidden = -(-300 // model.shape.block_size) - kvflow.window_blocks(sliding, 300)
    for layer in sliding.layers:
        request.tables[layer] = request.tables[layer].clone()
        request.tables[layer][:hidden] = NUM_BLOCKS + 1_000_000  # reading it would raise IndexError
    assert request.decode() == expected
