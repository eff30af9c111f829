"""Random draft heads in the layouts of others, and what they mean, computed plainly: no cache, no batch, float32."""

import json

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu, softmax


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def write(folder, config: dict, tensors: dict, name: str = "model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    return folder


class Random:
    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.3)

    def norm(self, size: int) -> torch.Tensor:
        return 1 + self(size)


def layer_tensors(random: Random, prefix: str, size: int, reads: int, head_dim: int, bias: bool = False) -> dict:
    shapes = {
        "self_attn.q_proj": (4 * head_dim, reads),
        "self_attn.k_proj": (2 * head_dim, reads),
        "self_attn.v_proj": (2 * head_dim, reads),
        "self_attn.o_proj": (size, 4 * head_dim),
        "mlp.gate_proj": (48, size),
        "mlp.up_proj": (48, size),
        "mlp.down_proj": (size, 48),
    }
    tensors = {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
    tensors[f"{prefix}post_attention_layernorm.weight"] = random.norm(size)
    if bias:
        tensors |= {
            f"{prefix}self_attn.{part}_proj.bias": random(shapes[f"self_attn.{part}_proj"][0]) for part in "qkv"
        }
    return tensors


def eagle(folder, size: int, vocab_size: int, own_embeddings: bool = False):
    """EAGLE and EAGLE-2: embeddings of its own where asked, and biases with them."""
    random = Random(1)
    tensors = layer_tensors(random, "layers.0.", size, size, size // 4, bias=own_embeddings)
    tensors |= {"fc.weight": random(size, 2 * size)}
    if own_embeddings:
        tensors |= {"fc.bias": random(size), "embed_tokens.weight": random(vocab_size, size) * 5}
    return write(folder, {**BASE, "hidden_size": size, "vocab_size": vocab_size}, tensors)


def draft_vocabulary(random: Random, count: int, vocab_size: int) -> dict:
    tokens = torch.randperm(vocab_size, generator=random.generator)[:count].sort().values
    return {"d2t": tokens - torch.arange(count), "t2d": torch.isin(torch.arange(vocab_size), tokens)}


def eagle3(folder, size: int, vocab_size: int, draft: int, layers=None, scaling=None):
    """EAGLE-3 as SafeAILab and SpecForge write it. layers: whose outputs it reads."""
    random = Random(2)
    tensors = layer_tensors(random, "midlayer.", size, 2 * size, size // 4)
    tensors |= {f"midlayer.{name}.weight": random.norm(size) for name in ("hidden_norm", "input_layernorm")}
    tensors |= {"fc.weight": random(size, len(layers or (0, 0, 0)) * size), "norm.weight": random.norm(size)}
    tensors |= {"lm_head.weight": random(draft, size), **draft_vocabulary(random, draft, vocab_size)}
    config = {**BASE, "hidden_size": size, "vocab_size": vocab_size, "draft_vocab_size": draft}
    if layers is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    if scaling is not None:
        config |= {"rope_scaling": scaling, "rope_theta": 5000.0}
    return write(folder, config, tensors)


def speculators(folder, size: int, vocab_size: int, draft: int, target_size: int):
    """EAGLE-3 as the library `speculators` writes it, narrower than its target, with all that may be said of norms."""
    random = Random(3)
    tensors = layer_tensors(random, "layers.0.", size, 2 * size, 16)
    tensors |= {f"layers.0.{name}.weight": random.norm(size) for name in ("hidden_norm", "input_layernorm")}
    tensors |= {f"layers.0.self_attn.{name}_norm.weight": random.norm(16) for name in "qk"}
    tensors |= {f"fc_norm.{part}.weight": random.norm(target_size) for part in range(3)}
    tensors |= {"fc.weight": random(size, 3 * target_size), "norm.weight": random.norm(size)}
    tensors |= {"lm_head.weight": random(draft, size), **draft_vocabulary(random, draft, vocab_size)}
    tensors |= {"embed_tokens.weight": random(vocab_size, size) * 5}
    layer = {**BASE, "model_type": "qwen3", "hidden_size": size, "vocab_size": vocab_size, "head_dim": 16}
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "target_hidden_size": target_size,
        "draft_vocab_size": draft,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
        **dict.fromkeys(("norm_before_residual", "norm_output", "fc_norm"), True),
    }
    return write(folder, config, tensors)


def medusa(folder, size: int, vocab_size: int, heads: int, blocks: int, prefix: str = ""):
    random, tensors = Random(4), {}
    for head in range(heads):
        tensors[f"{prefix}{head}.{blocks}.weight"] = random(vocab_size, size)
        for block in range(blocks):
            tensors[f"{prefix}{head}.{block}.linear.weight"] = random(size, size)
            tensors[f"{prefix}{head}.{block}.linear.bias"] = random(size)
    config = {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "the target"}
    if prefix:  # among the target's
        tensors["model.norm.weight"] = random.norm(size)
    return write(folder, config, tensors, "model.safetensors" if prefix else "medusa_lm_head.safetensors")


# --- what they mean ---


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + BASE["rms_norm_eps"]).sqrt() * weight


class Reference:
    """One sequence. tensors, config: as published. embeddings, head: the target's."""

    def __init__(self, tensors: dict, config: dict, embeddings: torch.Tensor, head: torch.Tensor, angles):
        self.tensors, self.config, self.angles = tensors, config, angles
        self.embeddings = tensors.get("embed_tokens.weight", embeddings)
        self.head = tensors.get("lm_head.weight", head)
        self.prefix = "midlayer." if "midlayer.self_attn.q_proj.weight" in tensors else "layers.0."
        self.is_third = f"{self.prefix}hidden_norm.weight" in tensors
        count = len(self.head)
        self.tokens = torch.arange(count) + tensors.get("d2t", torch.zeros(count, dtype=torch.int64))

    def of(self, name: str):
        return self.tensors.get(f"{self.prefix}{name}")

    def apply(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.of(f"{name}.weight"), self.of(f"{name}.bias"))

    def first_features(self, hidden: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """What stands for the target's features: hidden [length, size] of its end, inner [length, layers, size]."""
        if not self.is_third:
            return hidden
        if "fc_norm.0.weight" in self.tensors:
            inner = torch.stack([norm(inner[:, i], self.tensors[f"fc_norm.{i}.weight"]) for i in range(3)], 1)
        return linear(inner.flatten(1), self.tensors["fc.weight"])

    def step(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The next feature after each token, [length, size]: tokens int64 [length], features [length, size]."""
        embeddings = self.embeddings[tokens]
        if self.is_third:
            normed = norm(features, self.of("hidden_norm.weight"))
            residual = normed if self.config.get("norm_before_residual") else features
            x = torch.cat([norm(embeddings, self.of("input_layernorm.weight")), normed], -1)
        else:
            joined = torch.cat([embeddings, features], -1)
            x = residual = linear(joined, self.tensors["fc.weight"], self.tensors.get("fc.bias"))
        length, head_dim = len(tokens), len(self.of("self_attn.o_proj.weight")[0]) // 4
        query, key, value = (self.apply(x, f"self_attn.{part}_proj").view(length, -1, head_dim) for part in "qkv")
        if self.of("self_attn.q_norm.weight") is not None:
            query, key = (norm(x, self.of(f"self_attn.{p}_norm.weight")) for x, p in ((query, "q"), (key, "k")))
        turn = torch.polar(torch.ones(length, head_dim // 2), torch.arange(length)[:, None] * self.angles)[:, None]
        query, key = (
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, -1)).mT.contiguous()) * turn).mT.flatten(-2)
            for x in (query, key)
        )
        attended = []
        for head in range(4):
            scores = query[:, head] @ key[:, head // 2].T / head_dim**0.5
            scores = scores.masked_fill(torch.ones(length, length).triu(1) > 0, float("-inf"))
            attended.append(softmax(scores, -1) @ value[:, head // 2])
        x = residual + self.apply(torch.cat(attended, -1), "self_attn.o_proj")
        y = norm(x, self.of("post_attention_layernorm.weight"))
        x = x + self.apply(silu(self.apply(y, "mlp.gate_proj")) * self.apply(y, "mlp.up_proj"), "mlp.down_proj")
        return norm(x, self.tensors["norm.weight"]) if self.config.get("norm_output") else x

    def logits(self, feature: torch.Tensor) -> torch.Tensor:
        if self.is_third and not self.config.get("norm_output"):
            feature = norm(feature, self.tensors["norm.weight"])
        return feature @ self.head.T

    def chain(self, tokens: list[int], hidden: torch.Tensor, inner: torch.Tensor, depth: int):
        """The most probable guess after `tokens` (all but the first have been predicted by `hidden` and `inner`), then
        after that one: tokens [depth] and logits [depth, draft tokens]."""
        read, features = torch.tensor(tokens[1:]), self.first_features(hidden, inner)
        guesses, logits = [], []
        for _ in range(depth):
            following = self.step(read, features)[-1:]
            logits.append(self.logits(following)[0])
            guesses.append(self.tokens[logits[-1].argmax()])
            read, features = torch.cat([read, guesses[-1][None]]), torch.cat([features, following])
        return torch.stack(guesses), torch.stack(logits)
