"""DFlash drafters as z-lab, `speculators` and transformers publish them: one forward guesses a whole block."""

import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from hf_efficient.generation.drafters.draft_heads import DraftHeads, unscaled_embeddings
from hf_efficient.generation.drafters.published_config import check_integers, layer_config
from hf_efficient.generation.drafters.published_tensors import PublishedTensors
from hf_efficient.generation.speculation.proposal import MAX_NODES, Proposal
from hf_efficient.generation.speculation.token_tree import product_trees


BRANCHES = 8  # guesses of each position that are considered
FIRST_TOKENS = 256  # room of a new context
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES += ("intermediate_size", "vocab_size")
MORE = ("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps")
OF_BLOCK = {"block_size", "mask_token_id", "target_layer_ids"}  # what `dflash_config` may say
IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")  # they follow from others
ROPES = ("default", "linear", "llama3", "yarn")
OF_TRANSFORMERS = "muse_glimmer_assistant"  # the model type of transformers' own drafter, and its names of tensors
RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def is_dflash(config: dict) -> bool:
    """Whether a `config.json` is that of a DFlash drafter, in one of the three layouts that are read."""
    kinds = config.get("speculators_model_type"), config.get("model_type")
    return "dflash_config" in config or kinds[0] == "dflash" or kinds[1] == OF_TRANSFORMERS


