"""Data sets for `fit`, `evaluate` and `predict`: folders of images, and changes of images."""

from ortops.data.augmentation import Color, Crop, CutMix, Erase, Flip, MixUp, Rotate
from ortops.data.folders import ImageFolder, image_folder

__all__ = [
    "Color",
    "Crop",
    "CutMix",
    "Erase",
    "Flip",
    "ImageFolder",
    "MixUp",
    "Rotate",
    "image_folder",
]
