"""The whole way: requests go where the service's events say that their beginning is."""

from contextlib import ExitStack
from time import monotonic

from metaservice.cli.local.process import until
from tests.compat.fleet import BLOCK_SIZE, Fleet
from tests.compat.frontend import WORDS, Frontend, word_token
from tests.compat.judge import CaseFailed
from tests.compat.reference import Document
from tests.compat.site import MERGED
from tests.compat.stage import Stage

PROMPTS = 6
PROMPT_BLOCKS = 6
TOLD_S = 15.0
MODEL = "toy"


def frontend_follows(stage: Stage) -> str:
    """Two workers behind Dynamo's frontend, each relaying the merged stream of its engine: requests go to who
    has their beginning on its device, and when no device has anything, to who reaches the shared storage that
    has it; both ways round."""
    chance = stage.chance
    site = stage.site
    with ExitStack() as stack:
        fleets = [stack.enter_context(Fleet(site, model=MODEL, name=f"{MODEL}-{name}")) for name in "ab"]
        engines = [fleet.join(told=True, engine=name) for fleet, name in zip(fleets, MERGED, strict=True)]
        streams = {name: _merged(stage, name) for name in MERGED}
        words = [[chance.randrange(WORDS) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE)] for _ in range(PROMPTS)]
        texts = [" ".join(f"w{word}" for word in prompt) for prompt in words]
        prompts = [_document(fleets[0], prompt) for prompt in words]
        frontend = stack.enter_context(
            Frontend(site.dynamo, site.folder / "frontend", MODEL, BLOCK_SIZE, streams)
        )
        frontend.await_ready()
        blind = [frontend.complete(text) for text in texts]
        seen = [f"without events {blind.count(MERGED[0])}/{PROMPTS} go to the first worker"]
        for owner, other in ((0, 1), (1, 0)):
            for prompt in prompts:
                fleets[other].forget(engines[other], prompt, 0)
                fleets[owner].compute(engines[owner], prompt)
            seen.append(_follow(frontend, texts, MERGED[owner], "on a device"))
        for prompt in prompts:
            fleets[1].forget(engines[1], prompt, 0)
        for owner, other in ((0, 1), (1, 0)):
            for prompt in prompts:
                if fleets[other].truth.stored(prompt.keys[0]):
                    fleets[other].remove(prompt.keys)
                fleets[owner].write(prompt)
            seen.append(_follow(frontend, texts, MERGED[owner], "in shared storage only"))
        return "; ".join(seen)


def _follow(frontend: Frontend, texts: list[str], owner: str, where: str) -> str:
    """Once the events arrived, all requests go to the owner, twice. Raises CaseFailed."""
    went: list[str] = []
    for _ in until(monotonic() + TOLD_S):
        went = [frontend.complete(text) for text in texts]
        if went.count(owner) == len(texts):
            break
    again = [frontend.complete(text + " w1 w2 w3") for text in texts]
    if went.count(owner) != len(texts) or again.count(owner) != len(texts):
        raise CaseFailed(f"{where} of {owner}: requests went to {went}, then {again}")
    return f"{where} of {owner}: {again.count(owner)}/{len(texts)}"


def _merged(stage: Stage, engine: str) -> str:
    """Where the leader serves the merged stream of an engine. Raises CaseFailed."""
    for _ in until(monotonic() + TOLD_S):
        for stream in stage.site.events(stage.site.leader)["streams"]:
            if stream["kind"] == "merged" and stream["engine"] == engine:
                endpoint: str = stream["endpoint"]
                return endpoint
    raise CaseFailed(f"the leader serves no merged stream of {engine}")


def _document(fleet: Fleet, words: list[int]) -> Document:
    tokens = [word_token(word) for word in words]
    blocks = tuple(tuple(tokens[at : at + BLOCK_SIZE]) for at in range(0, len(tokens), BLOCK_SIZE))
    return Document(tuple(fleet.author.key() for _ in blocks), blocks)
