"""The whole chain at toy size: a target trained on the spot, sold by the simulator, drafted for.

Needs the extras `quantroute[extract,train]`; no key and no network.
"""

from quantroute.demo._backend import ModelBackend
from quantroute.demo._corpus import Dialogue, Subject, dialogues, questions, standard_library
from quantroute.demo._run import DemoFolder, DemoSize, opened_service, prepare_demo
from quantroute.demo._target import SYSTEM_PROMPT, DemoTarget, TargetSize, train_target

__all__ = [
    "SYSTEM_PROMPT",
    "DemoFolder",
    "DemoSize",
    "DemoTarget",
    "Dialogue",
    "ModelBackend",
    "Subject",
    "TargetSize",
    "dialogues",
    "opened_service",
    "prepare_demo",
    "questions",
    "standard_library",
    "train_target",
]
