"""What `saver.share` returns."""

from dataclasses import dataclass

from ebbtide.processes.offers import Offered


@dataclass(frozen=True)
class Shared:
    """A tensor that other processes may attach (`saver.attach`): plain data, which may be pickled.

        with saver.region("shared", exportable=True):
            weight = torch.ones(2, 3, device=saver.device)
        print(saver.share(weight).shape)

    Attributes:
        owner: the name of the process that has it.
        nonce: 32 random digits, which stand for its storage.
        generation: pauses of its tag so far; later it is stale.
        dtype: such as "torch.float32".
        shape, stride, offset: of the tensor in its storage, in elements.
        is_conj, is_neg: torch's lazy conjugation and negation.
    """

    owner: str
    nonce: str
    generation: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    @property
    def _offered(self) -> Offered:
        return Offered(self.owner, self.nonce, self.generation)
