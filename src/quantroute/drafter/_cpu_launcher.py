"""Run `speculators train` where there is no accelerator. A script: never imported by quantroute.

speculators 0.9.0 puts the model on "device 0", loads checkpoints to "cuda:0", and waits for an
accelerator when it times a step; without one, all three fail. Those names are replaced before its
own command takes over; all else is unchanged. For rehearsals and tests: a real drafter is trained
on GPUs, by the stock command.
"""

import sys

import torch
from speculators.train import checkpointer, trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig

if __name__ == "__main__":
    trainer.get_local_rank = lambda: "cpu"
    checkpointer.get_current_device = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    main(TrainConfig.resolve(sys.argv[1:]))
