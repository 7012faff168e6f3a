"""Forms that an output must have, as users import them."""

from hybridrt.base.structured_outputs import StructuredOutputs as StructuredOutputs
