"""Calls of single operations at the shapes of a model, with the bytes that they must move or the products they take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import gdn_of, kda_of, mamba1_of, mamba2_of
from benchmarks.library_cases import CHUNK_KDA, CHUNK_LIGHTNING, KDA_STEP, LIGHTNING_STEP, Args, beside
from hybridrt.base.model_config import ModelConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.dense.norm_activation import add_rms_norm, relu2, silu_and_mul
from hybridrt.kernels.dense.skinny_linear import MAX_TOKENS, Activation
from hybridrt.kinds.base import StateShape
from hybridrt.kinds.lightning import LightningConfig
from hybridrt.kinds.registry import can_replay, state_shape
from hybridrt.layers.linear import ColumnLinear, RowLinear, VocabParallelEmbedding
from hybridrt.layers.weights import Build
from hybridrt.models.registry import model_class
from tests.support import kernel_cases as kernels
from tests.support.kernel_cases import DecodeRows, Prompts

STATE_DTYPES = (torch.bfloat16, torch.float32)
ROTATED_BYTES = 1 << 28  # an operation's tensors differ until this much has gone by: several times any cache
MAX_COPIES, PAGE, RING = 16, 16, 16  # RING: columns of a state ring, on the average half full


@dataclass(frozen=True)
class Load:
    """What a call works on: `rows` requests with `tokens` new tokens each after `context` earlier ones.

    Attributes:
        long: so many of the rows have another context, of so many tokens. Attention alone heeds it.
        table: positions for which a page table has room at least.
    """

    rows: int
    tokens: int = 1
    context: int = 1024
    long: tuple[int, int] = (0, 0)
    table: int = 0

    def __str__(self) -> str:
        text = f"{self.rows}" if self.tokens == 1 else f"{self.rows}x{self.tokens}"
        return f"{text}({self.long[0]}x{self.long[1]})" if self.long[0] else text

    @property
    def lengths(self) -> list[int]:
        """Of the rows, with their new tokens."""
        longer = min(self.long[0], self.rows)
        return [self.long[1] + self.tokens] * longer + [self.context + self.tokens] * (self.rows - longer)


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
        make: makes the arguments of one call, on other memory each time.
        bytes: read and written at least, where bandwidth is the limit; flops: of the products, where they are.
        baselines: what else computes it, by name, from the same arguments.
        plain: what moves the same bytes of the same arguments and computes next to nothing.
    """

    op: str
    shape: str
    make: Callable[[], Args]
    bytes: float = 0.0
    flops: float = 0.0
    baselines: dict[str, Callable[[Args], object]] = field(default_factory=dict)
    plain: Callable[[Args], object] | None = None

    @property
    def copies(self) -> int:
        """Sets of arguments to go around."""
        return int(min(max(ROTATED_BYTES // max(self.bytes, 1.0), 2), MAX_COPIES)) if self.bytes else 1


Cases = Callable[[ModelConfig, Load, str], Iterator[Case]]
DECODE: dict[str, Cases] = {}  # by operation: cases of decode steps
PREFILL: dict[str, Cases] = {}


def decode_op(op: str) -> Callable[[Cases], Cases]:
    return lambda cases: DECODE.setdefault(op, cases)


def prefill_op(op: str) -> Callable[[Cases], Cases]:
    return lambda cases: PREFILL.setdefault(op, cases)


def linears(config: ModelConfig) -> dict[tuple[int, int, bool, Activation | None], str]:
    """(rows, columns, after a norm, activation) of the model's weights and the name of the first that has them."""
    model = model_class(config.architecture)(config, Build(TPGroup(), torch.bfloat16, torch.device("meta")), max_len=1)
    activations: dict[str, Activation] = {"gate_up": "silu_and_mul", "up": "relu2"}
    found: dict[tuple[int, int, bool, Activation | None], str] = {}
    for module in model.modules():
        if isinstance(module, (ColumnLinear, RowLinear)) or module is getattr(model, "head", None):
            assert isinstance(module, (ColumnLinear, RowLinear, VocabParallelEmbedding))
            rows, columns = module.weight.shape
            name = module.name.split(".")[-1]
            found.setdefault((rows, columns, isinstance(module, ColumnLinear), activations.get(name)), name)
    return found


def normal(device: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device).mul_(scale)


def int32(device: str, values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@decode_op("skinny_linear")
def skinny_linear(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    activate = {"silu_and_mul": silu_and_mul, "relu2": relu2, None: lambda y: y}
    if load.rows > MAX_TOKENS:
        return

    def cublas(args: Args) -> Tensor:
        h, norm = args["x"], args["norm_weight"]
        if norm is not None:
            h = add_rms_norm(h, args["residual"], norm, args["eps"])[0]
        return activate[args["activation"]](F.linear(h, args["weight"]))

    for (rows, columns, normed, activation), name in linears(config).items():

        def make(rows: int = rows, columns: int = columns, normed: bool = normed, act: Any = activation) -> Args:
            x, residual = normal(device, 2, load.rows, columns)
            before = {"norm_weight": torch.ones(columns, device=device), "residual": residual}
            weight = normal(device, rows, columns, scale=columns**-0.5)
            none = dict.fromkeys(before)
            return {"x": x, "weight": weight, "eps": 1e-5, "activation": act} | (before if normed else none)

        moved = 2 * (rows * columns + load.rows * (rows + columns * (3 if normed else 1)))
        yield Case("skinny_linear", f"{name} {rows}x{columns}", make, moved, baselines={"cuBLAS": cublas})


def paged(config: ModelConfig, load: Load, device: str) -> Args:
    """Caches with shuffled pages for `load`, the table and the rows."""
    attention, (pages, places) = config.attention, page_table(load, device)
    shape = (pages, PAGE, attention.num_kv_heads, attention.head_dim)
    caches = {"k_cache": normal(device, *shape), "v_cache": normal(device, *shape)}
    return caches | places | {"scale": attention.head_dim**-0.5}


def page_table(load: Load, device: str) -> tuple[int, Args]:
    """How many pages the rows need, and where their tokens are: the table, the rows and their lengths."""
    each = [-(-length // PAGE) for length in load.lengths]
    table = torch.zeros(load.rows + 1, max(max(each) * PAGE, load.table), dtype=torch.int32, device=device)
    pages = torch.randperm(sum(each), device=device) + 1
    for row, own in enumerate(pages.split(each), 1):
        table[row, : len(own) * PAGE] = (own[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()
    places = {"rows": int32(device, range(1, load.rows + 1)), "seq_lens": int32(device, load.lengths)}
    return len(pages) + 1, {"req_to_token": table} | places


@decode_op("attention_decode")
def attention_decode(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    a = config.attention
    if not config.full_attention_layer_ids or a.latent:  # see latent_cases.py
        return

    def make() -> Args:
        return paged(config, load, device) | {"q": normal(device, load.rows, 1, a.num_heads, a.head_dim)}

    moved = 4 * sum(load.lengths) * a.num_kv_heads * a.head_dim
    yield Case("attention_decode", f"{a.num_heads}/{a.num_kv_heads} heads of {a.head_dim}", make, moved)


@prefill_op("attention_extend")
def attention_extend(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    a, whole = config.attention, Load(load.rows, load.tokens, 0)
    if not config.full_attention_layer_ids or a.latent:  # see latent_cases.py
        return

    def make() -> Args:
        starts = [i * load.tokens for i in range(load.rows + 1)]
        lens = [load.tokens] * load.rows
        q = normal(device, starts[-1], a.num_heads, a.head_dim)
        lengths = {"query_lens": lens, "seq_lens_host": lens, "query_start_loc": int32(device, starts)}
        return paged(config, whole, device) | {"q": q} | lengths

    seen = load.rows * load.tokens * (load.tokens + 1) / 2
    heads = f"{a.num_heads}/{a.num_kv_heads} heads of {a.head_dim}"
    yield Case("attention_extend", heads, make, flops=4 * seen * a.num_heads * a.head_dim)


def rows_of(shape: StateShape, load: Load, dtype: torch.dtype) -> DecodeRows:
    """A decode step of as many rows as the load has, each with its own slot and ring."""
    sizes = {"batch": load.rows, "padding": 0, "num_slots": load.rows, "num_rows": load.rows}
    return DecodeRows(shape, 1, **sizes, state_dtype=dtype, position=load.context)


def prompts_of(shape: StateShape, chunk: int, load: Load) -> Prompts:
    """New prompts of equal length."""
    return Prompts(shape, chunk, [load.tokens] * load.rows, [0] * load.rows, num_slots=load.rows, spare=0)


@decode_op("selective_state_update")
def selective_state_update(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    if "mamba2" not in config.linear:
        return
    shape = state_shape(mamba2_of(config))
    for dtype in STATE_DTYPES:

        def make(dtype: torch.dtype = dtype) -> Args:
            with torch.device(device):
                return kernels.selective_state_update(config, rows_of(shape, load, dtype), "classic").args

        moved = 2 * load.rows * shape.temporal_numel * dtype.itemsize
        yield Case("selective_state_update", f"{_sizes(shape)} {str(dtype)[6:]}", make, moved)


@decode_op("mamba1_update")
def mamba1_update(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    if "mamba1" not in config.linear:
        return
    shape = state_shape(mamba1_of(config))
    for dtype in STATE_DTYPES:

        def make(dtype: torch.dtype = dtype) -> Args:
            with torch.device(device):
                return kernels.mamba1_update(config, rows_of(shape, load, dtype), "classic").args

        moved = 2 * load.rows * shape.temporal_numel * dtype.itemsize + 4 * shape.temporal_numel
        yield Case("mamba1_update", f"{_sizes(shape)} {str(dtype)[6:]}", make, moved)


@decode_op("short_conv_update")
def short_conv_update(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """Three projections in, one out, and of the ring K - 1 columns in and one out."""
    if "short_conv" not in config.linear:
        return
    shape = state_shape(config.linear["short_conv"])

    def make() -> Args:
        with torch.device(device):
            return kernels.short_conv_update(rows_of(shape, load, torch.float32)).args

    moved = load.rows * shape.conv_dim * (4 + shape.conv_kernel) * torch.bfloat16.itemsize
    yield Case("short_conv_update", str(shape.conv_dim), make, moved)


@decode_op("delta_rule_recurrent")
def delta_rule_recurrent(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    made = {"gdn": kernels.gdn_recurrent, "kda": kernels.kda_recurrent}
    for kind in (kind for kind in config.linear if kind in made):
        shape = state_shape(config.linear[kind])
        for dtype in STATE_DTYPES:

            def make(kind: str = kind, shape: StateShape = shape, dtype: torch.dtype = dtype) -> Args:
                with torch.device(device):
                    return made[kind](rows_of(shape, load, dtype), "classic").args

            moved = 2 * load.rows * shape.temporal_numel * dtype.itemsize
            name = "KDA " * (kind == "kda") + f"{_sizes(shape)} {str(dtype)[6:]}"
            made_with, peers = beside(make, device, KDA_STEP if kind == "kda" else {})
            yield Case("recurrent_gated_delta_rule", name, made_with, moved, baselines=peers)


@decode_op("mixer_decode")
def mixer_decode(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """Conv (if it has one), gates and state of a recurrent layer in one operation, in the state modes that it has."""
    made: dict[str, Callable[[DecodeRows, str], kernels.Case]] = {
        "mamba2": partial(kernels.mamba2_decode, config),
        "gdn": kernels.gdn_decode,
        "kda": kernels.kda_decode,
        "lightning": kernels.lightning_decode,
    }
    for kind in (kind for kind in config.linear if kind in made):
        shape = state_shape(config.linear[kind])
        heads, values, keys = shape.temporal
        ring = heads * values * 2 + shape.groups * keys * 2 + heads * (keys if kind == "kda" else 1) * 4
        # The conv ring is read whole, one column of it written; inputs come, outputs go.
        inputs = shape.conv_dim * (shape.conv_width(1) + 2) or 3 * heads * values
        around = 2 * (inputs + heads * (values + (keys if kind == "kda" else 0)))  # a gate for each channel of a key
        modes = ("classic", "replay") if can_replay([kind]) else ("classic",)
        for mode, dtype in ((mode, dtype) for mode in modes for dtype in STATE_DTYPES):

            def make(kind: str = kind, shape: StateShape = shape, mode: str = mode, dtype: Any = dtype) -> Args:
                with torch.device(device):
                    return made[kind](rows_of(shape, load, dtype), mode).args

            state = shape.temporal_numel * dtype.itemsize
            moved = load.rows * (around + (2 * state if mode == "classic" else state + ring * RING / 2))
            name = "KDA " * (kind == "kda") + f"{mode} {_sizes(shape)} {str(dtype)[6:]}"
            plain = lambda args: args["states"].neg_()  # noqa: E731
            op = {"lightning": "mamba2_decode", "kda": "gdn_decode"}.get(kind, f"{kind}_decode")
            classic = mode == "classic"
            made_with, peers = beside(make, device, LIGHTNING_STEP if kind == "lightning" and classic else {})
            yield Case(op, name, made_with, moved, baselines=peers, plain=plain if classic else None)


def _sizes(shape: StateShape) -> str:
    return "x".join(map(str, shape.temporal))


@prefill_op("mamba2_chunk_scan")
def mamba2_chunk_scan(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """Products of a chunk of Q tokens: C B^T of a group, half of it; scores x of a head, half of it; in and out of the
    state of a head."""
    if "mamba2" not in config.linear:
        return
    shape, chunk, total = state_shape(mamba2_of(config)), mamba2_of(config).chunk_size, load.rows * load.tokens
    heads, dim, columns = shape.temporal

    def make() -> Args:
        with torch.device(device):
            return kernels.mamba2_chunk_scan(config, prompts_of(shape, chunk, load)).args

    per_token = chunk * columns * shape.groups + chunk * dim * heads + 4 * dim * columns * heads
    yield Case("mamba2_chunk_scan", f"{_sizes(shape)}, {shape.groups} groups", make, flops=total * per_token)


@prefill_op("lightning_chunk_scan")
def lightning_chunk_scan(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """As `mamba2_chunk_scan`, with a group for each head."""
    if "lightning" not in config.linear:
        return
    linear, total = config.linear_of(LightningConfig), load.rows * load.tokens
    shape, chunk = state_shape(linear), linear.chunk_size
    heads, dim, columns = shape.temporal

    def make() -> Args:
        with torch.device(device):
            return kernels.lightning_chunk_scan(prompts_of(shape, chunk, load)).args

    per_token = heads * (chunk * (columns + dim) + 4 * dim * columns)
    made_with, peers = beside(make, device, CHUNK_LIGHTNING)
    yield Case("mamba2_chunk_scan", _sizes(shape), made_with, flops=total * per_token, baselines=peers)


@prefill_op("selective_scan")
def selective_scan(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """x, dt and z are read and y written; what limits it is an exponential for every state and token."""
    if "mamba1" not in config.linear:
        return
    shape, total = state_shape(mamba1_of(config)), load.rows * load.tokens

    def make() -> Args:
        with torch.device(device):
            return kernels.selective_scan(config, prompts_of(shape, mamba1_of(config).chunk_size, load)).args

    yield Case("selective_scan", _sizes(shape), make, 8 * total * shape.temporal[0])


@prefill_op("chunk_gated_delta_rule")
def chunk_gated_delta_rule(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """Products of a chunk of Q tokens and a head: k k^T and q k^T, the solved system times k and v, scores v: half of
    each; and k, q and the corrected v against the state."""
    if "gdn" not in config.linear:
        return
    shape, chunk, total = state_shape(gdn_of(config)), gdn_of(config).chunk_size, load.rows * load.tokens
    heads, values, keys = shape.temporal

    def make() -> Args:
        with torch.device(device):
            return kernels.chunk_gated_delta_rule(prompts_of(shape, chunk, load)).args

    per_token = heads * (chunk * (3 * keys + 2 * values) + 6 * keys * values)
    yield Case("chunk_gated_delta_rule", f"{_sizes(shape)}, {shape.groups} key heads", make, flops=total * per_token)


@prefill_op("chunk_kda")
def chunk_kda(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """Products of a chunk as in `chunk_gated_delta_rule`: that decays for each channel take several products of scaled
    keys for one counts as nothing."""
    if "kda" not in config.linear:
        return
    shape, total = state_shape(kda_of(config)), load.rows * load.tokens
    (heads, values, keys), chunk, bound = shape.temporal, kda_of(config).chunk_size, kda_of(config).lower_bound

    def make() -> Args:
        with torch.device(device):
            return kernels.chunk_kda(prompts_of(shape, chunk, load), bound).args

    per_token = heads * (chunk * (3 * keys + 2 * values) + 6 * keys * values)
    made_with, peers = beside(make, device, CHUNK_KDA)
    yield Case("chunk_gated_delta_rule", f"KDA {_sizes(shape)}", made_with, flops=total * per_token, baselines=peers)


@prefill_op("causal_conv1d_varlen")
def causal_conv1d_varlen(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    total = load.rows * load.tokens
    for shape in (shape for linear in config.linear.values() if (shape := state_shape(linear)).conv_dim):

        def make(shape: StateShape = shape) -> Args:
            with torch.device(device):
                return kernels.causal_conv1d_varlen(prompts_of(shape, 64, load)).args

        yield Case("causal_conv1d_varlen", f"{shape.conv_dim} channels", make, 4 * total * shape.conv_dim)


def elementwise(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """Norms and activations of a layer."""
    total, hidden = load.rows * load.tokens, config.hidden_size
    weight = torch.ones(hidden, device=device)

    def norm() -> Args:
        x, residual = normal(device, 2, total, hidden)
        return {"x": x, "residual": residual, "weight": weight, "eps": 1e-5}

    yield Case("add_rms_norm", f"{hidden}", norm, 8 * total * hidden)
    inner = getattr(config.hf, "intermediate_size", 0)
    if config.architecture.startswith("FalconH1"):
        make = lambda: {"x": normal(device, total, 2 * inner)}  # noqa: E731
        yield Case("silu_and_mul", f"{inner}", make, 6 * total * inner)
    if "mamba2" in config.linear:
        width = mamba2_of(config).intermediate_size
        group = width // mamba2_of(config).n_groups

        def gated() -> Args:
            x, gate = normal(device, 2, total, width)
            sizes = {"group_size": group, "norm_before_gate": False, "eps": 1e-5}
            return {"x": x, "gate": gate, "weight": torch.ones(width, device=device)} | sizes

        yield Case("gated_rms_norm", f"{width} in groups of {group}", gated, 6 * total * width)


DECODE["elementwise"] = PREFILL["elementwise"] = elementwise


@decode_op("sample")
def sample(config: ModelConfig, load: Load, device: str) -> Iterator[Case]:
    """A draw after top-k and top-p."""

    def make() -> Args:
        each = torch.ones(load.rows, device=device)
        return {
            "logits": normal(device, load.rows, config.vocab_size, scale=3.0), "temperature": each,
            "seeds": torch.arange(load.rows, device=device), "indices": torch.arange(load.rows, device=device),
            "top_k": int32(device, [50] * load.rows), "top_p": each * 0.9,
        }  # fmt: skip

    yield Case("sample", f"{config.vocab_size} tokens", make, 2 * load.rows * config.vocab_size)
