"""docs/extending.md: its package gives what plain torch gives, its code is of files that run, its groups are all."""

import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from hybridrt.base import plugins
from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import BackendError
from hybridrt.base.plugins import Plugins, load_object
from hybridrt.kinds.registry import linear_kind
from hybridrt.models.config.family_registry import family_of
from hybridrt.recurrent.backend import MambaAttnBackendBase
from tests.support.session import Session

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "examples" / "leaky"
TEXT = (ROOT / "docs" / "extending.md").read_text()
HIDDEN, MLP_SIZE, VOCAB, HEADS, LAYERS, EPS = 16, 24, 61, 2, 4, 1e-5
PROMPTS = [[7, 3, 50, 11, 2, 9, 9, 40, 21, 5, 33, 18, 27], [4], [60, 1] * 16, [13, 14, 15, 16, 17]]
COUNT = 16


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package as its pyproject.toml installs it."""
    groups = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
    points = {
        group: [SimpleNamespace(name=name, value=value) for name, value in each.items()]
        for group, each in groups.items()
    }
    monkeypatch.setattr(plugins, "entry_points", lambda group: points.get(group, []))
    monkeypatch.syspath_prepend(str(PACKAGE))
    linear_kind.cache_clear()
    family_of.cache_clear()
    yield
    linear_kind.cache_clear()
    family_of.cache_clear()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,),
    }  # fmt: skip
    for i in range(LAYERS):
        key = f"model.layers.{i}"
        shapes |= {f"{key}.norm{n}.weight": (HIDDEN,) for n in (1, 2)}
        parts = ("q", "k", "v", "o") if i % 2 else ("in", "out")
        shapes |= {f"{key}.mixer.{part}_proj.weight": (HIDDEN, HIDDEN) for part in parts}
        shapes |= {} if i % 2 else {f"{key}.mixer.decay": (HIDDEN,)}
        shapes |= {f"{key}.mlp.{part}_proj.weight": (MLP_SIZE, HIDDEN) for part in ("gate", "up")}
        shapes[f"{key}.mlp.down_proj.weight"] = (HIDDEN, MLP_SIZE)
    generator = torch.Generator().manual_seed(7)
    weights = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    path = tmp_path_factory.mktemp("leaky")
    save_file(weights, path / "model.safetensors")
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": MLP_SIZE, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 256}
    config = {"architectures": ["LeakyForCausalLM"], "model_type": "leaky", "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config | sizes | heads))
    return path, weights


def logits(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """The model over one whole sequence, in plain torch."""

    def product(x: Tensor, key: str) -> Tensor:
        return x @ weights[f"{key}.weight"].T

    x = weights["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        key = f"model.layers.{i}"
        h = F.rms_norm(x, (HIDDEN,), weights[f"{key}.norm1.weight"], EPS)
        if i % 2:
            q, k, v = (product(h, f"{key}.mixer.{n}_proj").view(-1, HEADS, HIDDEN // HEADS) for n in "qkv")
            heads = (t.transpose(0, 1) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1).flatten(1)
            x = x + product(mixed, f"{key}.mixer.o_proj")
        else:
            keep, state, sums = weights[f"{key}.mixer.decay"].sigmoid(), torch.zeros(HIDDEN), []
            for token in product(h, f"{key}.mixer.in_proj"):
                state = keep * state + (1 - keep) * token
                sums.append(state)
            x = x + product(torch.stack(sums), f"{key}.mixer.out_proj")
        h = F.rms_norm(x, (HIDDEN,), weights[f"{key}.norm2.weight"], EPS)
        gated = F.silu(product(h, f"{key}.mlp.gate_proj")) * product(h, f"{key}.mlp.up_proj")
        x = x + product(gated, f"{key}.mlp.down_proj")
    return product(F.rms_norm(x, (HIDDEN,), weights["model.norm.weight"], EPS), "lm_head")


@pytest.mark.parametrize(("chunk", "speculative"), [
    (8192, None), (5, None), (16, SpeculativeConfig("ngram", num_draft_tokens=3)),
    (16, SpeculativeConfig("ngram", num_draft_tokens=4, topk=2)),
])  # fmt: skip
def test_the_package_s_model_gives_what_plain_torch_gives(
    checkpoint: tuple, chunk: int, speculative: SpeculativeConfig | None
) -> None:
    path, weights = checkpoint
    samples = Session(path, speculative=speculative).run([(prompt, COUNT) for prompt in PROMPTS], chunk=chunk, gap=1)
    for sample in samples:
        expected = logits(weights, sample.prompt + sample.tokens)[len(sample.prompt) - 1 : -1]
        assert sample.tokens == expected.argmax(-1).tolist()
        torch.testing.assert_close(sample.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("said", [False, True])
def test_a_kind_that_reads_on_the_host_is_in_no_graph_of_prompts(
    checkpoint: tuple, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not said:
        monkeypatch.delattr(load_object(linear_kind("leaky").backend), "extend_in_graphs")
    backend = Session(checkpoint[0]).runner.backend
    assert not backend.captures_prompts
    with pytest.raises(BackendError, match="captures_prompts"):
        backend.prompt_graph_state(4)


def test_the_table_of_stable_things_has_the_signatures_that_a_kind_implements() -> None:
    for name in ("decode", "extend"):
        parameters = list(inspect.signature(getattr(MambaAttnBackendBase, name)).parameters.values())[1:]
        names = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert f"`{name}({', '.join(names)})`" in TEXT


def test_the_document_s_code_is_taken_from_files_that_tests_run() -> None:
    support, chat = ROOT / "tests" / "support", ROOT / "hybridrt" / "chat"
    files = [
        PACKAGE / "leaky.py",
        PACKAGE / "pyproject.toml",
        chat / "reasoning.py",
        chat / "tool_parsers" / "hermes.py",
        ROOT / "hybridrt" / "recurrent" / "gdn.py",
    ]
    files += [support / f"outside_{name}.py" for name in ("attention", "drafter", "method")]
    texts = [file.read_text() for file in files]
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 12
    for block in blocks:
        code = block.strip().removesuffix("...").strip()
        assert any(code in text for text in texts), f"in no file: {code[:80]}"


def test_the_table_of_stable_things_names_every_module_that_the_package_imports() -> None:
    stable = TEXT.partition("## What is stable")[2]
    imported = set(re.findall(r"^from (hybridrt\.[\w.]+) import", (PACKAGE / "leaky.py").read_text(), re.MULTILINE))
    named = imported - {"hybridrt.config", "hybridrt.kinds.base"}  # configurations, and fields of records
    assert named and {module for module in named if f"`{module}`" not in stable} == set()


def test_the_document_lists_every_group_of_entry_points() -> None:
    registries = {
        value.group for name, module in list(sys.modules.items()) if name.startswith("hybridrt")
        for value in vars(module).values() if isinstance(value, Plugins)
    }  # fmt: skip
    listed = set(re.findall(r"^\| `(hybridrt\.\w+)` \|", TEXT, re.MULTILINE))
    groups = {group for path in ("hybridrt", "models") for file in (ROOT / path).rglob("*.py")
              for group in re.findall(r"Plugins\(\s*\"(hybridrt\.\w+)\"", file.read_text())}  # fmt: skip
    assert listed == groups >= registries and len(groups) == 7
