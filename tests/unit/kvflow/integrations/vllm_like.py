"""Objects shaped as vLLM's, for tests of what needs no vLLM. Their classes have vLLM's names, which is what counts."""

from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace

from kvflow import RankAddress, TicketMint
from kvflow.integrations.vllm.scheduler import transfer_groups

SECRET = "a secret of the tests, long enough"


class DType(str):
    """A dtype of torch's, as far as it is asked."""

    __slots__ = ()

    @property
    def itemsize(self):
        return {"bfloat16": 2, "float32": 4, "uint8": 1}[self.removeprefix("torch.")]


BFLOAT16, FLOAT32, UINT8 = DType("torch.bfloat16"), DType("torch.float32"), DType("torch.uint8")


@dataclass
class Attention:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 64
    head_size_v: int = 64
    dtype: DType = BFLOAT16
    kv_quant_mode: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(name="NONE"))
    page_size_padded: int | None = None
    tokens_per_state: int = 1
    num_heads: int = 2
    content: int = 0

    @property
    def state_content_size_bytes(self):
        return self.content or (self.head_size + self.head_size_v) * self.dtype.itemsize


FullAttentionSpec = make_dataclass("FullAttentionSpec", [], bases=(Attention,))
SlidingWindowSpec = make_dataclass("SlidingWindowSpec", [("sliding_window", int, 64)], bases=(Attention,))
ChunkedLocalAttentionSpec = make_dataclass(
    "ChunkedLocalAttentionSpec", [("attention_chunk_size", int, 64)], bases=(Attention,)
)
MLAAttentionSpec = make_dataclass("MLAAttentionSpec", [], bases=(Attention,))
SinkFullAttentionSpec = make_dataclass("SinkFullAttentionSpec", [], bases=(Attention,))


@dataclass
class MambaSpec:
    block_size: int = 1024
    shapes: tuple = ((640, 3), (8, 64, 64))
    dtypes: tuple = (BFLOAT16, FLOAT32)
    page_size_padded: int | None = None
    num_speculative_blocks: int = 0
    tp_replicated: bool = False


def group(spec, *layers):
    return SimpleNamespace(layer_names=list(layers) or ["layer"], kv_cache_spec=spec)


def cache_config(*groups):
    return SimpleNamespace(transfer_groups=groups, transfer_group_ids=tuple(range(len(groups))))


def groups_of(*specs):
    return transfer_groups(cache_config(*(group(spec, f"layer.{index}") for index, spec in enumerate(specs))))


def rank_address(rank=0):
    return RankAddress(rank=rank, incarnation="0" * 32, endpoint=f"tcp://127.0.0.1:{5000 + rank}", slots=8)


def new_mint(engine_id="prefill-0", ranks=1):
    return TicketMint(engine_id, [rank_address(rank) for rank in range(ranks)], cluster_secret=SECRET)


def new_ticket(num_tokens=48, block_ids=((3, 4, 9),), request_id="request-1"):
    return new_mint().offer(request_id, block_ids=block_ids, num_tokens=num_tokens)[0]
