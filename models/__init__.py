"""Builds Megatron GPT models: configuration, layer spec, CPU support, parameter and FLOP counts."""

import warnings

# megatron.core warns of each optional package that is missing; what that changes, Megafit decides and says itself.
warnings.filterwarnings(
    "ignore", message=r"(Transformer Engine and Apex are|Apex is|absl\.logging is) not installed", category=UserWarning
)
