"""Synthetic data for the text task: two languages that share their letters.

People write short lower-case posts; the datacenter has articles with capitals, names and years. A
model that has seen only posts knows neither the articles' words nor what follows a capital or a
digit. Mixed federated learning repairs this.

A language is a list of invented words. Each word has one to three syllables (consonant, vowel,
sometimes a consonant), with letter frequencies of the language. The word of rank k is used in
proportion to 1/k. Posts and articles are sentences of such words.
"""

import numpy as np

from mixfl.data.formats.text import windows

_CONSONANTS = list("bcdfghjklmnprstvwz")
_VOWELS = list("aeiouy")
_TOPICS = 8
_TOPIC_WORDS = 12
_NAMES = 4  # that an article keeps coming back to
_LETTERS = np.array(_CONSONANTS + _VOWELS)


def texts(
    clients: int, per_client: int, central: int, *, length: int = 100, difficulty: float = 0.5,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:  # fmt: skip
    """Draws the posts of many clients, and articles.

    Returns two dicts `{"text": int32 [n, length + 1], "client": int64 [n]}`: code points with zeros
    after the end, rows grouped by client. In the second dict, each article is a client. The same
    arguments give the same bits.

    A client has Poisson(per_client) sequences, at least 1; the articles have `central` in total.
    The difficulty d sets the number of words of each language, 40 x 16^d (a quarter of them in
    both), and the share of mistyped letters in posts, 2 d %.

    Posts: sentences of 3 to 9 words, then " .", " ?" or " !"; 1 to 6 sentences. Each client has one
    of 8 topics, and 30 % of its words come from the topic's 12 words; 2 % are "<url>", whose
    brackets no article has. Articles: sentences of 5 to 14 words that begin with a capital; 8 % of
    the words are one of the article's 4 names, 4 % a year; some commas; then "." or, rarely, "?" or
    "!"; 20 to 60 sentences, but at most half of all central sequences.
    """
    rng = np.random.default_rng(seed)
    size = round(40 * 16**difficulty)
    common = _words(rng, size // 4)
    chat = _words(rng, size - len(common), common)
    prose = _words(rng, size - len(common), common)
    topics = [_words(rng, _TOPIC_WORDS) for _ in range(_TOPICS)]
    lists = [_shuffled(rng, common + own) for own in (chat, prose)]

    posts = [
        _posts(rng, lists[0], topics[i], max(1, n), length, 0.02 * difficulty)
        for i, n in zip(
            rng.integers(_TOPICS, size=clients), rng.poisson(per_client, clients), strict=True
        )
    ]
    articles, left = [], central
    while left > 0:
        article = windows(_article(rng, lists[1]), length)
        articles.append(article[: min(left, -(-central // 2))])
        left -= len(articles[-1])
    return _joined(posts), _joined(articles)


def _joined(parts: list[np.ndarray]) -> dict[str, np.ndarray]:
    client = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    return {"text": np.concatenate(parts), "client": client}


def _words(rng: np.random.Generator, n: int, but: list[str] | None = None) -> list[str]:
    """n different words that are not in `but`, with their own letter frequencies."""
    consonants = rng.dirichlet(np.full(len(_CONSONANTS), 0.7))
    vowels = rng.dirichlet(np.full(len(_VOWELS), 1.5))
    # Every letter is possible: otherwise a rare draw might allow too few different words.
    consonants = 0.9 * consonants + 0.1 / len(consonants)
    words: list[str] = []
    while len(words) < n:
        word = "".join(
            rng.choice(_CONSONANTS, p=consonants)
            + rng.choice(_VOWELS, p=vowels)
            + (rng.choice(_CONSONANTS, p=consonants) if rng.random() < 0.35 else "")
            for _ in range(rng.integers(1, 4))
        )
        if word not in words and word not in (but or []):
            words.append(word)
    return words


def _shuffled(rng: np.random.Generator, words: list[str]) -> list[str]:
    return [words[i] for i in rng.permutation(len(words))]


def _drawn(rng: np.random.Generator, words: list[str], n: int) -> np.ndarray:
    """n words; the one of rank k is drawn in proportion to 1/k."""
    weight = 1 / np.arange(1, len(words) + 1)
    return np.array(words, object)[rng.choice(len(words), n, p=weight / weight.sum())]


def _posts(rng, words, topic, sequences: int, length: int, typos: float) -> np.ndarray:
    """A client's posts, cut into that many sequences."""
    rows: list[np.ndarray] = []
    count = 0
    while count < sequences:
        sentences = 2 * (sequences - count) + 6  # about as many as needed
        sizes = rng.integers(3, 10, sentences)
        n = int(sizes.sum())
        drawn = np.where(rng.random(n) < 0.3, _drawn(rng, topic, n), _drawn(rng, words, n))
        drawn[rng.random(n) < 0.02] = "<url>"
        marks = np.array([".", "?", "!"], object)[rng.choice(3, sentences, p=(0.6, 0.25, 0.15))]
        said = [
            " ".join([*part, mark])
            for part, mark in zip(np.split(drawn, np.cumsum(sizes)[:-1]), marks, strict=True)
        ]
        said = _mistyped(rng, "\n".join(said), typos).split("\n")
        at = 0
        while at < sentences and count < sequences:
            step = int(rng.integers(1, 7))
            rows.append(windows(" ".join(said[at : at + step]), length)[: sequences - count])
            count += len(rows[-1])
            at += step
    return np.concatenate(rows)


def _mistyped(rng: np.random.Generator, text: str, rate: float) -> str:
    letters = np.array(list(text))
    hit = np.flatnonzero(rng.random(len(letters)) < rate)
    hit = hit[np.isin(letters[hit], _LETTERS)]
    letters[hit] = rng.choice(_LETTERS, len(hit))
    return "".join(letters)


def _article(rng: np.random.Generator, words: list[str]) -> str:
    sizes = rng.integers(5, 15, rng.integers(20, 61))
    n = int(sizes.sum())
    names = np.array([w.capitalize() for w in _words(rng, _NAMES)], object)
    kind = rng.random(n)
    drawn = _drawn(rng, words, n)
    drawn = np.where(kind < 0.08, names[rng.integers(_NAMES, size=n)], drawn)
    years = rng.integers(1700, 2025, n).astype(str).astype(object)
    drawn = np.where((kind >= 0.08) & (kind < 0.12), "in " + years, drawn)
    drawn = np.where(kind >= 0.93, drawn + ",", drawn)
    marks = rng.choice([".", "?", "!"], len(sizes), p=(0.96, 0.02, 0.02))
    sentences = []
    for part, mark in zip(np.split(drawn, np.cumsum(sizes)[:-1]), marks, strict=True):
        sentence = " ".join(part).rstrip(",") + str(mark)
        sentences.append(sentence[0].upper() + sentence[1:])
    return " ".join(sentences)
