"""Configurations of engines and models, as users and packages of families and kinds import them."""

from hybridrt.base.engine_config import EngineConfig as EngineConfig
from hybridrt.base.engine_config import SpeculativeConfig as SpeculativeConfig
from hybridrt.base.model_config import AttentionConfig as AttentionConfig
from hybridrt.base.model_config import AttentionSpec as AttentionSpec
from hybridrt.base.model_config import LatentConfig as LatentConfig
from hybridrt.base.model_config import LayerSpec as LayerSpec
from hybridrt.base.model_config import LinearConfig as LinearConfig
from hybridrt.base.model_config import ModelConfig as ModelConfig
