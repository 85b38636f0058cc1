"""A thousand requests, each in two English versions with different words, and in German."""

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FORMS = ("please {} me the {} {}", "would you {} that {} {}", "das {1} {2} bitte sofort {0}")
VERBS = """buy/purchase/kaufen find/locate/finden repair/mend/reparieren clean/wash/putzen
hide/conceal/verstecken show/display/zeigen choose/pick/wählen watch/observe/beobachten
destroy/wreck/zerstören draw/sketch/zeichnen"""
ADJECTIVES = """big/large/große small/little/kleine fast/quick/schnelle old/ancient/alte
cheap/inexpensive/billige pretty/beautiful/schöne new/modern/neue heavy/weighty/schwere
empty/vacant/leere strange/odd/seltsame"""
NOUNS = """car/automobile/auto house/home/haus bicycle/bike/fahrrad blanket/cover/laken
picture/image/bild gift/present/geschenk book/volume/buch boat/ship/schiff room/chamber/zimmer
cloth/fabric/tuch"""


class Phrases(NamedTuple):
    """Pairs of sentences with the same meaning, as word ids.

    Attributes:
        english: int64 of shape (1000, 2, 6): a request in two versions without common words.
        german: int64 of shape (1000, 2, 6): the request in German, and its first English version.
        words: The word of each id.
    """

    english: npt.NDArray[np.int64]
    german: npt.NDArray[np.int64]
    words: list[str]


def load() -> Phrases:
    """Returns all combinations of verb, adjective and noun, in a fixed shuffled order.

    Example:
        >>> phrases = load()
        >>> [" ".join(phrases.words[number] for number in said) for said in phrases.english[0]]
        ['please hide me the pretty cloth', 'would you conceal that beautiful fabric']
        >>> " ".join(phrases.words[number] for number in phrases.german[0, 0])
        'das schöne tuch bitte sofort verstecken'
    """
    slots = [[word.split("/") for word in slot.split()] for slot in (VERBS, ADJECTIVES, NOUNS)]
    said = [
        [form.format(*(word[i] for word in meaning)).split() for i, form in enumerate(FORMS)]
        for meaning in itertools.product(*slots)
    ]
    words, numbers = np.unique(said, return_inverse=True)
    mixed = np.random.default_rng(0).permutation(numbers.reshape(1000, 3, 6)).astype(np.int64)
    return Phrases(mixed[:, [0, 1]], mixed[:, [2, 0]], words.tolist())
