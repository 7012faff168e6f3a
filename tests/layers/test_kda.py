"""The Kimi Delta Attention mixer against transformers' layers, whole and shared among ranks."""

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridrt.base.errors import ConfigError
from hybridrt.collectives.groups import TPGroup
from hybridrt.kinds.kda import KDAConfig
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build
from hybridrt.recurrent.kda import KDAMixer
from tests import test_kinds
from tests.support.by_hand import Row

HEADS, DIM, TOKENS, CPU = 4, 6, 21, torch.device("cpu")
EPS = 1e-5
KIMI, LING = "kimi_linear", "bailing_hybrid"
FORMS = {
    "kimi": (KIMI, KDAConfig(HEADS, DIM, 4, chunk_size=8, gate_rank=DIM)),
    "ling": (LING, KDAConfig(HEADS, DIM, 4, chunk_size=8, lower_bound=-5.0)),
    "ling without a safe gate": (LING, KDAConfig(HEADS, DIM, 4, chunk_size=8)),
}


class OneRank:
    """The communicator of a rank whose summands the test adds itself."""

    overlap_from = inf

    def sums_with_norm(self, x: Tensor) -> bool:
        return False

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


class Whole(nn.Module):
    """A mixer after its norm; the first rank adds what comes in."""

    kind = "kda"

    def __init__(self, config: KDAConfig, tp: TPGroup) -> None:
        super().__init__()
        self.norm = RMSNorm("norm", test_kinds.HIDDEN, EPS, device=CPU)
        self.norm.weight.data.fill_(1.0)
        build = Build(tp, torch.float32, CPU)
        self.mixer = KDAMixer("m", config, 0, test_kinds.HIDDEN, EPS, build=build)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        added, residual = self.mixer(self.norm, x.clone(), None, batch)
        return added if residual is None or self.mixer.tp.rank else added + residual


def theirs(model: str, config: KDAConfig) -> nn.Module:
    """transformers' layer with random weights."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    name = "KimiLinearDeltaAttention" if model == KIMI else "BailingHybridDeltaAttention"
    hf = SimpleNamespace(
        hidden_size=test_kinds.HIDDEN, linear_num_heads=HEADS, linear_head_dim=DIM, linear_conv_kernel_dim=4,
        hidden_act="silu", rms_norm_eps=EPS, layer_types=["linear_attention"], num_attention_heads=HEADS,
        kda_safe_gate=config.lower_bound is not None, kda_lower_bound=config.lower_bound,
    )  # fmt: skip
    layer: nn.Module = getattr(module, name)(hf, 0)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_(0.0, 0.5, generator=generator)
    return layer


def checkpoint(layer: nn.Module) -> dict[str, Tensor]:
    """Its tensors by the names of the checkpoints."""
    found = {name.removeprefix("forget_gate."): t for name, t in layer.state_dict().items()}
    convs = found.pop("conv1d.weight").chunk(3)
    return found | {f"{part}_conv1d.weight": conv for part, conv in zip("qkv", convs)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_transformers(form: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in two chunks, then decode; each tensor of the checkpoint is taken once."""
    model, config = FORMS[form]
    layer = theirs(model, config)
    monkeypatch.setitem(test_kinds.CONFIGS, "kda", config)
    x = torch.randn(TOKENS, test_kinds.HIDDEN, generator=torch.Generator().manual_seed(1))
    outputs = []
    for rank in range(ranks):
        tp = TPGroup(rank, ranks, OneRank() if ranks > 1 else None)  # type: ignore[arg-type]
        whole: Any = Whole(config, tp)
        targets = whole.mixer.targets("attn")
        tensors = {f"attn.{name}": t for name, t in checkpoint(layer).items()}
        assert targets.keys() == tensors.keys()
        whole.mixer.conv_weight.data.fill_(torch.nan)
        for key, target in targets.items():
            for piece in target:
                piece.fill(key, tensors[key])
        stack = test_kinds.Stack([whole], x, tp=tp)
        stack.admit(1)
        parts = [stack.extend(Row(1, 0, range(11))), stack.extend(Row(1, 11, range(11, 18)))]
        parts += [stack.decode(Row(1, i, [i])) for i in range(18, TOKENS)]
        outputs.append(torch.cat(parts))
    with torch.no_grad():
        normed = whole.norm(x)[0]
        wanted = x + layer(normed[None])[0]
    torch.testing.assert_close(sum(outputs), wanted, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"gate_rank": 0}, {"lower_bound": 0.0}, {"lower_bound": 2.0}, {"head_dim": 0}):
        with pytest.raises(ConfigError, match=f"kda: {next(iter(wrong))}"):
            KDAConfig(**{"num_heads": 4, "head_dim": 6, "conv_kernel": 4} | wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="4 KDA heads cannot be split over tp_size=8"):
        KDAMixer("m", KDAConfig(4, 6, 4), 0, 12, EPS, build=Build(TPGroup(0, 8), torch.float32, CPU))
