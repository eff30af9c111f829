"""The tensors of a published checkpoint, taken one by one: each has the expected shape, and none is left over."""

import torch
from safetensors import SafetensorError, safe_open


class PublishedTensors:
    """Those of safetensors `files` whose names begin with `prefix`, by the rest of their names.

    Raises ValueError where a file is no safetensors file.
    """

    def __init__(self, files: list[str], prefix: str = ""):
        self.files, self._places = files, {}
        for path in files:
            try:
                with safe_open(path, "pt") as file:
                    self._places |= {
                        name.removeprefix(prefix): (path, name) for name in file.keys() if name.startswith(prefix)
                    }
            except SafetensorError as error:
                raise ValueError(f"{path} is no safetensors file: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def rename(self, names: dict[str, str]) -> None:
        """Calls tensors by other names: old -> new."""
        self._places = {names.get(name, name): place for name, place in self._places.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ValueError where there is no tensor `name`."""
        if name not in self._places:
            raise ValueError(f"{self.files[0]}: the tensor {name!r} is missing; there are {self._some()}")
        path, full = self._places[name]
        with safe_open(path, "pt") as file:
            return tuple(file.get_slice(full).get_shape())

    def take(self, name: str, *shape: int, is_float: bool = True) -> torch.Tensor:
        """The tensor `name`, which is then no longer in here. Raises ValueError unless it has this shape and kind of
        dtype."""
        if self.shape(name) != shape:
            raise ValueError(
                f"{self.files[0]}: {name!r} has shape {list(self.shape(name))}, config.json and the other tensors say "
                f"{list(shape)}"
            )
        path, full = self._places.pop(name)
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(full)
        if tensor.is_floating_point() != is_float or tensor.element_size() < 2 and is_float:
            allowed = "float16, bfloat16, float32 or float64" if is_float else "integers"
            raise ValueError(f"{self.files[0]}: {name!r} is {tensor.dtype}: {allowed} are allowed")
        return tensor

    def take_if_there(self, name: str, *shape: int, is_float: bool = True) -> torch.Tensor | None:
        return self.take(name, *shape, is_float=is_float) if name in self else None

    def take_draft_tokens(self, count: int, vocab_size: int) -> torch.Tensor:
        """The target's token i + d2t[i] for each draft token i, int64 [count]. `d2t` may be missing where all of
        `vocab_size` tokens are guessed from; `t2d` says the same once more.

        Raises ValueError unless they are different tokens of the target.
        """
        offsets = self.take_if_there("d2t", count, is_float=False)
        if offsets is None and count != vocab_size:
            raise ValueError(
                f"{self.files[0]}: draft_vocab_size={count} of vocab_size={vocab_size} needs the tensor 'd2t', which "
                "is missing"
            )
        tokens = torch.arange(count) + (0 if offsets is None else offsets.long())
        if tokens.min() < 0 or tokens.max() >= vocab_size or len(tokens.unique()) < count:
            raise ValueError(
                f"{self.files[0]}: i + d2t[i] must be different tokens from 0 to {vocab_size - 1} for each draft "
                "token i"
            )
        named = self.take_if_there("t2d", vocab_size, is_float=False)
        if named is not None and not torch.equal(named.nonzero()[:, 0], tokens.sort().values):
            raise ValueError(f"{self.files[0]}: t2d and d2t name different tokens of the target")
        return tokens

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raises ValueError where a tensor is left whose name ends with none of `ignored`."""
        self._places = {name: place for name, place in self._places.items() if not name.endswith(ignored)}
        if self._places:
            raise ValueError(f"{self.files[0]}: tensors that have no meaning in this layout: {self._some()}")

    def _some(self) -> str:
        names = sorted(self._places)
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
