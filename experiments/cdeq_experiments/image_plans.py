"""Image classification as plans: which images, which models, how everything is trained at each scale."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from cdeq.data.image_sets import require_image_files
from cdeq.models.vision.mdeq import MDEQ
from cdeq.training.loop import FitConfig
from cdeq.training.teaching import TeachConfig
from cdeq_experiments.image_data import ImageData, open_images
from cdeq_experiments.plans import LATER, ModelPlan
from cdeq_experiments.rivals.alexnet import AlexNet
from cdeq_experiments.rivals.hrnet import HRNet
from cdeq_experiments.rivals.inception import InceptionV2

EXPLICIT: dict[str, type[nn.Module]] = {
    "alexnet": AlexNet,
    "inception_v2": InceptionV2,
    "hrnet": HRNet,
}


@dataclass(frozen=True, kw_only=True)
class ImagePlan(ModelPlan):
    """Images and the MDEQ on them, beside what every plan has.

    The fields from `channels` to `dropout` are MDEQ's. `single` are those that the single-stream DEQ has otherwise;
    it is trained for `single_pretrain` and `single_updates`. Images are moved by up to `padding` pixels, and
    mirrored if `flip`; with a `size` they are read from class folders as they are needed, and cropped to it.
    `full_batches` are recorded with all their states, for the published recipe: fewer, since they are large.
    """

    in_channels: int = 3
    image_size: int = 32
    channels: tuple[int, ...] = (16, 32, 64)
    expand: int = 2
    groups: int = 4
    fuse_groups: int = 4
    stem: int = 24
    strides: tuple[int, int] = (2, 1)
    head: tuple[int, ...] = (4, 8, 16)
    final: int = 128
    keep: float = 1.0
    dropout: float = 0.0

    batch: int = 64
    test_batch: int = 250
    padding: int = 4
    flip: bool = True
    size: int | None = None
    weight_decay: float = 0.01

    single: dict[str, Any] = field(default_factory=dict)
    single_pretrain: int = 800
    single_updates: int = 400
    full_batches: int = 48

    @property
    def later(self) -> frozenset[str]:
        return LATER | {
            "single",
            "single_pretrain",
            "single_updates",
            "full_batches",
            "test_batch",
        }

    def require(self, folder: Path | None) -> None:
        """Refuse, by name, images whose files are not there; nothing is read."""
        if self.name != "digits":
            require_image_files(self.name, folder)

    def open(self, folder: Path | None, cache: Path) -> ImageData:
        return open_images(
            self.name,
            folder,
            cache,
            batch=self.batch,
            test_batch=self.test_batch,
            padding=self.padding,
            flip=self.flip,
            size=self.size,
        )

    def build(self, classes: int, **changes: Any) -> MDEQ:
        """The untrained teacher."""
        fields = {
            "in_channels": self.in_channels,
            "channels": self.channels,
            "expand": self.expand,
            "groups": self.groups,
            "fuse_groups": self.fuse_groups,
            "stem": self.stem,
            "strides": self.strides,
            "head": self.head,
            "final": self.final,
            "keep": self.keep,
            "dropout": self.dropout,
        }
        return MDEQ(classes=classes, **{**fields, **changes})

    def build_explicit(self, name: str, classes: int) -> nn.Module:
        """An untrained explicit model."""
        return EXPLICIT[name](
            classes=classes,
            in_channels=self.in_channels,
            image_size=self.image_size,
            **self.bodies.get(name, {}),
        )

    def _decayed(self, config: TeachConfig) -> TeachConfig:
        return replace(config, fit=replace(config.fit, weight_decay=self.weight_decay))

    @property
    def pretraining(self) -> TeachConfig:
        return self._decayed(super().pretraining)

    @property
    def teaching(self) -> TeachConfig:
        return self._decayed(super().teaching)

    def explicit_fit(self, name: str) -> FitConfig:
        return replace(super().explicit_fit(name), weight_decay=self.weight_decay)

    def single_stream(self) -> tuple[TeachConfig, TeachConfig]:
        """How the single-stream DEQ is trained: shallow, then at its equilibrium."""
        other = replace(self, pretrain=self.single_pretrain, updates=self.single_updates)
        return other.pretraining, other.teaching
