"""torch_memory_saver, over ebbtide: the names and the behaviour of its version 0.0.10 and its head.

docs/migrate/torch_memory_saver.md says what each call becomes, and where it differs.
"""

from torch_memory_saver.entrypoint import TorchMemorySaver
from torch_memory_saver.hooks.mode_preload import configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

torch_memory_saver = TorchMemorySaver()
