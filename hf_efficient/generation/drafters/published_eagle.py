"""EAGLE heads as others publish them: a Llama layer over the target's last features, or over three of its layers."""

import torch
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_efficient.generation.drafters import published_eagle_config
from hf_efficient.generation.drafters.draft_heads import unscaled_embeddings
from hf_efficient.generation.drafters.eagle_tree import EagleLayer
from hf_efficient.generation.drafters.published_eagle_config import EagleConfig
from hf_efficient.generation.drafters.published_tensors import PublishedTensors


EAGLE_TENSORS = ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight")  # of EAGLE-3, of the others
MAX_TOKENS = 5
IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")  # they follow from others


class PublishedEagle(EagleLayer):
    """Published EAGLE heads: one Llama layer, that reads a token's embedding e and the feature f that predicted it.

    - EAGLE and EAGLE-2 (Li et al. 2024): the layer reads fc([e, f]), without a norm before its attention. Its output is
      the next feature, which the target's output head reads.
    - EAGLE-3 (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
      Test"): f is fc of the outputs of three of the target's layers, then the layer's own output. Its attention reads
      [norm(e), norm(f)]. An output head of its own guesses from a part of the vocabulary: draft token i stands for the
      target's token i + d2t[i].

    Biases and norms that a checkpoint holds are those of the layer. Embeddings and output heads that it does not hold
    are the target's.
    """

    kind = "published EAGLE"

    def __init__(self, config: EagleConfig, weights: dict[str, torch.Tensor | None], draft_tokens, name: str):
        target = {"name": name, "hidden_size": config.target_size, "vocab_size": config.layer.vocab_size}
        super().__init__(target, len(draft_tokens), MAX_TOKENS)
        self.config, layer = config, config.layer
        self.draft_tokens = draft_tokens
        self.size, self.eps, self.head_dim = layer.hidden_size, layer.rms_norm_eps, _head_dim(layer)
        self.heads = (layer.num_attention_heads, layer.num_key_value_heads, layer.num_key_value_heads)
        for key, weight in weights.items():
            self.register_parameter(key, None if weight is None else torch.nn.Parameter(weight, requires_grad=False))
        self.fuses_layers = self.feature_norm is not None
        self.eval()

    @classmethod
    def of(cls, config: dict, tensors: PublishedTensors, name: str) -> "PublishedEagle":
        """Raises ValueError for a config or tensors that are not read."""
        said = published_eagle_config.read(config, name)
        weights = _weights(said, tensors)
        vocab_size = said.layer.vocab_size
        tokens = tensors.take_draft_tokens(said.draft_vocab_size or vocab_size, vocab_size)
        tensors.finish(IGNORED)
        return cls(said, weights, tokens, name)

    def check(self, model) -> None:
        if self.fuses_layers:
            self.reads_layers = self.config.layers_of(model)
        super().check(model)

    def _output_rows(self, output, model) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super()._output_rows(output, model) if self.head is None else (self.head, None)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return unscaled_embeddings(tokens, self._bound[0], self.embeddings)

    def inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """EAGLE-3: embeddings, then the residual stream, [..., 2 * size]; EAGLE: [..., size]."""
        if not self.fuses_layers:
            return self.multiply(torch.cat([embeddings, features], -1), "fuse", self.fuse_bias)
        if features.shape[-1] != self.size:
            features = features[..., self.config.target_size :]
            if self.input_norm is not None:
                features = self._norm(features, self.input_norm)
            if self.layer_norms is not None:
                parts = features.split(self.config.target_size, -1)
                features = torch.cat([self._norm(*pair) for pair in zip(parts, self.layer_norms)], -1)
            features = self.multiply(features, "fuse")
        if self.config.norm_before_residual:
            features = self._norm(features, self.feature_norm)
        return torch.cat([self._norm(embeddings, self.embedding_norm), features], -1)

    def turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = LlamaRotaryEmbedding(self.config.layer)  # no module of ours, as casts would round its frequencies
        cos, sin = rotary.to(positions.device)(self.fuse, positions.view(1, -1))
        return tuple(x.view(*positions.shape, -1) for x in (cos, sin))

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        read = x
        if self.fuses_layers and not self.config.norm_before_residual:
            read = torch.cat([x[..., : self.size], self._norm(x[..., self.size :], self.feature_norm)], -1)
        mixed = self.multiply(read, "attention_in", self.attention_in_bias)
        mixed = mixed.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        query, key, value = mixed.split(self.heads, dim=1)
        if self.query_norm is not None:
            query, key = self._norm(query, self.query_norm), self._norm(key, self.key_norm)
        cos, sin, half = cos.unsqueeze(-3), sin.unsqueeze(-3), self.head_dim // 2

        def turn(states):
            return states * cos + torch.cat([-states[..., half:], states[..., :half]], -1) * sin

        return [turn(query), turn(key), value]

    def outputs(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x[..., -self.size :] + self.multiply(
            attended.transpose(1, 2).flatten(2), "attention_out", self.attention_out_bias
        )
        gate, up = self.multiply(self._norm(x, self.mlp_norm), "mlp_in", self.mlp_in_bias).chunk(2, -1)
        x = x + self.multiply(silu(gate) * up, "mlp_out", self.mlp_out_bias)
        return self._norm(x, self.output_norm) if self.config.norm_output else x

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """What the output head says at `draft_tokens`, [..., draft tokens], of `features` [..., size]."""
        if self.output_norm is not None and not self.config.norm_output:
            features = self._norm(features, self.output_norm)
        return super().logits(features)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(weight.dtype)


def _head_dim(layer) -> int:
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def _weights(config: EagleConfig, tensors: PublishedTensors) -> dict[str, torch.Tensor | None]:
    """The parameters of `PublishedEagle` by its names; None for those that the checkpoint does not hold."""
    layer, take, maybe = config.layer, tensors.take, tensors.take_if_there
    size, head_dim, inner = layer.hidden_size, _head_dim(layer), layer.intermediate_size
    prefix = "midlayer." if EAGLE_TENSORS[0] in tensors else "layers.0."
    fuses_layers = f"{prefix}hidden_norm.weight" in tensors
    counts = [n * head_dim for n in (layer.num_attention_heads, layer.num_key_value_heads, layer.num_key_value_heads)]
    names = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
    read = size * (1 + fuses_layers)
    joined = {
        "attention_in": [take(f"{name}.weight", count, read) for name, count in zip(names, counts)],
        "attention_in_bias": [maybe(f"{name}.bias", count) for name, count in zip(names, counts)],
        "mlp_in": [take(f"{prefix}mlp.{part}_proj.weight", inner, size) for part in ("gate", "up")],
        "mlp_in_bias": [maybe(f"{prefix}mlp.{part}_proj.bias", inner) for part in ("gate", "up")],
    }
    layers = len(config.reads_layers or (0, 0, 0))
    fused = layers * config.target_size if fuses_layers else 2 * size
    weights = {
        "fuse": take("fc.weight", size, fused),
        "fuse_bias": None if fuses_layers else maybe("fc.bias", size),
        "attention_out": take(f"{prefix}self_attn.o_proj.weight", size, counts[0]),
        "attention_out_bias": maybe(f"{prefix}self_attn.o_proj.bias", size),
        "mlp_out": take(f"{prefix}mlp.down_proj.weight", size, inner),
        "mlp_out_bias": maybe(f"{prefix}mlp.down_proj.bias", size),
        "mlp_norm": take(f"{prefix}post_attention_layernorm.weight", size),
        "query_norm": maybe(f"{prefix}self_attn.q_norm.weight", head_dim),
        "key_norm": maybe(f"{prefix}self_attn.k_norm.weight", head_dim),
        "embeddings": maybe("embed_tokens.weight", layer.vocab_size, size),
        "head": maybe("lm_head.weight", config.draft_vocab_size or layer.vocab_size, size),
        **dict.fromkeys(("feature_norm", "embedding_norm", "output_norm", "input_norm", "layer_norms")),
    }
    for name, parts in joined.items():
        if any(part is None for part in parts) and any(part is not None for part in parts):
            raise ValueError(
                f"{tensors.files[0]}: {prefix}: some biases of {name} are missing; all or none are allowed"
            )
        weights[name] = None if parts[0] is None else torch.cat(parts)
    if (weights["query_norm"] is None) != (weights["key_norm"] is None):
        raise ValueError(
            f"{tensors.files[0]}: {prefix}self_attn has one of q_norm and k_norm; both or none are allowed"
        )
    if fuses_layers:
        weights |= {
            "feature_norm": take(f"{prefix}hidden_norm.weight", size),
            "embedding_norm": take(f"{prefix}input_layernorm.weight", size),
            "output_norm": take("norm.weight", size),
        }
        if config.norm_before_fc:
            weights["input_norm"] = take("input_norm.weight", fused)
        if config.fc_norm:
            norms = [take(f"fc_norm.{part}.weight", config.target_size) for part in range(layers)]
            weights["layer_norms"] = torch.stack(norms)
    if size != config.target_size and any(weights[name] is None for name in ("embeddings", "head")):
        raise ValueError(
            f"{tensors.files[0]}: a head of hidden_size={size} for a target of {config.target_size} needs embed_tokens "
            "and lm_head of its own"
        )
    return weights
