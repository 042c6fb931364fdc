"""Near-duplicates: tasks whose statements say the same in almost the same words.

Statements are compared by their sets of five consecutive words, case and punctuation aside. Equal sets of words in
equal order are exact duplicates. For the others MinHash and its bands only propose pairs; a pair counts when the
Jaccard similarity of the two sets, computed from the sets themselves, reaches the threshold.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.tasks.prompt import statement_of
from engine.types import Task

Hashes = NDArray[np.uint64]

WORDS = 5  # of a shingle
BANDS, ROWS = 32, 4  # a pair of similarity 0.7 shares a band with probability 0.9998, one of 0.5 with 0.87
_SEED = 20240229
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tasks, by their places, and how similar their statements are; 1.0 where they are the same words."""

    first: int
    second: int
    similarity: float


@dataclass(frozen=True, slots=True)
class Clusters:
    """Tasks that belong together: each task's cluster, by the place of its first member, and the pairs that join them.

    The pairs are a spanning forest: as many as it takes, not every pair that is similar.
    """

    of: tuple[int, ...]
    pairs: tuple[Pair, ...]
    shingles: tuple[Hashes, ...]

    def members(self) -> dict[int, list[int]]:
        """The clusters: the places of each one's tasks, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for place, first in enumerate(self.of):
            found[first].append(place)
        return dict(found)

    def similarity(self, first: int, second: int) -> float:
        """The Jaccard similarity of two tasks' statements."""
        return jaccard(self.shingles[first], self.shingles[second])


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, numbers included."""
    return _WORD.findall(text.lower())


def jaccard(first: Hashes, second: Hashes) -> float:
    """The similarity of two sets, each sorted and without repetition: 1.0 for equal ones, also for two empty ones."""
    shared = np.intersect1d(first, second, assume_unique=True).size
    total = first.size + second.size - shared
    return 1.0 if total == 0 else float(shared / total)


def cluster(tasks: Sequence[Task], threshold: float = 0.7) -> Clusters:
    """Put tasks together whose statements are similar, directly or through others. Raises ValueError."""
    return cluster_texts([statement_of(task) for task in tasks], threshold)


def cluster_texts(texts: Sequence[str], threshold: float) -> Clusters:
    """`cluster` for bare statements. Raises ValueError for a threshold that is not above 0 and at most 1."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
    shingle = Shingles(WORDS)
    words = [words_of(text) for text in texts]
    sets = [shingle(listed) for listed in words]
    forest = _Forest(len(texts))
    seen: dict[str, int] = {}
    firsts = []
    for place, listed in enumerate(words):
        # A statement without any word is told from others by its characters.
        first = seen.setdefault(" ".join(listed) or f"\0{texts[place]}", place)
        if first == place:
            firsts.append(place)
        else:
            forest.join(Pair(first, place, 1.0))
    for first, second in _candidates(sets, [place for place in firsts if sets[place].size]):
        if forest.root(first) != forest.root(second):
            similarity = jaccard(sets[first], sets[second])
            if similarity >= threshold:
                forest.join(Pair(first, second, similarity))
    return Clusters(tuple(forest.root(place) for place in range(len(texts))), tuple(forest.pairs), tuple(sets))


class Shingles:
    """From words to the sorted hashes of every `length` consecutive ones; of all of them where there are fewer."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._words: dict[str, int] = {}
        rng = np.random.default_rng(_SEED + 1)
        self._weights = rng.integers(1, 1 << 63, size=length, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

    def __call__(self, words: Sequence[str]) -> Hashes:
        return np.unique(self.ordered(words))

    def ordered(self, words: Sequence[str]) -> Hashes:
        """A hash for each place where `length` words begin."""
        if not words:
            return np.empty(0, np.uint64)
        hashed = np.fromiter(map(self._hash, words), np.uint64, len(words))
        count, length = max(1, len(words) - self.length + 1), min(self.length, len(words))
        total = np.full(count, length, np.uint64)
        for offset in range(length):
            total += hashed[offset : offset + count] * self._weights[offset]
        total ^= total >> np.uint64(29)
        total *= np.uint64(0xBF58476D1CE4E5B9)
        return total ^ (total >> np.uint64(32))

    def _hash(self, word: str) -> int:
        found = self._words.get(word)
        if found is None:
            digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            found = self._words[word] = int.from_bytes(digest, "little")
        return found


def signature() -> Callable[[Hashes], NDArray[np.uint32]]:
    """A function from a set to its MinHash: BANDS * ROWS minima under fixed hash functions."""
    rng = np.random.default_rng(_SEED)
    factors = rng.integers(0, 1 << 63, size=(BANDS * ROWS, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    terms = rng.integers(0, 1 << 63, size=(BANDS * ROWS, 1), dtype=np.uint64)

    def minima(hashes: Hashes) -> NDArray[np.uint32]:
        return ((factors * hashes + terms) >> np.uint64(32)).min(axis=1).astype(np.uint32)

    return minima


def _candidates(sets: Sequence[Hashes], places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs that share a band, each with an earlier task first."""
    minima = signature()
    buckets: dict[bytes, list[int]] = defaultdict(list)
    for place in places:
        found = minima(sets[place])
        keys = [bytes([band]) + found[band * ROWS : (band + 1) * ROWS].tobytes() for band in range(BANDS)]
        for other in sorted(set().union(*(buckets[key] for key in keys))):
            yield other, place
        for key in keys:
            buckets[key].append(place)


class _Forest:
    """Sets that are joined; the root of each is its first member."""

    def __init__(self, size: int) -> None:
        self.parents = list(range(size))
        self.pairs: list[Pair] = []

    def root(self, place: int) -> int:
        while self.parents[place] != place:
            self.parents[place] = self.parents[self.parents[place]]
            place = self.parents[place]
        return place

    def join(self, pair: Pair) -> None:
        one, other = sorted((self.root(pair.first), self.root(pair.second)))
        if one != other:
            self.parents[other] = one
            self.pairs.append(pair)