class PublishedDFlash(DraftHeads):
    """A published DFlash drafter (2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036), in
    the layout of Qwen3.

    Its layers attend to a context: each accepted token's states of the target's layers `target_layer_ids`, fused by fc
    and normalized, of which each layer makes keys and values of its own. They read a block: the last token, then masks.
    Tokens of the block see the context and each other, in layers of "sliding_attention" only those before them and
    nearer than `sliding_window`. The target's output head guesses from each mask's state, so guesses do not depend on
    each other, and the most probable paths are proposed.
    """

    kind = "published DFlash"

    def __init__(self, config: Qwen3Config, block: dict, weights: dict[str, torch.Tensor | None], tokens, name: str):
        target = {"name": name, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        if block["takes_vocabulary"]:
            del target["vocab_size"]
        super().__init__(target, len(tokens), block["block_size"] - 1)
        self.draft_tokens = tokens
        self.config, self.block = config, block
        self.reads_layers = tuple(block["target_layer_ids"])
        self.heads = config.num_attention_heads, config.num_key_value_heads
        for key, weight in weights.items():
            self.register_parameter(key, None if weight is None else torch.nn.Parameter(weight, requires_grad=False))
        self.eval()

    @classmethod
    def of(cls, config: dict, tensors: PublishedTensors, name: str) -> "PublishedDFlash":
        """Raises ValueError for a config or tensors that are not read."""
        takes_vocabulary = config.get("model_type") == OF_TRANSFORMERS
        if takes_vocabulary:
            config = _of_transformers(config, name)
            tensors.rename(RENAMED)
        if "speculators_model_type" in config:
            config = _of_speculators(config, name)
        block = {**_block(config, name), "takes_vocabulary": takes_vocabulary}
        check_integers(name, {"block_size": block["block_size"]}, least=2, most=MAX_NODES + 1)
        sizes = {key: config.get(key) for key in SIZES}
        check_integers(name, sizes)
        more = {key: config[key] for key in MORE if key in config}
        said = layer_config("qwen3", {**sizes, **more}, name)
        kind = (said.rope_parameters or {}).get("rope_type", "default")
        allowed = {
            "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
            "rope_type": (kind, ROPES),
            "is_causal": (config.get("is_causal"), (None, False, True)),
            "attention_bias": (config.get("attention_bias", False), (False,)),
        }
        for key, (value, values) in allowed.items():
            if value not in values:
                raise ValueError(f"{name}: {key}={value!r}; one of {list(values)} is allowed")
        block["layers"] = _layers(config, name)
        count = config.get("draft_vocab_size") or said.vocab_size
        weights = _weights(said, len(block["target_layer_ids"]), count, tensors)
        tokens = tensors.take_draft_tokens(count, said.vocab_size)
        tensors.finish(IGNORED)
        return cls(said, block, weights, tokens, name)

    def check(self, model) -> None:
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        if max(self.reads_layers) >= count:
            raise ValueError(
                f"the DFlash drafter reads the outputs of the layers {list(self.reads_layers)} (from 0) of its target, "
                f"and {type(model).__name__} has {count}"
            )
        if self.block["takes_vocabulary"]:
            vocabulary = self.describe(model)["vocab_size"]
            check_integers(self.target["name"], {"mask_token_id": self.block["mask_token_id"]}, 0, vocabulary - 1)
            if len(self.draft_tokens) != vocabulary:  # a new one would have the target's head taken apart again
                self.draft_tokens = torch.arange(vocabulary)
        super().check(model)

    def _output_rows(self, output, model) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super()._output_rows(output, model) if self.head is None else (self.head, None)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return unscaled_embeddings(tokens, self._bound[0], self.embeddings)

    def begin(self, sequences, hidden=None) -> None:
        rows, columns = hidden.shape[:2]
        self._sequences, self._lengths = sequences, torch.zeros(rows, dtype=torch.int64, device=self.fuse.device)
        shape = (self.config.num_hidden_layers, rows, self.heads[1], 1 + FIRST_TOKENS, self.config.head_dim)
        self._keys, self._values = self.fuse.new_zeros(shape), self.fuse.new_zeros(shape)  # column 0: what is padding
        real = torch.ones(rows, columns, dtype=torch.bool)
        if sequences.prompt_mask is not None:
            real = sequences.prompt_mask[sequences.live][:, -columns:].bool()
        self._append(hidden, real)

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        counts = torch.tensor([len(new) for new in tokens])[:, None]
        if longest := int(counts.max()):
            self._append(hidden[:, :longest], torch.arange(longest) < counts)

    def select(self, rows: list[int]) -> None:
        self._lengths, self._keys, self._values = self._lengths[rows], self._keys[:, rows], self._values[:, rows]

    @torch.no_grad()
    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        depth = min(self.max_tokens, max(limits))
        if depth == 0:
            return None
        states = self.states(self._sequences.last(1).to(self.fuse.device))[:, 1 : depth + 1]
        scores = self.logits(states.flatten(0, 1)).float().view(len(states), depth, -1)
        temperatures = torch.tensor(self.temperatures[:depth], device=scores.device)[:, None]
        best = (scores / temperatures).softmax(-1).topk(min(BRANCHES, scores.shape[-1]), dim=-1)
        likely, indices = (x.cpu().numpy() for x in best)
        tokens = self.draft_tokens.cpu().numpy()[indices]
        return product_trees(tokens, likely, limits, min(nodes, self.nodes), self._sequences.device)

    def states(self, last: torch.Tensor) -> torch.Tensor:
        """What the output head reads, [rows, block size, hidden_size], of the block that begins with `last` int64
        [rows, 1]."""
        size, eps = self.block["block_size"], self.config.rms_norm_eps
        x = self.embed(pad(last, (0, size - 1), value=self.block["mask_token_id"])).to(self.fuse)
        turns = self._turns(self._lengths[:, None] + torch.arange(size, device=x.device))
        masks = {kind: self._seen(*kind) for kind in set(self.block["layers"])}
        for layer in range(self.config.num_hidden_layers):
            normed = _norm(x, self.attention_norm[layer], eps)
            query = _turned(_norm(self._split(normed, self.query[layer]), self.query_norm[layer], eps), turns)
            key = _turned(_norm(self._split(normed, self.key[layer]), self.key_norm[layer], eps), turns)
            keys = torch.cat([self._keys[layer], key], 2)
            values = torch.cat([self._values[layer], self._split(normed, self.value[layer])], 2)
            attended = scaled_dot_product_attention(
                query, keys, values, masks[self.block["layers"][layer]], enable_gqa=True
            )
            x = x + linear(attended.transpose(1, 2).flatten(2), self.attention_out[layer])
            normed = _norm(x, self.mlp_norm[layer], eps)
            x = x + linear(silu(linear(normed, self.gate[layer])) * linear(normed, self.up[layer]), self.down[layer])
        return _norm(x, self.output_norm, eps)

    def _seen(self, is_causal: bool, reach: int | None) -> torch.Tensor:
        """What tokens of the block attend to, bool [rows, 1, block size, columns + block size]. reach: in tokens, that
        one excluded; None for no limit."""
        lengths, columns = self._lengths[:, None], torch.arange(self._keys.shape[3], device=self._lengths.device) - 1
        block = lengths + torch.arange(self.block["block_size"], device=lengths.device)
        real = pad((columns >= 0) & (columns < lengths), (0, block.shape[1]), value=True)
        ahead = torch.cat([columns.expand(len(lengths), -1), block], 1)[:, None] - block[..., None]
        seen = real[:, None] & (ahead <= 0 if is_causal else True)
        return (seen if reach is None else seen & (ahead.abs() < reach)).expand_as(ahead)[:, None]

    @torch.no_grad()
    def _append(self, hidden: torch.Tensor, real: torch.Tensor) -> None:
        """Adds states [rows, columns, hidden_size * (1 + layers)] to the context, where `real` [rows, columns]."""
        hidden, real, eps = hidden.to(self.fuse), real.to(self.fuse.device), self.config.rms_norm_eps
        context = _norm(linear(hidden[..., self.config.hidden_size :], self.fuse), self.context_norm, eps)
        positions = (self._lengths[:, None] + real.cumsum(1) - 1).clamp(min=0)
        self._lengths = self._lengths + real.sum(1)
        if (more := int(self._lengths.max()) + 1 - self._keys.shape[3]) > 0:
            more = max(more, self._keys.shape[3])
            self._keys, self._values = (pad(states, (0, 0, 0, more)) for states in (self._keys, self._values))
        turns, row = self._turns(positions), torch.arange(len(real), device=real.device)[:, None]
        columns = torch.where(real, positions + 1, 0)
        for layer in range(self.config.num_hidden_layers):
            key = _turned(_norm(self._split(context, self.key[layer]), self.key_norm[layer], eps), turns)
            value = self._split(context, self.value[layer])
            for states, new in ((self._keys[layer], key), (self._values[layer], value)):
                states.transpose(1, 2)[row, columns] = new.transpose(1, 2)

    def _split(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [rows, 1, columns, head_dim] at `positions` [rows, columns]."""
        rotary = Qwen3RotaryEmbedding(self.config)  # no module of ours, as casts would round its frequencies
        return tuple(x[:, None] for x in rotary.to(positions.device)(self.fuse, positions))


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype)


def _turned(states: torch.Tensor, turns) -> torch.Tensor:
    (cos, sin), half = turns, states.shape[-1] // 2
    return states * cos + torch.cat([-states[..., half:], states[..., :half]], -1) * sin


def _block(config: dict, name: str) -> dict:
    """`block_size`, `mask_token_id` and `target_layer_ids`."""
    said = config.get("dflash_config")
    if not isinstance(said, dict) or set(said) - OF_BLOCK:
        raise ValueError(f"{name}: dflash_config={said!r} must be an object of {', '.join(sorted(OF_BLOCK))}")
    block = {"block_size": config.get("block_size"), **said}
    layers, mask = block.get("target_layer_ids"), block.get("mask_token_id")
    if not isinstance(layers, list) or not layers or any(type(layer) is not int or layer < 0 for layer in layers):
        raise ValueError(f"{name}: target_layer_ids={layers!r} must be a list of integers of at least 0")
    check_integers(name, {"vocab_size": config.get("vocab_size")})
    check_integers(name, {"mask_token_id": mask}, least=0, most=config["vocab_size"] - 1)
    return block


def _of_speculators(config: dict, name: str) -> dict:
    """The same in the words of z-lab."""
    inner, layers = config.get("transformer_layer_config"), config.get("aux_hidden_state_layer_ids")
    if not isinstance(inner, dict) or inner.get("model_type", "qwen3") != "qwen3":
        raise ValueError(f"{name}: transformer_layer_config={inner!r} must be an object with model_type 'qwen3'")
    if not isinstance(layers, list) or any(type(layer) is not int or layer < 1 for layer in layers):
        raise ValueError(f"{name}: aux_hidden_state_layer_ids={layers!r} must be a list of integers of at least 1")
    layer = layer_config("qwen3", inner, name).to_dict()
    allowed = {
        "sample_from_anchor": (config.get("sample_from_anchor", False), (False,)),
        "target_hidden_size": (config.get("target_hidden_size"), (None, layer["hidden_size"])),
        "layer_types": (sorted(set(layer["layer_types"])), (["full_attention"],)),
    }
    for key, (value, values) in allowed.items():
        if value not in values:
            raise ValueError(f"{name}: {key}={value!r}; one of {list(values)} is allowed")
    block = {  # here the numbers say into which layers the states go
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": [layer - 1 for layer in layers],
    }
    sizes = {key: config.get(key) for key in ("block_size", "draft_vocab_size")}
    return {**layer, **sizes, "dflash_config": block}


def _of_transformers(config: dict, name: str) -> dict:
    """The same of transformers' own drafter. It does not say its vocabulary, which is that of any target; what stands
    here is the least that it can be."""
    said = layer_config(OF_TRANSFORMERS, config, name).to_dict()
    check_integers(name, {"mask_token_id": said["mask_token_id"]}, least=0)
    window = said["sliding_window"]
    return {
        **{key: said[key] for key in (*SIZES[:-1], "block_size", "layer_types", "hidden_act", *MORE) if key in said},
        "vocab_size": said["mask_token_id"] + 1,
        "sliding_window": window + 1 if type(window) is int else window,  # which counts the token itself
        "is_causal": False,
        "dflash_config": {key: said[key] for key in ("mask_token_id", "target_layer_ids")},
    }


def _layers(config: dict, name: str) -> list[tuple[bool, int | None]]:
    """Whether each layer is causal, and how far it reaches: what `PublishedDFlash._seen` takes."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    kinds, is_causal = config.get("layer_types") or ["full_attention"] * count, config.get("is_causal")
    known = "full_attention", "sliding_attention"
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in known for kind in kinds):
        raise ValueError(
            f"{name}: layer_types={kinds!r} must say full_attention or sliding_attention for each of {count} layers"
        )
    slides = [kind == "sliding_attention" for kind in kinds]
    if any(slides):
        check_integers(name, {"sliding_window": window})
    return [(slide if is_causal is None else is_causal, window if slide else None) for slide in slides]


def _weights(config: Qwen3Config, fused: int, count: int, tensors: PublishedTensors) -> dict[str, torch.Tensor | None]:
    """Name -> tensor: those of layers are stacked. fused: layers of the target that `fc` reads; count: draft tokens."""
    size, head_dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    of_layer = {
        "query": ("self_attn.q_proj", queries, size),
        "key": ("self_attn.k_proj", keys, size),
        "value": ("self_attn.v_proj", keys, size),
        "attention_out": ("self_attn.o_proj", size, queries),
        "query_norm": ("self_attn.q_norm", head_dim),
        "key_norm": ("self_attn.k_norm", head_dim),
        "attention_norm": ("input_layernorm", size),
        "mlp_norm": ("post_attention_layernorm", size),
        "gate": ("mlp.gate_proj", inner, size),
        "up": ("mlp.up_proj", inner, size),
        "down": ("mlp.down_proj", size, inner),
    }
    weights = {
        key: torch.stack([tensors.take(f"layers.{i}.{name}.weight", *shape) for i in range(config.num_hidden_layers)])
        for key, (name, *shape) in of_layer.items()
    }
    return weights | {
        "fuse": tensors.take("fc.weight", size, fused * size),
        "context_norm": tensors.take("hidden_norm.weight", size),
        "output_norm": tensors.take("norm.weight", size),
        "embeddings": tensors.take_if_there("embed_tokens.weight", config.vocab_size, size),
        "head": tensors.take_if_there("lm_head.weight", count, size),
    }
