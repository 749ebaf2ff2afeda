"""The Megatron-core trainer. Importing this package makes Megatron-core importable and usable without CUDA.

Import it in trainer processes only: it pulls in torch, and its modules pull in Megatron-core (about 5 s).
"""

from __future__ import annotations

import warnings

from miles_disagg.trainer.base import RankSpec, Trainer, TrainerSpec
from miles_disagg.trainer.megatron import cpu_shim

cpu_shim.install()
# Megatron-core announces at import what it falls back to; the trainer uses exactly those fallbacks.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")


def create_trainer(spec: TrainerSpec, rank: RankSpec) -> Trainer:
    """A MegatronTrainer, as the port; importing Megatron-core only now."""
    from miles_disagg.trainer.megatron.trainer import MegatronTrainer

    return MegatronTrainer(spec, rank)
