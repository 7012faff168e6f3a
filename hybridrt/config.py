"""Configurations of engines and models, as users and packages of families and kinds import them."""

from hybridrt.base.config import AttentionConfig as AttentionConfig
from hybridrt.base.config import AttentionSpec as AttentionSpec
from hybridrt.base.config import EngineConfig as EngineConfig
from hybridrt.base.config import LatentConfig as LatentConfig
from hybridrt.base.config import LayerSpec as LayerSpec
from hybridrt.base.config import LinearConfig as LinearConfig
from hybridrt.base.config import ModelConfig as ModelConfig
from hybridrt.base.config import SpeculativeConfig as SpeculativeConfig
