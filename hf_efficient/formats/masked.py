"""The base class of formats that store a mask and the kept weights."""

from dataclasses import dataclass

import torch

from hf_efficient.formats.affine import AffineFormat
from hf_efficient.formats.base import Format, even_mask
from hf_efficient.kernels.linear.codes import expand_groups, packed_width
from hf_efficient.kernels.linear.layout import DenseLayout, RestoredLayout
from hf_efficient.kernels.linear.native_sparse import NativeSparseLayout


@dataclass(frozen=True)
class MaskedFormat(Format):
    """The kept weights in row-major order as "qweight", and a mask; all other weights are 0.

    weights: None: "qweight" holds values in the weight's dtype, bit for bit. Otherwise it holds codes of that format,
    and the other canonical tensors of that format, which belong to whole rows, stand next to it.
    """

    weights: AffineFormat | None = None

    def kept_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """The shape of the kept weights of [out_features, in_features].

        Raises:
            ValueError: the pattern does not divide the sizes.
        """
        raise NotImplementedError

    def mask_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """The shape of the tensor `mask_name`, which is uint8."""
        raise NotImplementedError

    def pack_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """bool [..., N, K], True = kept -> the tensor `mask_name`.

        Raises:
            ValueError: the format cannot store this mask.
        """
        raise NotImplementedError

    def mask(self, tensors: dict[str, torch.Tensor], in_features: int) -> torch.Tensor:
        """Which weights are kept: bool [..., N, in_features].

        Raises:
            ValueError: the tensors contradict each other.
        """
        raise NotImplementedError

    def shapes(self, out_features, in_features):
        kept = self.kept_shape(out_features, in_features)
        mask = {self.mask_name: self.mask_shape(out_features, in_features)}
        if self.weights is None:
            return {"qweight": kept, **mask}
        packed = *kept[:-1], packed_width(kept[-1], self.weights.bits)
        return {**self.weights.shapes(out_features, in_features), "qweight": packed, **mask}

    def dtypes(self, dtype):
        own = {"qweight": dtype} if self.weights is None else self.weights.dtypes(dtype)
        return {**own, self.mask_name: torch.uint8}

    def blank(self, out_features, in_features, dtype):
        kept = torch.Size(self.kept_shape(out_features, in_features)).numel()
        mask = self.pack_mask(even_mask(out_features, in_features, kept))
        return {**super().blank(out_features, in_features, dtype), self.mask_name: mask}

    def pack(self, weight: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """The canonical tensors of weight [..., N, K] where mask (bool, True = kept) keeps it.

        Raises:
            ValueError: the format cannot store this mask, or stores codes.
        """
        if self.weights is not None:
            raise ValueError(f"{self} stores codes: pack_affine takes them")
        return self._pack(weight, mask)

    def pack_affine(
        self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The canonical tensors of codes uint8 [..., N, K] on the grid of `weights` where mask (bool, True = kept)
        keeps them; scale and zero_point [..., N, G] as `weights` has them, None for a symmetric one.

        Raises:
            ValueError: the format cannot store this mask, or stores no codes or other zero points.
        """
        if self.weights is None or self.weights.symmetric != (zero_point is None):
            given = "without" if zero_point is None else "with"
            raise ValueError(f"{self} does not store codes {given} zero points")
        tensors = self._pack(codes, mask)
        tensors |= {"qweight": self.weights.pack(tensors["qweight"]), "scale": scale}
        return tensors if zero_point is None else {**tensors, "zero_point": zero_point}

    def _pack(self, values, mask) -> dict[str, torch.Tensor]:
        if mask.dtype != torch.bool or mask.shape != values.shape:
            raise ValueError(f"the mask is {mask.dtype} {tuple(mask.shape)}, expected bool {tuple(values.shape)}")
        shape = *values.shape[:-2], *self.kept_shape(*values.shape[-2:])
        packed = self.pack_mask(mask)
        return {"qweight": values[mask].view(shape), self.mask_name: packed}

    def codes(self, tensors: dict[str, torch.Tensor], in_features: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(values or codes [..., N, in_features], 0 where nothing is kept; the mask, bool alike). Raises ValueError as
        `mask`."""
        mask, kept = self.mask(tensors, in_features), tensors["qweight"]
        if self.weights is not None:
            count = self.kept_shape(*mask.shape[-2:])[-1]
            kept = self.weights.unpack(kept, count)
        return kept.new_zeros(mask.shape).masked_scatter_(mask, kept), mask

    @property
    def checks_codes(self) -> bool:
        return self.weights is None

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        self.mask(tensors, in_features)
        if self.weights is not None:
            self.weights.check({n: t for n, t in tensors.items() if n in ("scale", "zero_point")}, in_features)

    def dequantize(self, tensors, in_features, dtype):
        values, mask = self.codes(tensors, in_features)
        if self.weights is None:
            return values.to(dtype)
        dense = {**tensors, "qweight": self.weights.pack(values)}
        return self.weights.dequantize(dense, in_features, dtype).masked_fill_(~mask, 0)

    def layout(self, tensors, in_features, dtype):
        """A layout that reads only the kept weights, where the device has one. Otherwise a dense weight, as fast as
        before pruning: codes in the layout of `weights`, values in `dtype`."""
        values, mask = self.codes(tensors, in_features)
        if layout := self.device_layout(tensors, values, mask, dtype):
            return layout
        own_mask, kept_shape = {self.mask_name: tensors[self.mask_name]}, self.kept_shape(*mask.shape)
        if self.weights is None:
            exact = values.dtype is dtype

            def kept():
                return values[self.mask(own_mask, in_features)].view(kept_shape)

            return DenseLayout(values.to(dtype), kept if exact else None)
        dense = self.with_zeros(tensors, in_features)
        layout = dense and self.weights.layout(dense, in_features, dtype)
        if not layout or not layout.replaces_qweight:
            return DenseLayout(self.dequantize(tensors, in_features, dtype))

        def restore(layout):
            codes = self.weights.unpack(layout.canonical(), in_features)
            return self.weights.pack(codes[self.mask(own_mask, in_features)].view(kept_shape))

        return RestoredLayout(layout, restore)

    def device_layout(self, tensors, values, mask, dtype):
        """A layout of values or codes [N, K] and their mask that reads only the kept ones; None where there is none."""
        if values.dtype is not dtype:
            return None
        layout = NativeSparseLayout.pack(values, mask, tensors["qweight"].shape)
        if layout is not None:
            layout.pack_mask = {self.mask_name: self.pack_mask}
        return layout

    def with_zeros(self, tensors: dict[str, torch.Tensor], in_features: int) -> dict[str, torch.Tensor] | None:
        """The canonical tensors of `weights` for the same weight [..., N, K], with the code of 0 where nothing is kept.
        None where no code means 0: for values, and for zero points that are no integers. Raises as `mask`."""
        zero = tensors.get("zero_point")
        if self.weights is None or (zero is not None and zero.is_floating_point()):
            return None
        codes, mask = self.codes(tensors, in_features)
        middle = codes.new_full((), 2 ** (self.weights.bits - 1))
        zero = middle if zero is None else expand_groups(zero, self.weights.group_size, in_features)
        dense = {name: tensor for name, tensor in tensors.items() if name != self.mask_name}
        return {**dense, "qweight": self.weights.pack(torch.where(mask, codes, zero))}
