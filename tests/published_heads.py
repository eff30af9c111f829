"""Random draft heads in the layouts of others, and what they mean, computed plainly: no cache, no batch, float32."""

import json

import torch
from safetensors.torch import load_file, save_file
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


def hydra(folder, size: int, vocab_size: int, heads: int = 3):
    """Hydra heads of two blocks."""
    random, tensors = Random(6), {}
    for head in range(heads):
        for block, reads in ((0, (head + 2) * size), (1, size)):
            names = ("linear", "res_connection") if block == 0 else ("linear",)
            for name in names:
                tensors[f"hydra_mlp.{head}.{block}.{name}.weight"] = random(size, reads)
                tensors[f"hydra_mlp.{head}.{block}.{name}.bias"] = random(size)
        tensors[f"hydra_lm_head.{head}.weight"] = random(vocab_size, size)
        tensors[f"hydra_lm_head.{head}.bias"] = random(vocab_size)
    config = {"hydra_num_heads": heads, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}
    return write(folder, config, tensors, "hydra_lm_head.safetensors")


def dflash(folder, size: int, vocab_size: int, layers: list[int], block: int, window: int | None = None):
    """DFlash as z-lab writes it, of two layers, of which the second slides over a `window`, if there is one."""
    random, tensors = Random(5), {}
    for i in range(2):
        prefix = f"layers.{i}."
        tensors |= layer_tensors(random, prefix, size, size, size // 4)
        tensors |= {f"{prefix}self_attn.{name}_norm.weight": random.norm(size // 4) for name in "qk"}
        tensors |= {f"{prefix}input_layernorm.weight": random.norm(size)}
    tensors |= {"fc.weight": random(size, len(layers) * size)}
    tensors |= {f"{name}.weight": random.norm(size) for name in ("hidden_norm", "norm")}
    config = {**BASE, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2}
    config |= {"hidden_size": size, "vocab_size": vocab_size, "head_dim": size // 4, "block_size": block}
    config |= {"dflash_config": {"mask_token_id": 7, "target_layer_ids": layers}, "layer_types": ["full_attention"] * 2}
    if window is not None:
        config |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": window}
    return write(folder, config, tensors)


def dflash_of_speculators(folder, size: int, vocab_size: int, draft: int, layers: list[int], block: int):
    """DFlash as the library `speculators` writes it, with embeddings, output head and draft vocabulary of its own."""
    dflash(folder, size, vocab_size, layers, block)
    random, config = Random(7), json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors") | draft_vocabulary(random, draft, vocab_size)
    tensors |= {"embed_tokens.weight": random(vocab_size, size) * 5, "lm_head.weight": random(draft, size)}
    names = ("architectures", "block_size", "dflash_config")
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": {key: value for key, value in config.items() if key not in names},
        "block_size": block,
        "draft_vocab_size": draft,
        "mask_token_id": 7,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "sample_from_anchor": False,
    }
    return write(folder, config, tensors)


# --- what they mean ---


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + BASE["rms_norm_eps"]).sqrt() * weight


def turned(x: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [length, heads, head_dim], each pair of numbers (i, i + head_dim / 2) turned by position * angle."""
    turn = torch.polar(torch.ones(len(x), len(angles)), positions[:, None] * angles)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, -1)).mT.contiguous()) * turn).mT.flatten(-2)


def attention(query, key, value, is_causal: bool, window: int = 1000) -> torch.Tensor:
    """Four heads of the last queries [length, 4, head_dim], two of keys and values: [length, 4 * head_dim]."""
    attended = []
    for head in range(4):
        scores = query[:, head] @ key[:, head // 2].T / query.shape[-1] ** 0.5
        if is_causal:
            ones, before = torch.ones_like(scores), len(key) - len(query)
            is_seen = ones.tril(before) * ones.triu(before + 1 - window)
            scores = scores.masked_fill(is_seen == 0, float("-inf"))
        attended.append(softmax(scores, -1) @ value[:, head // 2])
    return torch.cat(attended, -1)


def dflash_states(tensors: dict, inner, block, angles, window: int | None) -> torch.Tensor:
    """What the output head reads of a block [block size, size] of embeddings after `inner` [length, layers, size]. The
    second layer slides over a `window`, if there is one."""
    context = norm(linear(inner.flatten(1), tensors["fc.weight"]), tensors["hidden_norm.weight"])
    x, positions, length = block, torch.arange(len(inner) + len(block)), len(inner)
    for i in range(2):
        of = {key.removeprefix(f"layers.{i}."): value for key, value in tensors.items()}
        y = norm(x, of["input_layernorm.weight"])
        both = torch.cat([context, y])
        query, key, value = (
            linear(read, of[f"self_attn.{part}_proj.weight"]).unflatten(-1, (-1, len(angles) * 2))
            for part, read in (("q", y), ("k", both), ("v", both))
        )
        query = turned(norm(query, of["self_attn.q_norm.weight"]), positions[length:], angles)
        key = turned(norm(key, of["self_attn.k_norm.weight"]), positions, angles)
        attended = attention(query, key, value, i == 1 and window is not None, window)
        x = x + linear(attended, of["self_attn.o_proj.weight"])
        y = norm(x, of["post_attention_layernorm.weight"])
        gate, up = (linear(y, of[f"mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        x = x + linear(silu(gate) * up, of["mlp.down_proj.weight"])
    return norm(x, tensors["norm.weight"])


def hydra_logits(tensors: dict, head: int, hidden: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """hidden [size], embeddings [head + 1, size]: of the last token and the guesses before."""
    x, of = torch.cat([hidden, embeddings.flatten()]), f"hydra_mlp.{head}."

    def apply(name, x):
        return tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"]

    x = apply(f"{of}0.res_connection", x) + silu(apply(f"{of}0.linear", x))
    return apply(f"hydra_lm_head.{head}", x + silu(apply(f"{of}1.linear", x)))


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
        query, key = (turned(x, torch.arange(length), self.angles) for x in (query, key))
        attended = attention(query, key, value, True)
        x = residual + self.apply(attended, "self_attn.o_proj")
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
