"""Objects shaped as vLLM's, for tests of what needs no vLLM. Their classes have vLLM's names, which is what counts."""

import functools
import threading
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace

from handshake import ClusterSecurity
from kvflow import FullAttention, RankAddress, TicketKey, TicketMint, WorkerConfig, allocate
from kvflow.contents import Contents
from kvflow.integrations.vllm.messages import empty_counters
from kvflow.integrations.vllm.scheduler import SchedulerSide, transfer_groups
from kvflow.integrations.vllm.settings import EngineFacts, read_settings
from tests.helpers.waiting import wait_until

NUM_BLOCKS = 64
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
ABORTED = SimpleNamespace(name="FINISHED_ABORTED")
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

    @property
    def unpadded_page_size_bytes(self):
        return self.num_heads * (self.block_size // self.tokens_per_state) * self.state_content_size_bytes


FullAttentionSpec = make_dataclass("FullAttentionSpec", [], bases=(Attention,))
SlidingWindowSpec = make_dataclass("SlidingWindowSpec", [("sliding_window", int, 64)], bases=(Attention,))
ChunkedLocalAttentionSpec = make_dataclass(
    "ChunkedLocalAttentionSpec", [("attention_chunk_size", int, 64)], bases=(Attention,)
)
LATENT = [("model_version", str, ""), ("max_tp_shards", int, None)]
MLAAttentionSpec = make_dataclass("MLAAttentionSpec", LATENT, bases=(Attention,))
SlidingWindowMLASpec = make_dataclass(
    "SlidingWindowMLASpec", [*LATENT, ("sliding_window", int, 128)], bases=(Attention,)
)
CircularBufferSpec = make_dataclass("CircularBufferSpec", [], bases=(Attention,))
SinkFullAttentionSpec = make_dataclass("SinkFullAttentionSpec", [], bases=(Attention,))


@dataclass
class MambaSpec:
    block_size: int = 1024
    shapes: tuple = ((640, 3), (8, 64, 64))
    dtypes: tuple = (BFLOAT16, FLOAT32)
    page_size_padded: int | None = None
    num_speculative_blocks: int = 0
    tp_replicated: bool = False
    mamba_type: str = "MAMBA2"


def group(spec, *layers):
    return SimpleNamespace(layer_names=list(layers) or ["layer"], kv_cache_spec=spec)


def cache_config(*groups, **named):
    known = {"hisparse_host_num_blocks": None, "needs_kv_cache_zeroing": False, "enable_prefix_caching": True}
    ids = tuple(range(len(groups)))
    return SimpleNamespace(transfer_groups=groups, transfer_group_ids=ids, num_blocks=NUM_BLOCKS, **known | named)


def groups_of(*specs):
    return transfer_groups(cache_config(*(group(spec, f"layer.{index}") for index, spec in enumerate(specs))))


def rank_address(rank=0):
    return RankAddress(rank=rank, incarnation="0" * 32, endpoint=f"tcp://127.0.0.1:{5000 + rank}", slots=8)


def new_key(secret=SECRET):
    return TicketKey.of(WorkerConfig(engine_id="engine", cluster_secret=secret))


def extra_keys(request, first, end, media):
    """Keys in the form of vLLM 0.32; what it really does is shown by ``tests/vllm/test_contents.py``."""
    keys = [("lora", request.lora, f"/somewhere/{id(request)}/{request.lora}")] if request.lora else []
    keys += [("mm", name, at - first) for at, name in request.media if first <= at < end]
    keys += [("cache_salt", request.cache_salt)] if request.cache_salt and not first else []
    return tuple(keys) or None, media


def new_request(params, prompt=48, request_id="r", skips=False, **named):
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    all_tokens = tokens.copy()
    known = {"lora": "", "media": (), "cache_salt": None, "abort_immediately": False, "max_tokens": 16}
    known |= {"pooling_params": None}
    return SimpleNamespace(
        request_id=request_id,
        kv_transfer_params=params,
        prompt_token_ids=tokens,
        prompt_embeds=None,
        _all_token_ids=all_tokens,
        all_token_ids=all_tokens,
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=len(tokens),
        num_in_flight_tokens=0,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        get_skip_reading_prefix_cache=lambda: skips,
        **(known | named),
    )


def offered(producer, request_id="r", listed=([1, 2, 3],), **named):
    """Have a prompt arrive, be computed and end; return whether its blocks are kept, and its parameters."""
    request = new_request(OFFER, request_id=request_id, **named)
    producer.on_new_request(request)
    request.num_computed_tokens = request.num_prompt_tokens
    return producer.on_finished(request, listed)


def scheduled(consumer, params, request_id="r", **named):
    """Have a request arrive and be scheduled to load its prompt; return it."""
    request = new_request(params, request_id=request_id, **named)
    consumer.on_new_request(request)
    num_tokens, is_load = consumer.matched(request, 0)
    assert is_load
    consumer.allocated(request, blocks_of([1, 2, 3]), num_tokens)
    return request


def small_cache():
    """Return a cache of one layer, with eight blocks of four tokens."""
    return allocate({"a": FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="float16")}, num_blocks=8)


TOKENS_MAX = 1024
PATIENCE_S = 60.0
SIDES = []  # to be closed at the end of a test


