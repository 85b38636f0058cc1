"""Data sets for `fit`, `evaluate` and `predict`: folders of images, changes of images, padding."""

from ortops.data.augmentation import Color, Crop, CutMix, Erase, Flip, MixUp, Rotate
from ortops.data.folders import ImageFolder, image_folder
from ortops.engine.training.padding import Pad

__all__ = [
    "Color",
    "Crop",
    "CutMix",
    "Erase",
    "Flip",
    "ImageFolder",
    "MixUp",
    "Pad",
    "Rotate",
    "image_folder",
]
