"""How large the main job is; readable without torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class JobSize:
    """The defaults take seconds on two CPU cores. Each field is an option of the demo, with its `meaning`."""

    rounds: int = field(default=3, metadata={"meaning": "rounds of training, handing over, generating"})
    steps: int = field(default=40, metadata={"meaning": "training steps a round"})
    batch: int = field(default=16, metadata={"meaning": "sequences a training step, and texts a generation"})
    context: int = field(default=64, metadata={"meaning": "characters of a sequence"})
    width: int = field(default=96, metadata={"meaning": "width of the model; a multiple of the heads"})
    layers: int = field(default=2, metadata={"meaning": "layers of the model"})
    heads: int = field(default=4, metadata={"meaning": "attention heads of a layer"})
    prompt: int = field(default=16, metadata={"meaning": "characters that each generated text begins with"})
    learning_rate: float = field(default=6e-3, metadata={"meaning": "AdamW's learning rate"})
    seed: int = field(default=0, metadata={"meaning": "of the weights, the batches and the generated text"})

    def __post_init__(self) -> None:
        if min(self.rounds, self.steps, self.batch, self.width, self.layers, self.heads, self.prompt) < 1:
            raise ValueError("sizes and counts must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads: {self.width} is none of {self.heads}")
        if self.context <= self.prompt:
            raise ValueError(f"context must be larger than prompt: {self.context} and {self.prompt}")
