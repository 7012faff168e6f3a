"""Mixture of experts: routers, and stacked experts, shared ones included."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.base.errors import ConfigError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.quantization import Scheme
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.dense.moe import (
    ExpertShare,
    GroupedChoice,
    SoftmaxChoice,
    router_product,
    router_sigmoid_grouped,
    router_softmax,
)
from hybridrt.kernels.dense.norm_activation import sigmoid_mul
from hybridrt.kernels.dense.skinny_linear import Activation
from hybridrt.layers.expert_exchange import ExpertExchange
from hybridrt.layers.linear import MLP, ColumnLinear, DenseMethod, Segment, make_experts, register
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.summands import Arriving, Hidden, Summands, arriving, summed_later
from hybridrt.layers.weights import (
    Build,
    CheckpointTarget,
    ExpertPart,
    TensorPart,
    Transform,
    parameter,
    sharded,
    whole,
)

SHARED_WEIGHT = 0.5  # sigmoid(0), of shared experts without a gate


class Routing(NamedTuple):
    """What a router decides for T tokens.

    Attributes:
        weights, ids: float32 and int32 [T, k + shared experts], as in `fused_experts`.
        gate: [T, 1]; its sigmoid weighs shared experts that are apart from the others. None: they
            have weight 1, or none are apart.
    """

    weights: torch.Tensor
    ids: torch.Tensor
    gate: torch.Tensor | None = None


class SoftmaxRouter(nn.Module):
    """The top k of a softmax over experts (Qwen, Jamba).

    Args:
        shared_experts: experts for every token, after the routed ones. The sigmoid of one more row
            weighs them: SHARED_WEIGHT if the checkpoint has no such row.
        bias: added to the logits.
        exact: logits are float32 products. Else they are rounded to the model's dtype.
    """

    def __init__(
        self, name: str, hidden_size: int, num_experts: int, *, top_k: int, renormalize: bool, build: Build,
        shared_experts: int = 0, bias: bool = False, exact: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.num_experts, self.shared_experts = name, num_experts, shared_experts
        self.choice = SoftmaxChoice(top_k, renormalize, shared_experts)
        self.gates_apart = build.shared_apart and not shared_experts  # any shared experts
        # Eight rows for one gate align accesses to 16 bytes. Routers are kept plain.
        rows = num_experts + (8 if shared_experts or build.shared_apart else 0)
        self.method = None if exact else DenseMethod(rows, hidden_size, build)
        if self.method is None:
            self.weight = parameter(rows, hidden_size, dtype=torch.float32, device=build.device)
        else:
            self.weight = self.method.weight
        self.weight.data[num_experts:].zero_()
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = parameter(rows, dtype=build.dtype, device=build.device, dummy="zeros")
            self.bias.data.zero_()

    def forward(self, x: torch.Tensor, batch: ForwardBatch, share: ExpertShare | None = None) -> Routing:
        """[T, hidden] to the experts of each token. Padding has none. `share` as in `router_softmax`."""
        logits, count = self._logits(x), self.num_experts
        gate = logits[:, count] if self.shared_experts else None
        weights, ids = router_softmax(logits[:, :count], self.choice, gate, batch.padded_rows, share)
        return Routing(weights, ids, logits[:, count : count + 1] if self.gates_apart else None)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.method is not None:
            return self.method.apply(x, self.bias)
        logits = router_product(x, self.weight)
        return logits if self.bias is None else logits + self.bias

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        tensors = {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}
        return {
            f"{key}.{each}": whole(f"{self.name}.{each}", tensor.data[: self.num_experts])
            for each, tensor in tensors.items()
        }

    def shared_gate_targets(self, key: str) -> dict[str, CheckpointTarget]:
        row = self.weight.data[self.num_experts : self.num_experts + 1]
        return {f"{key}.weight": whole(f"{self.name}.shared_gate.weight", row)}


class SigmoidGroupRouter(nn.Module):
    """The top k of sigmoid scores within the best groups, with a correction bias (DeepSeek-V3,
    Nemotron-H).

    Args:
        corrected: False if the bias is zero and in no checkpoint.
        shared_experts: experts for every token, after the routed ones, with weight 1.
    """

    correction: torch.Tensor

    def __init__(
        self, name: str, hidden_size: int, num_experts: int, *, top_k: int, n_group: int, topk_group: int,
        renormalize: bool, scaling: float, build: Build, corrected: bool = True, shared_experts: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.corrected, self.shared_experts = name, corrected, shared_experts
        self.choice = GroupedChoice(top_k, n_group, topk_group, renormalize, scaling, shared_experts)
        self.weight = parameter(num_experts, hidden_size, dtype=torch.float32, device=build.device)
        if corrected:
            self.correction = parameter(num_experts, dtype=torch.float32, device=build.device, dummy="zeros")
        else:
            self.register_buffer("correction", torch.zeros(num_experts, dtype=torch.float32, device=build.device))

    def forward(self, x: torch.Tensor, batch: ForwardBatch, share: ExpertShare | None = None) -> Routing:
        logits = router_product(x, self.weight)
        return Routing(*router_sigmoid_grouped(logits, self.correction, self.choice, batch.padded_rows, share))

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        found = {f"{key}.weight": whole(f"{self.name}.weight", self.weight.data)}
        if self.corrected:
            found[f"{key}.e_score_correction_bias"] = whole(f"{self.name}.correction", self.correction.data)
        return found


class Experts(nn.Module):
    """E stacked experts of intermediate size I. Ranks cut I, or each holds E / ranks whole experts
    (`Build.expert_parallel`), over all replicas if there are several (`TPGroup.replicas`).

    Args:
        activation: "silu": SwiGLU, with the gate's rows before those of up. "relu2": squared ReLU.
        shared_size: intermediate size of an MLP for every token. It is stored as `num_shared`
            experts E, E + 1, ... of size I, the last one padded with zeros. `shared` is that MLP
            instead if ranks hold whole experts, or if the checkpoint is quantised and does not store
            it as it does an expert.
        scales: multipliers of the outputs of experts and of that MLP, applied to weights.
        limit, alpha: of SwiGLU, as in ExpertStack.
        bias: all matrices of routed experts have biases.

    Attributes:
        held: routed experts on this rank.
        share: the experts on this rank in all replicas, neighbours, which a router keeps; None: all.
        place: of this rank's experts among all, in units of `held`.
        exchange: sends tokens to other replicas; None without.
        cut: the ranks that cut the channels of each expert; one rank if they hold whole experts.
    """

    def __init__(
        self, name: str, num_experts: int, size: int, intermediate_size: int, *,
        activation: Literal["silu", "relu2"], build: Build, shared_size: int = 0,
        scales: tuple[float, float] = (1.0, 1.0), limit: float | None = None, alpha: float | None = None,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.num_experts, self.tp, self.scales = name, num_experts, build.tp, scales
        self.held, self.cut, self.size, self.build, self.place = num_experts, self.tp, size, build, 0
        self.share: ExpertShare | None = None
        self.exchange: ExpertExchange | None = None
        if build.expert_parallel:
            self._share_experts(build)
        self.limit, self.alpha = limit, alpha
        self.activation: Literal["silu", "relu2"] = activation
        self.matrices = ("gate", "up") if activation == "silu" else ("up",)
        self.local = self.cut.divide("channels of an expert", intermediate_size)
        self.shared_size, self.num_shared = shared_size, -(-shared_size // intermediate_size)
        self.shared: MLP | None = None
        if shared_size and not _is_in_stack(shared_size, intermediate_size, build, name, self.matrices):
            form: Activation = "silu_and_mul" if activation == "silu" else "relu2"
            scale = (1.0, scales[1])
            self.num_shared = 0
            self.shared = MLP(
                f"{name}.shared", size, shared_size, activation=form, scales=scale, limit=limit, build=build
            )
        count, rows = self.held + self.num_shared, self.local * len(self.matrices)
        self.method = make_experts(build, name, self.matrices, count, rows, size, self.local)
        register(self, self.method)
        self.biases: tuple[nn.Parameter, nn.Parameter | None] | None = None
        if bias:
            self.up_bias, self.down_bias = (
                parameter(count, n, dtype=build.dtype, device=build.device, dummy="zeros") for n in (rows, size)
            )
            for param in (self.up_bias, self.down_bias):
                param.data.zero_()
            # One rank adds that of down, so that the sum over ranks has it once.
            self.biases = (self.up_bias, self.down_bias if self.cut.rank == 0 else None)

    def _share_experts(self, build: Build) -> None:
        replicas = self.tp.replicas or TPGroup()
        self.held = divide_experts(self.num_experts, self.tp.size, replicas.size)
        load = torch.zeros(self.num_experts, dtype=torch.int64, device=build.device)
        self.share = ExpertShare(self.tp.rank * replicas.size * self.held, replicas.size * self.held, load)
        self.place, self.cut = self.tp.rank * replicas.size + replicas.rank, TPGroup()
        if replicas.size > 1:
            self.exchange = ExpertExchange(replicas, self.held)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[T, in] to this rank's summand of [T, in]."""
        if self.exchange is not None:
            return self.exchange(x, weights, ids, self._compute)
        return self._compute(x, weights, ids)

    def join(self, top_k: int) -> None:
        """Computes for other replicas in a layer for which this one has no tokens."""
        x = torch.empty(0, self.size, dtype=self.build.dtype, device=self.build.device)
        weights = torch.empty(0, top_k, dtype=torch.float32, device=x.device)
        self.forward(x, weights, weights.to(torch.int32))

    def _compute(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.method.apply(
            x, weights, ids, activation=self.activation, limit=self.limit, alpha=self.alpha, biases=self.biases
        )

    def _targets(
        self, key: str, name: str, first: int, count: int, up: Transform, down: Transform
    ) -> dict[str, CheckpointTarget]:
        """Maps `key`.{gate,up,down}_proj.weight to `count` experts from `first` on, as in the stack."""
        found: dict[str, CheckpointTarget] = {}
        total = self.local * self.cut.size
        for i, matrix in enumerate(self.matrices):
            part = ExpertPart(f"{name}.{matrix}", "up", first, count, i * self.local, self.local, up, total)
            found |= self.method.targets(f"{key}.{matrix}_proj", part)
        scale = self.scales[first >= self.held]
        part = ExpertPart(f"{name}.down", "down", first, count, 0, self.local, down, total, scale)
        return found | self.method.targets(f"{key}.down_proj", part)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        found: dict[str, CheckpointTarget] = {}
        for e in range(self.num_experts):
            up, down = (lambda t: self.cut.shard(t, 0)[None]), (lambda t: self.cut.shard(t, 1)[None])
            place = e % self.held
            targets = self._targets(f"{key}.{e}", f"{self.name}.{e}", place, 1, up, down)
            targets |= self._bias_targets(f"{key}.{e}", f"{self.name}.{e}", place)
            elsewhere = self.share is not None and e // self.held != self.place
            found |= dict.fromkeys(targets, ()) if elsewhere else targets
        return found

    def _bias_targets(self, key: str, name: str, e: int) -> dict[str, CheckpointTarget]:
        if self.biases is None:
            return {}
        found: dict[str, CheckpointTarget] = {}
        for i, matrix in enumerate(self.matrices):
            place = self.up_bias.data[e, i * self.local : (i + 1) * self.local]
            found[f"{key}.{matrix}_proj.bias"] = sharded(self.cut, f"{name}.{matrix}.bias", place)
        return found | {f"{key}.down_proj.bias": whole(f"{name}.down.bias", self.down_bias.data[e])}

    def shared_targets(self, key: str) -> dict[str, CheckpointTarget]:
        size = self.local * self.tp.size

        def by_expert(t: torch.Tensor) -> torch.Tensor:
            """Cuts [shared_size, in] to [num_shared, this rank's part of I, in]."""
            whole_rows = t.split([self.shared_size])[0]  # split raises for another number
            padded = F.pad(whole_rows, (0, 0, 0, self.num_shared * size - self.shared_size))
            return self.tp.shard(padded.unflatten(0, (self.num_shared, size)), 1)

        name, down = f"{self.name}.shared", (lambda t: by_expert(t.t()).transpose(1, 2))
        return self._targets(key, name, self.held, self.num_shared, by_expert, down)


def _is_in_stack(shared_size: int, size: int, build: Build, name: str, matrices: Sequence[str]) -> bool:
    """Whether a shared MLP is stored as experts of layer `name`. That of a quantised checkpoint is one if its sizes and
    its schemes are those of the routed ones, so that all have scales of the same rows and columns."""
    if not build.shared_apart:
        return True
    if build.expert_parallel or shared_size != size:
        return False
    shared = f"{name}.shared.{'_'.join(matrices)}"
    parts = {f"{shared}.{matrix}": matrix for matrix in matrices} | {f"{name}.shared.down.x": "down"}

    def alike(own: Scheme, routed: Scheme) -> bool:
        # Gate and up may be one matrix of the checkpoint: its blocks must not have rows of both. Each matrix has its
        # own order of inputs, if it has one. Methods from outside may store a layer otherwise than experts.
        whole = own.block[0] <= 1 or size % own.block[0] == 0
        return own == routed and whole and bool(own.layout) and not own.indexed

    return all(alike(build.scheme(part), build.scheme(f"{name}.0.{matrix}")) for part, matrix in parts.items())


def divide_experts(count: int, ranks: int, replicas: int) -> int:
    """How many of `count` experts a rank of a replica holds. ConfigError if they cannot be cut so."""
    if count % (ranks * replicas):
        text = f"tp_size={ranks}" if replicas == 1 else f"tp_size={ranks} and dp_size={replicas}"
        raise ConfigError(
            f"{count} experts cannot be cut into {ranks * replicas} equal shards for {text}; lower them to a divisor "
            f"of {count}"
        )
    return count // (ranks * replicas)


# Newer transformers stack all experts.
STACKS = {
    ".experts.gate_up_proj": ("gate", "up"),
    ".experts.up_proj": ("up",),
    ".experts.down_proj": ("down",),
}


def stacked_experts(key: str, matrices: Sequence[str], count: int) -> list[TensorPart]:
    """Parts of a tensor with these matrices of all experts, [E, rows of all matrices, in], by the
    keys of single experts: `key`.{expert}.{matrix}_proj.weight."""

    def part(e: int, i: int) -> Transform:
        def select(t: torch.Tensor) -> torch.Tensor:
            if t.shape[0] != count:
                raise RuntimeError(f"it holds {t.shape[0]} experts, config.json says {count}")
            return t[e].unflatten(0, (len(matrices), -1))[i]

        return select

    each = enumerate(matrices)
    return [(f"{key}.{e}.{name}_proj.weight", part(e, i)) for i, name in each for e in range(count)]


class Latent(nn.Module):
    """Projections to and from a smaller space for routed experts. Not sharded, because every rank
    needs the whole latent vector."""

    def __init__(self, name: str, hidden_size: int, size: int, *, bias: bool, build: Build) -> None:
        super().__init__()
        into, back = ([Segment("latent", outputs, bias=bias)] for outputs in (size, hidden_size))
        self.into = ColumnLinear(f"{name}.to_latent", hidden_size, into, build=build.uncut)
        self.back = ColumnLinear(f"{name}.from_latent", size, back, build=build.uncut)

    def targets(self, into_key: str, back_key: str) -> dict[str, CheckpointTarget]:
        return {
            **self.into.targets(into_key, ["latent"]),
            **self.back.targets(back_key, ["latent"]),
        }


def join_exchanges(model: nn.Module) -> None:
    """Computes the experts of other replicas' tokens in each layer of a step for which this replica
    has no tokens."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.experts.join(module.router.choice.top_k)


def experts_of(model: nn.Module) -> list[Experts]:
    """The experts of each layer, in order."""
    return [module for module in model.modules() if isinstance(module, Experts)]


class MoE(nn.Module):
    """A mixture of experts instead of an MLP.

    Args:
        shared: an MLP for every token, apart from the stack.
        latent: the space of routed experts; None: hidden states.
        keys: the checkpoint's, below the block's: router, experts, the shared MLP, its gate, and
            the latent projections.
    """

    def __init__(
        self, router: SoftmaxRouter | SigmoidGroupRouter, experts: Experts, *, keys: Mapping[str, str],
        shared: MLP | None = None, latent: Latent | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.router, self.experts, self.latent, self.keys = router, experts, latent, keys
        self.shared = experts.shared if shared is None else shared

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        by_pieces = self.latent is None and self.experts.exchange is None and batch.padded_rows is None
        if isinstance(x, Arriving) and by_pieces:
            pieces = (norm(*piece) for piece in x.with_rows(residual))
            return arriving(((self._of_rank(h, batch), rest) for h, rest in pieces), self.experts.tp)
        h, residual = norm(x, residual)
        if self.latent is not None:
            return self.output(h, batch), residual
        return summed_later(self._of_rank(h, batch), self.experts.tp), residual

    def output(self, h: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Of normed tokens, summed over all ranks: [T, hidden] to [T, hidden]."""
        all_reduce = self.experts.tp.all_reduce
        if self.latent is None:
            return all_reduce(self._of_rank(h, batch))
        # The projection needs whole sums.
        weights, ids, _ = self.router(h, batch, self.experts.share)
        routed = self.latent.back(all_reduce(self.experts(self.latent.into(h), weights, ids)))
        return routed if self.shared is None else routed + self.shared.summand(h, reduce=True)

    def _of_rank(self, h: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """What this rank adds to the sum."""
        weights, ids, gate = self.router(h, batch, self.experts.share)
        routed = self.experts(h, weights, ids)
        if self.shared is None:
            return routed
        shared = self.shared.summand(h)
        if gate is not None:
            shared = sigmoid_mul(shared, gate).to(h.dtype)
        return routed + shared

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        at = {what: f"{key}.{below}" for what, below in self.keys.items()}
        found = {**self.router.targets(at["router"]), **self.experts.targets(at["experts"])}
        if self.router.shared_experts:
            found |= self.experts.shared_targets(at["shared"])
        if isinstance(self.router, SoftmaxRouter) and "shared_gate" in at:
            found |= self.router.shared_gate_targets(at["shared_gate"])
        if self.shared is not None:
            found |= self.shared.targets(at["shared"])
        return found if self.latent is None else found | self.latent.targets(at["into"], at["back"])
