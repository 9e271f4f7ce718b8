"""Drafters: the trainers' own commands driven as processes, and what they make, for engines.

No trainer is ever imported here. The training data come as a folder with a manifest.
"""

from quantroute.drafter._data import TrainingData
from quantroute.drafter._export import DrafterExport, export_drafter, find_checkpoint
from quantroute.drafter._launch import Launch, Measurement
from quantroute.drafter._spec import TrainSpec, load_train_spec
from quantroute.drafter._train import (
    Prepared,
    TrainProgress,
    TrainReport,
    prepare_training,
    train,
)

__all__ = [
    "DrafterExport",
    "Launch",
    "Measurement",
    "Prepared",
    "TrainProgress",
    "TrainReport",
    "TrainSpec",
    "TrainingData",
    "export_drafter",
    "find_checkpoint",
    "load_train_spec",
    "prepare_training",
    "train",
]
