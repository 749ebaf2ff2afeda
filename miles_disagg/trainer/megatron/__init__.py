"""The Megatron-core trainer. Importing this package makes Megatron-core importable and usable without CUDA.

Import it in trainer processes only: it pulls in torch, and its modules pull in Megatron-core (about 5 s).
"""

from __future__ import annotations

import warnings

from miles_disagg.trainer.base import RankSpec, Trainer, TrainerSpec
from miles_disagg.trainer.megatron import cpu_shim

cpu_shim.install()
# What Megatron-core announces at import and at work: the fallbacks it takes (exactly those that are wanted here), CUDA
# settings that do not apply, and its use of interfaces that torch has renamed.
for _category in (UserWarning, FutureWarning, DeprecationWarning):
    warnings.filterwarnings("ignore", category=_category, module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")


def create_trainer(spec: TrainerSpec, rank: RankSpec) -> Trainer:
    """A MegatronTrainer, as the port; importing Megatron-core only now."""
    from miles_disagg.trainer.megatron.trainer import MegatronTrainer

    return MegatronTrainer(spec, rank)
