"""The Megatron-core trainer. Importing this package makes Megatron-core importable and usable without CUDA.

Import it in trainer processes only: it pulls in torch, and its modules pull in Megatron-core (about 5 s).
"""

import warnings

from miles_disagg.trainer.megatron import cpu_shim

cpu_shim.install()
# Megatron-core announces at import what it falls back to; the trainer uses exactly those fallbacks.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
