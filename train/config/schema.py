"""The typed schema of a run: every key, its type and its default. YAML under conf/ only makes choices.

Hydra composes and type-checks; `from_hydra` turns the result into plain dataclasses once, checks what types cannot
say, and nothing past it sees a DictConfig.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from train.errors import ConfigError

# Enum members are what a user types, so their names are the words of the field.
Precision = Enum("Precision", ["fp32", "bf16", "fp16"])
Backend = Enum("Backend", ["auto", "gloo", "nccl"])
Device = Enum("Device", ["auto", "cpu", "cuda"])
Progress = Enum("Progress", ["auto", "bar", "plain", "none"])
NonFinite = Enum("NonFinite", ["stop", "skip"])
BadSample = Enum("BadSample", ["stop", "skip"])
Decay = Enum("Decay", ["cosine", "linear"])


@dataclass
class Component:
    """Something named by import path and built with the remaining keys as keyword arguments."""

    _target_: str = MISSING

    @property
    def kwargs(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_target_"}


@dataclass
class Digits(Component):
    _target_: str = "train.data.images.Digits"
    augment: bool = False


@dataclass
class Mnist(Component):
    _target_: str = "train.data.images.Mnist"
    root: str = "data"
    augment: bool = False


@dataclass
class Cifar10(Component):
    _target_: str = "train.data.images.Cifar10"
    root: str = "data"
    augment: bool = True


@dataclass
class ImageFolder(Component):
    _target_: str = "train.data.images.ImageFolder"
    root: str = "data/imagefolder"
    image_size: int = 224
    augment: bool = True


@dataclass
class Synthetic(Component):
    _target_: str = "train.data.synthetic.Synthetic"
    num_samples: int = 10_000
    image_shape: list[int] = field(default_factory=lambda: [3, 32, 32])
    num_classes: int = 10


@dataclass
class Text(Component):
    _target_: str = "train.data.text.Text"
    root: str | None = None
    pattern: str = "**/*.py"
    block_size: int = 128


@dataclass
class Mlp(Component):
    _target_: str = "train.models.image.Mlp"
    hidden: list[int] = field(default_factory=lambda: [512])


@dataclass
class ConvNet(Component):
    _target_: str = "train.models.image.ConvNet"
    width: int = 32


@dataclass
class ResNet18(Component):
    _target_: str = "train.models.image.resnet18"


@dataclass
class ResNet50(Component):
    _target_: str = "train.models.image.resnet50"


@dataclass
class Vit(Component):
    _target_: str = "train.models.image.Vit"
    patch_size: int = 4
    num_layers: int = 4
    num_heads: int = 4
    hidden_dim: int = 128
    mlp_dim: int = 256


@dataclass
class Gpt(Component):
    _target_: str = "train.models.gpt.Gpt"
    num_layers: int = 4
    num_heads: int = 4
    hidden_dim: int = 128
    dropout: float = 0.0


@dataclass
class Classification(Component):
    _target_: str = "train.objectives.objective.Classification"
    label_smoothing: float = 0.0


@dataclass
class LanguageModeling(Component):
    _target_: str = "train.objectives.objective.LanguageModeling"


@dataclass
class Sgd(Component):
    _target_: str = "torch.optim.SGD"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass
class AdamW(Component):
    _target_: str = "torch.optim.AdamW"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.01


@dataclass
class Constant(Component):
    _target_: str = "train.optim.schedules.Constant"
    warmup_steps: int = 0


@dataclass
class Cosine(Component):
    _target_: str = "train.optim.schedules.Cosine"
    warmup_steps: int = 0
    final_factor: float = 0.0


@dataclass
class Step(Component):
    _target_: str = "train.optim.schedules.Step"
    warmup_steps: int = 0
    every_epochs: float = 30.0
    factor: float = 0.1


@dataclass
class Single(Component):
    _target_: str = "train.strategies.single.Single"


@dataclass
class Ddp(Component):
    _target_: str = "train.strategies.ddp.Ddp"
    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    find_unused_parameters: bool = False
    sync_batchnorm: bool = False


@dataclass
class Loader:
    """How samples are fetched. None of it changes which samples a rank gets."""

    num_workers: int = 0
    drop_last: bool = False
    on_bad_sample: BadSample = BadSample.stop
    max_bad_samples: int = 10


@dataclass
class Dist:
    backend: Backend = Backend.auto
    timeout_s: float = 300.0
    start_timeout_s: float = 60.0


@dataclass
class Checkpoint:
    every_steps: int = 100
    keep: int = 3
    resume: str = "auto"
    storage: str | None = None
    accept_changes: bool = False


@dataclass
class Log:
    every_steps: int = 10
    progress: Progress = Progress.auto
    tensorboard: bool = True
    report: bool = True


@dataclass
class Eval:
    every_steps: int | None = None


@dataclass
class Config:
    """One run. `None` means: not limited, or chosen for you, as the key's comment in conf/config.yaml says."""

    name: str = "run"
    output_dir: str = "runs/${name}"
    seed: int = 0
    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 64
    micro_batch_size: int | None = None
    precision: Precision = Precision.fp32
    device: Device = Device.auto
    gpus: list[int] | None = None
    compile: bool = False
    channels_last: bool | None = None
    grad_clip: float | None = None
    on_nonfinite: NonFinite = NonFinite.stop
    max_skipped_steps: int = 10
    max_idle_attempts: int = 3
    deterministic: bool = False
    data: Component = MISSING
    model: Component = MISSING
    objective: Component = MISSING
    optimizer: Component = MISSING
    scheduler: Component = MISSING
    strategy: Component = MISSING
    loader: Loader = field(default_factory=Loader)
    dist: Dist = field(default_factory=Dist)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    eval: Eval = field(default_factory=Eval)