def side(
    *specs,
    role="kv_both",
    met=True,
    lookahead=1,
    secret=SECRET,
    tokens_max=TOKENS_MAX,
    engine=None,
    second_runner=False,
    **extra,
):
    settings = read_settings({"cluster_secret": secret, **extra}, EngineFacts(engine_id="engine", kv_role=role))
    config = cache_config(*(group(spec, f"layer.{index}") for index, spec in enumerate(specs)), **(engine or {}))
    retention = (engine or {}).get("prefix_cache_retention_interval")
    caching = {"enable_prefix_caching": config.enable_prefix_caching, "prefix_cache_retention_interval": retention}
    engine = SimpleNamespace(
        num_prefill_lookahead_tokens=lookahead,
        model_config=SimpleNamespace(max_model_len=tokens_max),
        cache_config=SimpleNamespace(**caching),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        use_v2_model_runner=second_runner,
    )
    found = SchedulerSide(settings, engine, config, extra_keys)
    SIDES.append(found)
    if met:
        found.meet_ranks([rank_address()])
    return found


def await_jobs(found):
    """Wait until a side's other thread has done what it was told."""
    done = threading.Event()
    found.offering.submit(done.set)
    assert done.wait(PATIENCE_S)


def step_output(counts, new=None, known=None, preempted=()):
    """What vLLM's scheduler says of a step.

    Args:
        counts: request -> tokens that the step computes.
        new, known: request -> tokens that were computed before, and a list of blocks for each group: all of them of a
            new request, and those that are allocated for this step of one that is known (or None).
    """
    new, known = new or {}, known or {}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        preempted_req_ids=set(preempted) or None,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=tuple(blocks))
            for name, (computed, blocks) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(known),
            num_computed_tokens=[computed for computed, _ in known.values()],
            new_block_ids=[blocks for _, blocks in known.values()],
        ),
    )


def blocks_of(*listed):
    """Blocks as vLLM's manager shows them; none is in the prefix cache."""
    named = [[SimpleNamespace(block_id=block, block_hash=None) for block in ids] for ids in listed]
    return SimpleNamespace(blocks=named)


def new_mint(engine_id="prefill-0", ranks=1, secret=SECRET, block_sizes=(16,)):
    addresses = [rank_address(rank) for rank in range(ranks)]
    return TicketMint(engine_id, addresses, cluster_secret=secret, block_sizes=block_sizes)


class LikePool:
    """vLLM's block pool: free blocks in the order in which they are handed out, and what is cached."""

    def __init__(self, num_blocks=NUM_BLOCKS):
        named = {"ref_cnt": 0, "block_hash": None, "is_null": False}
        self.blocks = [SimpleNamespace(block_id=at, **named) for at in range(num_blocks)]
        self._free = self.blocks[1:]
        self._watchers = {}
        self._filled = 0

    def touch(self, blocks):
        for block in blocks:
            if not block.ref_cnt:
                self._free.remove(block)
            block.ref_cnt += 1

    def unpin_blocks(self, blocks, on_reuse):
        for block in blocks:
            self._watchers[block.block_id] = on_reuse
        self.free_blocks(blocks)

    def get_num_free_blocks(self):
        return len(self._free)

    def get_new_blocks(self, number):
        """Hand blocks out; who watches one is told first."""
        taken, self._free = self._free[:number], self._free[number:]
        self._tell(taken)
        for block in taken:
            block.ref_cnt, block.block_hash = 1, None
        return taken

    def free_blocks(self, blocks):
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free.insert(0 if block.block_hash is None else len(self._free), block)

    def reset_prefix_cache(self):
        """Forget what is cached."""
        self._tell([self.blocks[number] for number in list(self._watchers)])
        for block in self.blocks:
            block.block_hash = None
        return True

    def hash(self, block):
        """Note that a block is filled."""
        self._filled += 1
        block.block_hash = b"of its tokens %d" % self._filled

    def cached(self, content):
        """Return a block that is cached with this content, or None."""
        return next((each for each in self.blocks if each.block_hash == content), None)

    def order(self):
        """Return the ids of the free blocks, the first to be handed out first."""
        return [block.block_id for block in self._free]

    def _tell(self, blocks):
        for block in blocks:
            if (watcher := self._watchers.pop(block.block_id, None)) is not None:
                watcher(block)


class Device:
    """A stand-in for a device and the stream of its work, which it does as far as a test says."""

    def __init__(self):
        self.given = 0
        self.done = 0
        self.asked = threading.Semaphore(0)  # released each time that somebody asks

    def mark(self):
        self.given += 1
        return functools.partial(self._is_done, self.given)

    def _is_done(self, given):
        self.asked.release()
        return self.done >= given


def new_contents(secret=SECRET, accepted=None):
    security = ClusterSecurity.from_secret(secret)
    key = TicketKey(security if accepted is None else security.accepting(accepted))
    return Contents(key.content_keys(), extra_keys)


def new_ticket(num_tokens=48, block_ids=((3, 4, 9),), request_id="request-1", *, prompt=None, **named):
    """A ticket for the first tokens of a prompt, by default of ``new_request``'s."""
    request = new_request(None, num_tokens if prompt is None else prompt)
    sizes = named.setdefault("block_sizes", (16,) * len(block_ids))
    digests = new_contents(named.get("secret", SECRET)).digests(request, block_ids, sizes, num_tokens)
    mint = new_mint(**named)
    offer = {"block_ids": block_ids, "num_tokens": num_tokens, "digests": digests}
    return mint.offer(request_id, **offer, chained=True)[0]


def counted(counting, name):
    """Take the counters of a side or of a ``Tally``; return the counts of this name."""
    take = getattr(counting, "take_counters", None) or counting.take
    return (take() or empty_counters())[name]


def matched(found, request, computed=0):
    """Ask as vLLM does, step by step, until the number of tokens is known."""
    answers = []
    wait_until(lambda: answers.append(found.matched(request, computed)) or answers[-1] != (None, False))
    return answers[-1]
