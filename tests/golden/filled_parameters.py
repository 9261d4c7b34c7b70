"""Find the parameters that loading leaves unfilled, and the tensors that it cuts or pads."""

from collections.abc import Callable, Iterable
from typing import Any

SENTINEL = 0x7F
"""The byte of every parameter before loading, which no stored tensor has: NaN as a float of 8 or 16 bits."""


def mark(model: Any) -> None:
    """Give every parameter bytes that no stored tensor has."""
    for parameter in model.parameters():
        mark_parameter(parameter)


def mark_parameter(parameter: Any) -> None:
    """Give a parameter bytes that no stored tensor has."""
    import torch

    data = torch.full((parameter.numel() * parameter.element_size(),), SENTINEL, dtype=torch.uint8)
    parameter.data = data.view(parameter.dtype).view(parameter.shape)


def unfilled(parameter: Any) -> Any:
    """Whether each value keeps the bytes of `mark`, as a flat tensor."""
    import torch

    data = parameter.detach().contiguous().view(-1).view(torch.uint8).view(-1, parameter.element_size())
    return (data == SENTINEL).all(dim=1)


class Resized:
    """Watches the loaders of a model's parameters for tensors that fill more or fewer values than they have.

    cut     names of tensors with fewer values in the model than in the file
    padded  names of tensors with more values in the model than in the file
    """

    def __init__(self, model: Any, weights: Iterable[tuple[str, Any]]) -> None:
        self.weights = list(weights)
        self.cut: list[str] = []
        self.padded: list[str] = []
        self._names = {id(tensor): name for name, tensor in self.weights}
        for parameter in model.parameters():
            key = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
            if hasattr(parameter, key):
                setattr(parameter, key, self._watched(getattr(parameter, key), parameter))

    def _watched(self, load: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        def watched(parameter: Any, loaded: Any, *given: Any, **named: Any) -> Any:
            size, before = loaded.numel(), owner.data
            mark_parameter(owner)
            found = load(parameter, loaded, *given, **named)
            is_old = unfilled(owner)
            owner.data.view(-1)[is_old] = before.view(-1)[is_old]
            added = owner.numel() - int(is_old.sum()) - size
            if added and id(loaded) in self._names:
                (self.padded if added > 0 else self.cut).append(self._names[id(loaded)])
            return found

        return watched