SCHEMAS: dict[str, dict[str, type[Component]]] = {
    "data": {
        "digits": Digits,
        "mnist": Mnist,
        "cifar10": Cifar10,
        "imagefolder": ImageFolder,
        "synthetic": Synthetic,
        "text": Text,
    },
    "model": {"mlp": Mlp, "convnet": ConvNet, "resnet18": ResNet18, "resnet50": ResNet50, "vit": Vit, "gpt": Gpt},
    "objective": {"classification": Classification, "language_modeling": LanguageModeling},
    "optimizer": {"sgd": Sgd, "adamw": AdamW},
    "scheduler": {"constant": Constant, "cosine": Cosine, "step": Step},
    "strategy": {"single": Single, "ddp": Ddp},
}

GROUPS = tuple(SCHEMAS)

# What may change between two attempts at one run without making it another run: where it writes, how far it goes,
# how it is carried out. All else decides which numbers come out.
FREE_TO_CHANGE = (
    "name", "output_dir", "epochs", "max_steps", "micro_batch_size", "device", "gpus", "compile", "channels_last",
    "deterministic", "on_nonfinite", "max_skipped_steps", "max_idle_attempts", "strategy.bucket_cap_mb",
    "strategy.gradient_as_bucket_view", "strategy.static_graph", "data.root", "loader.num_workers", "loader.max_bad_samples", "dist",
    "checkpoint", "log", "eval",
)  # fmt: skip

# Hydra types a number; these are the limits within the type: (key, least valid value, exclusive?).
LIMITS: tuple[tuple[str, float, bool], ...] = (
    ("seed", 0, False),
    ("epochs", 1, False),
    ("max_steps", 1, False),
    ("batch_size", 1, False),
    ("micro_batch_size", 1, False),
    ("grad_clip", 0, True),
    ("max_skipped_steps", 1, False),
    ("max_idle_attempts", 0, False),
    ("loader.num_workers", 0, False),
    ("loader.max_bad_samples", 0, False),
    ("dist.timeout_s", 0, True),
    ("dist.start_timeout_s", 0, True),
    ("checkpoint.every_steps", 1, False),
    ("checkpoint.keep", 1, False),
    ("log.every_steps", 1, False),
    ("eval.every_steps", 1, False),
)


def register() -> None:
    """Give Hydra the schemas. Options of a group extend theirs by `defaults: [/schema/GROUP/OPTION@_here_]`."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, options in SCHEMAS.items():
        for option, schema in options.items():
            store.store(group=f"schema/{group}", name=option, node=schema)


def from_hydra(composed: DictConfig) -> Config:
    """Convert Hydra's result to plain dataclasses and check the values.

    Raises:
        ConfigError: a value is outside of its limits, or a group was left without a choice.
    """
    config: Config = OmegaConf.to_object(composed)  # type: ignore[assignment]
    for group in GROUPS:
        if not isinstance(getattr(config, group), Component):
            raise ConfigError(
                f"{group} is not chosen; valid: {', '.join(SCHEMAS[group])}, or {group}._target_=your.Own"
            )
    values = flatten(config)
    for key, least, exclusive in LIMITS:
        value = values[key]
        if value is not None and (value < least or (exclusive and value == least)):
            raise ConfigError(
                f"{key}={value:g} is out of range: use a value {'above' if exclusive else 'of at least'} {least:g}"
            )
    if config.gpus is not None and len(set(config.gpus)) != len(config.gpus):
        raise ConfigError(f"gpus={config.gpus} names a device twice: give each local rank one of its own")
    return config


def to_dict(node: Any) -> Any:
    """Config as plain containers, for YAML and JSON; the inverse of nothing, only for reading and comparing."""
    if is_dataclass(node) and not isinstance(node, type):
        own = {f.name for f in fields(node)}
        return {key: to_dict(value) for key, value in vars(node).items() if key in own or isinstance(node, Component)}
    if isinstance(node, Enum):
        return node.name
    if isinstance(node, dict):
        return {str(key): to_dict(value) for key, value in node.items()}
    return [to_dict(item) for item in node] if isinstance(node, (list, tuple)) else node


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    plain = to_dict(node)
    if not isinstance(plain, dict):
        return {prefix: plain}
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differences(before: Any, now: Any) -> list[str]:
    """What makes `now` another run than `before`: one `key: old -> new` a difference."""
    old, new = flatten(before), flatten(now)
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in changed
        if not any(key == free or key.startswith(f"{free}.") for free in FREE_TO_CHANGE)
    ]
