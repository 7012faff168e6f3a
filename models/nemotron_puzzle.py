"""Nemotron-H Puzzle: Nemotron-H after a search that gave each block sizes of its own (NVIDIA 2026)."""

from hybridrt.models.nemotron_h import NemotronHForCausalLM


class NemotronHPuzzleForCausalLM(NemotronHForCausalLM):
    """Nemotron 3 Puzzle (NVIDIA), whose blocks of experts differ in width and in experts for a token."""

    def size_of(self, field: str, layer_id: int) -> int:
        size: int | None = self.config.hf.block_configs[layer_id].get(field)
        return super().size_of(field, layer_id) if size is None else size
