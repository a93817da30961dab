"""What is asked: questions about shared documents, which are the standard library's own sources.

Documents of one project begin alike, then go on with files of their own; a question is asked behind a
document. So prompts share prefixes of several lengths, as agents' do that work on one repository.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from tokenizers import Tokenizer

from engine_adapters.replay.sources import Library
from tests.accept.messages import BLOCK_SIZE_TOKENS

PREAMBLE_TOKENS = 12 * BLOCK_SIZE_TOKENS
DOCUMENT_TOKENS = 49 * BLOCK_SIZE_TOKENS
"""1,568, preamble included."""
QUESTION_TOKENS = (20, 60)
ANSWER_TOKENS = 12


class Request(Struct, frozen=True):
    """One prompt; `document` is the number of the one it is about."""

    id: str
    document: int
    tokens: list[int]


class Documents:
    """Documents as tokens, and questions about them. All follow from the seed and the Python at hand."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random = random.Random(seed)
        self._encode = tokenizer.encode
        self._asked = 0
        self.documents = list(self._cut())
        self._random.shuffle(self.documents)
        self._questions = [tokens for document in self.documents for tokens in _pieces(document)]

    def ask(self, document: int) -> Request:
        """A question that was never asked, about one document."""
        self._asked += 1
        length = self._random.randint(*QUESTION_TOKENS)
        question = self._random.choice(self._questions)[:length]
        return Request(f"q{self._asked:03}", document, self.documents[document] + question)

    def some(self, count: int, documents: Sequence[int]) -> list[Request]:
        """So many questions about these documents, in any order: the first of them most often, each at
        least once when there are enough questions."""
        named = list(documents)[:count]
        weights = [1 / (1 + rank / 4) for rank in range(len(documents))]
        named += self._random.choices(documents, weights, k=count - len(named))
        self._random.shuffle(named)
        return [self.ask(document) for document in named]

    def _cut(self) -> Iterator[list[int]]:
        library = Library()
        for names in library.projects.values():
            texts = [self._encode(library.text(name)).ids for name in names]
            whole = [ids for ids in texts if len(ids) >= DOCUMENT_TOKENS]
            if len(whole) > 1:
                preamble, *others = whole
                for ids in others:
                    yield preamble[:PREAMBLE_TOKENS] + ids[: DOCUMENT_TOKENS - PREAMBLE_TOKENS]


def _pieces(document: Sequence[int]) -> Iterator[list[int]]:
    """Stretches that serve as questions, from behind what documents share."""
    longest = QUESTION_TOKENS[1]
    for at in range(PREAMBLE_TOKENS, len(document) - longest, 4 * longest):
        yield list(document[at : at + longest])


def tokenizer_of(model: Path) -> Tokenizer:
    """The tokenizer that lies beside a model."""
    return Tokenizer.from_file(str(model / "tokenizer.json"))


class Ideal:
    """An infinite cache that all engines share: how much of a prompt could have been there."""

    def __init__(self) -> None:
        self._chains: dict[tuple[int, ...], int] = {}

    def possible_blocks(self, tokens: Sequence[int]) -> int:
        """Full blocks of the longest prefix that an earlier prompt had; the last token is always computed.
        The prompt is there from now on."""
        blocks = [
            tuple(tokens[at : at + BLOCK_SIZE_TOKENS])
            for at in range(0, len(tokens) - BLOCK_SIZE_TOKENS + 1, BLOCK_SIZE_TOKENS)
        ]
        chain, found, hit = 0, 0, True
        for block in blocks:
            known = (chain, *block)
            hit = hit and known in self._chains
            found += hit
            chain = self._chains.setdefault(known, len(self._chains) + 1)
        return min(found, (len(tokens) - 1) // BLOCK_SIZE_TOKENS)
