"""The size of the main job; readable without torch."""

from dataclasses import dataclass, field

HEADS = 4  # of each layer
PROMPT = 16  # characters that each generated text begins with


@dataclass(frozen=True)
class JobSize:
    """The defaults take seconds on two CPU cores. Each field is an option of the demo, with its `meaning`."""

    rounds: int = field(default=3, metadata={"meaning": "rounds of training, handing over, generating"})
    steps: int = field(default=40, metadata={"meaning": "training steps a round"})
    batch: int = field(default=16, metadata={"meaning": "sequences a training step, and texts a generation"})
    context: int = field(default=64, metadata={"meaning": "characters of a sequence"})
    width: int = field(default=96, metadata={"meaning": f"width of the model; a multiple of {HEADS}"})
    layers: int = field(default=2, metadata={"meaning": "layers of the model"})

    def __post_init__(self) -> None:
        if min(self.rounds, self.steps, self.batch, self.width, self.layers) < 1:
            raise ValueError("sizes and counts must be at least 1")
        if self.width % HEADS:
            raise ValueError(f"width must be a multiple of {HEADS}, the attention heads: {self.width} is none")
        if self.context <= PROMPT:
            raise ValueError(f"context must be larger than {PROMPT}, the length of a prompt, not {self.context}")
