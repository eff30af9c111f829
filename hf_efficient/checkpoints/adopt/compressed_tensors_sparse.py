"""Sparse checkpoints of the compressed-tensors package, of releases up to 0.14: later ones, and so transformers 5,
dropped them.

"sparse-24-bitmask": `compressed` [N, K / 2], the two kept values of every four, and `bitmask` uint8 [N, ceil(K / 8)],
a bit for each weight, the lowest first. "sparse-bitmask": `compressed` [kept] with any number of values,
`row_offsets` [N]. Both: `shape`, N and K.

"marlin-24", 2:4 in 4 or 8 bits: transposed, in tiles of 16 by 16 whose codes are permuted as Marlin's instructions
read them, `weight_packed` int32 [K / 32, N * bits / 2]; `scale_packed` float16 [G, N], permuted in 64s; `meta` int16
[K / 32, 2 N], two places of 2 bits for every four columns, in the order of the sparse tensor cores' operand."""

import torch

from hf_efficient.checkpoints.adopt.compressed_tensors_config import quantized_groups
from hf_efficient.checkpoints.adopt.foreign import Foreign, one_of, scale_dtype, stream_bytes, text, typed
from hf_efficient.checkpoints.adopt.stored import SCALE_DTYPES
from hf_efficient.kernels.linear.codes import unpack_codes


SPARSE24, BITMASK, MARLIN24 = "sparse-24-bitmask", "sparse-bitmask", "marlin-24"


def sparse_layout(saved: dict) -> str | None:
    """Which of the sparse layouts a `quantization_config` names."""
    sparsity = typed("sparsity_config", saved.get("sparsity_config"), (dict, type(None)), "an object or null") or {}
    own, sparsity = text(saved.get("format")), text(sparsity.get("format"))
    return next((layout for layout in (sparsity, own) if layout in (SPARSE24, BITMASK, MARLIN24)), None)


