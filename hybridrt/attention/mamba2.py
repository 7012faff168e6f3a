"""The Mamba-2 backend: hands a mixer the whole step at once, decode rows and prompt chunks alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridrt.attention.linear import DecodeSegment, ExtendSegment, ForwardMetadata, MambaAttnBackendBase
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.chunk_plan import ChunkPlan


@dataclass(frozen=True)
class Mamba2Metadata:
    """A step as `Mamba2Mixer.forward` takes it; `replay` says whether decode rows read the state ring."""

    decode: DecodeSegment | None
    extend: ExtendSegment | None
    replay: bool

    @classmethod
    def prepare_decode(cls, metadata: ForwardMetadata, replay: bool) -> "Mamba2Metadata":
        """A step of decode (or verify) rows alone."""
        return cls(metadata.decode, None, replay)

    @classmethod
    def prepare_mixed(cls, metadata: ForwardMetadata, replay: bool) -> "Mamba2Metadata":
        """A step with prompt chunks, with or without decode rows before them."""
        return cls(metadata.decode, metadata.extend, replay)

    @property
    def has_initial_states(self) -> torch.Tensor | None:
        """[n] bool of the extend rows: True where earlier chunks left a state."""
        return self.extend.has_initial_states if self.extend else None

    @property
    def chunks(self) -> ChunkPlan | None:
        return self.extend.plan if self.extend else None


class Mamba2AttnBackend(MambaAttnBackendBase):
    """Mamba-2 layers (Dao & Gu 2024). `forward` calls `mixer.forward`, because a mixer gates and norms its own way."""

    kind = "mamba2"

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._decays: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(  # type: ignore[override]  # a recurrent layer's inputs are keywords of its own
        self,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        projected: torch.Tensor,
        out: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Conv, scan and gate of one mixer.

        Args:
            layer: the Mamba2Mixer.
            projected: [T, z | x | B | C | dt] of the input projection; a strided view will do.
            out: [T, heads * head_dim], where the result may be left; what is returned counts.
        Returns:
            [T, heads * head_dim]: what the output projection reads.
        """
        metadata = self._metadata()
        replay = self.mamba_pool.spec.mode == "replay"
        prepare = Mamba2Metadata.prepare_mixed if metadata.extend else Mamba2Metadata.prepare_decode
        cache = self.layer_cache(layer.layer_id)
        mixed: torch.Tensor = layer.forward(projected, cache, prepare(metadata, replay), out)
        return mixed

    def _ring_decay(self, layer_ids: Sequence[int]) -> torch.Tensor:
        key = tuple(layer_ids)
        if key not in self._decays:  # not in __init__: weights may be loaded after the backend is built
            self._decays[key] = torch.stack([self.layers[layer_id].A for layer_id in layer_ids])
        return self._decays[key]