class SparseCompressedTensors(Foreign):
    """Reads sparse weights as layers of a `SparseConfig`."""

    config = "SparseConfig"

    def __init__(self, saved):
        super().__init__(saved)
        self.layout = sparse_layout(saved)
        groups = [group["weights"] for group in quantized_groups(saved)]
        if self.layout == MARLIN24:
            self.parts = ("weight_packed", "scale_packed", "meta")
            if len(groups) != 1:
                raise ValueError(
                    f"quantization_config: {len(groups)} config_groups of marlin-24 weights, hf_efficient reads one"
                )
            self.weights = groups[0]
            one_of("weights.num_bits", self.weights.get("num_bits"), (4, 8))
            one_of("weights.strategy", text(self.weights.get("strategy")), ("group", "channel"))
            one_of("weights.symmetric", self.weights.get("symmetric", True), (True,))
        else:
            self.parts = ("compressed", "bitmask", "shape", "row_offsets")
            if groups:
                raise ValueError(
                    f"quantization_config: quantized weights stored as {self.layout} are not read by hf_efficient"
                )

    def scheme(self, stored, out_features, in_features, dtype):
        if self.layout == MARLIN24:
            return self._marlin(stored, out_features, in_features, dtype)
        stored.expect("bitmask", ["U8"], (out_features, -(-in_features // 8)))
        place = stored.places.get("shape")
        stored.expect("shape", ["I64"], (2, 1) if place and len(place.shape) == 2 else (2,))
        if stored.read("shape").flatten().tolist() != [out_features, in_features]:
            raise ValueError(
                f"{place.key} is {stored.read('shape').flatten().tolist()}, expected {[out_features, in_features]}"
            )
        if self.layout == SPARSE24:
            stored.expect("compressed", SCALE_DTYPES, (out_features, in_features // 2))
            return {"pattern": "2:4", "method": "magnitude"}
        total, (kept,) = out_features * in_features, stored.expect("compressed", SCALE_DTYPES, (None,)).shape
        if not 0 < kept <= total:
            raise ValueError(f"{stored.places['compressed'].key} holds {kept} values, expected 1 to {total}")
        return {"sparsity": 1 - kept / total, "group": "layer", "method": "magnitude"}

    def _marlin(self, stored, out_features, in_features, dtype) -> dict:
        bits, group = self.weights["num_bits"], self._group(in_features)
        if out_features % 64 or in_features % 32 or (group != -1 and in_features % group):
            raise ValueError(
                f"{stored.name} is marlin-24 of [{out_features}, {in_features}], expected multiples of 64, and of 32 "
                f"and the group {group}"
            )
        stored.expect("weight_packed", ["I32"], (in_features // 32, out_features * bits // 2))
        stored.expect("meta", ["I16"], (in_features // 32, 2 * out_features))
        stored.expect("scale_packed", ["F16"], (1 if group == -1 else in_features // group, out_features))
        scale = scale_dtype(stored, "scale_packed", dtype)
        weights = {"bits": bits, "group_size": group, "symmetric": True, "scale_dtype": scale}
        return {"pattern": "2:4", "method": "magnitude", "weights": weights}

    def _group(self, in_features: int) -> int:
        size = self.weights.get("group_size") if text(self.weights["strategy"]) == "group" else None
        if size is None:
            return -1
        return one_of("weights.group_size", size, (128,))

    def convert(self, tensors, out_features, in_features, format, dtype):
        if self.layout == MARLIN24:
            return self._convert_marlin(tensors, out_features, in_features, format)
        values = tensors["compressed"].to(dtype)
        mask = unpack_codes(tensors["bitmask"], 1, in_features).bool()
        if "row_offsets" in tensors:
            starts = mask.sum(1).cumsum(0) - mask.sum(1)
            if not torch.equal(tensors["row_offsets"].flatten().long(), starts):
                raise ValueError("row_offsets are not those of the bitmask")
        return {"qweight": values, format.mask_name: format.pack_mask(mask)}

    def _convert_marlin(self, tensors, out_features, in_features, format):
        bits, group = format.weights.bits, self._group(in_features)
        rows, kept = out_features // 16, in_features // 32
        codes = unpack_codes(stream_bytes(tensors["weight_packed"]), bits, out_features * 16).view(-1, 1024)
        codes = codes[:, _code_order(bits).argsort()].view(kept, rows, 16, 16)
        codes = codes.permute(1, 3, 0, 2).reshape(out_features, in_features // 2)
        mask, dense = _expanded(codes, _places(tensors["meta"]))
        scale = tensors["scale_packed"]
        if group != -1 and group < in_features // 2:
            order = torch.arange(64).view(8, 2, 4).transpose(1, 2).flatten()
            scale = scale.view(-1, 64)[:, order.argsort()].view(scale.shape)
        return format.pack_affine(dense, scale.t().contiguous(), None, mask)


def _code_order(bits: int) -> torch.Tensor:
    """Where Marlin's instructions find the codes of 4 tiles [16 kept columns, 16 rows each] that lie one after
    another: int64 [1024]."""
    thread = torch.arange(32).view(32, 1, 1, 1)
    places = 16 * (2 * (thread % 4) + torch.tensor([0, 1, 8, 9])) + 256 * (thread // 8) + 8 * (thread // 4 % 2)
    places = places + torch.arange(4).view(4, 1, 1) + 4 * torch.arange(2).view(2, 1)
    words = places.reshape(-1, 32 // bits)  # in a word even places before odd ones
    return words.unflatten(1, (-1, 2)).transpose(1, 2).flatten()


def _places(meta: torch.Tensor) -> torch.Tensor:
    """int16 [K / 32, 2 N] -> int64 [N, K / 4, 2], the places of the first and second kept of four columns."""
    # of 64 rows, row 8 a + 4 b + 2 c + d; of 32 columns, half q
    words = meta.view(len(meta), -1, 2, 8, 2, 2, 2)  # 32 columns, 64 rows, c, a, d, q, b
    words = words.permute(1, 3, 6, 2, 4, 0, 5).reshape(meta.shape[1] // 2, -1)
    return unpack_codes(words.contiguous().view(torch.uint8), 2, words.shape[1] * 8).long().unflatten(1, (-1, 2))


def _expanded(codes: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept codes [N, K / 2] at their places -> (what is kept, bool [N, K]; codes alike)."""
    mask = torch.zeros(*places.shape[:2], 4, dtype=torch.bool).scatter_(2, places, True)
    dense = torch.zeros(mask.shape, dtype=torch.uint8).scatter_(2, places, codes.unflatten(1, (-1, 2)))
    return mask.flatten(1), dense.flatten(1)
