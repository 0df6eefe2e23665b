"""Users of edge sites, who know what they must be answered."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.system.asking import PAUSE_S, TYPED
from tests.system.asking import PROMPTS as SOME
from tests.waiting import HANG_S, until

SITES = ("agent-0", "agent-1", "agent-2")
KINDS = ("generate", "classify")
TOKENS = 16
NEAR = 1e-3  # sums of parts are added up in another order than in one process
PROMPTS = [
    *SOME,
    "def main():\n    print(",
    "What can I do to change my account, and how much does it cost?",
    "1 2 3 4 5 6 7",
    "They had not gone far along the river before they met an old man with a dog, " * 4,
    "the the the the",
    "Dear Sir, I have the honour to",
]
LABELS = ["sea travel", "money", "the weather"]
_salts = itertools.count()


@dataclass(frozen=True)
class SiteAnswer:
    """The end of one request.

    Attributes:
        tokens: generated ones.
        scores: probabilities of ``LABELS``.
        error: the code of a typed error.
        prompt: tokens of what was asked to go on from.
    """

    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    error: str | None = None
    prompt: tuple[int, ...] = ()

    def equals(self, other: "SiteAnswer") -> bool:
        """Compare tokens exactly, and probabilities nearly."""
        return (self.tokens, self.error, len(self.scores)) == (
            other.tokens,
            other.error,
            len(other.scores),
        ) and all(abs(a - b) < NEAR for a, b in zip(self.scores, other.scores, strict=True))


async def asked(client: httpx.AsyncClient, number: int, kind: str, site: str = "") -> SiteAnswer:
    """Ask a question of a kind, ``generate`` or ``classify``, at a site; no KV is shared with other requests."""
    prompt = PROMPTS[number]
    body: dict[str, Any] = {"model": "demo", "cache_salt": f"{site} {next(_salts)}"}
    if kind == "generate":
        body |= {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        path, body = "/v1/completions", body | {"return_token_ids": True}
    else:
        path, body = "/v1/classify", body | {"input": prompt, "labels": LABELS}
    response = await client.post(path, json=body, headers={"X-Moesaic-Site": site} if site else {})
    told = response.json()
    if response.status_code != 200:
        return SiteAnswer(error=told["error"]["code"])
    if kind == "generate":
        choice = told["choices"][0]
        prompt_ids = tuple(choice["prompt_token_ids"])
        return SiteAnswer(tokens=tuple(choice["token_ids"]), prompt=prompt_ids)
    scores = {each["label"]: each["prob"] for each in told["data"][0]["labels"]}
    return SiteAnswer(scores=tuple(scores[label] for label in LABELS))


class RightAnswers:
    """The answers of one process that holds all experts."""

    def __init__(self, known: dict[tuple[int, str], SiteAnswer]) -> None:
        self._known = known

    @classmethod
    async def of(cls, url: str) -> "RightAnswers":
        """Ask everything once."""
        async with site_client(url) as client:
            known = {
                (number, kind): await asked(client, number, kind)
                for number in range(len(PROMPTS))
                for kind in KINDS
            }
        assert not any(answer.error for answer in known.values()), known
        return cls(known)

    def check(self, number: int, kind: str, site: str, answer: SiteAnswer) -> None:
        """Fail unless an answer is right."""
        right = self._known[number, kind]
        assert answer.equals(right), f"{kind} {number} at {site}: {answer}, not {right}"

    async def check_all(self, url: str, sites: Sequence[str] = SITES) -> None:
        """Ask everything at each site, several questions at a time."""

        async def one(client: httpx.AsyncClient, site: str, kind: str) -> None:
            for number in range(len(PROMPTS)):
                self.check(number, kind, site, await asked(client, number, kind, site))

        async with site_client(url) as client, asyncio.TaskGroup() as asking:
            for site in sites:
                for kind in KINDS:
                    asking.create_task(one(client, site, kind))

    @property
    def generated(self) -> list[SiteAnswer]:
        """Give all generations."""
        return [self._known[number, "generate"] for number in range(len(PROMPTS))]


class SiteLoad:
    """A user at each of some sites, who asks one question after the other, of both kinds in turn."""

    def __init__(self, sites: Sequence[str]) -> None:
        self.answered = dict.fromkeys(sites, 0)
        self.refused = dict.fromkeys(sites, 0)  # with a typed error

    async def round(self) -> None:
        """Wait until each user has asked, and been answered, once more."""
        wanted = {site: count + 2 for site, count in self.answered.items()}  # one is under way
        await until(lambda: all(self.answered[site] >= n for site, n in wanted.items()))


@asynccontextmanager
async def users_at(
    url: str,
    right: RightAnswers,
    sites: Sequence[str] = SITES,
    typed: Collection[str] = TYPED,
) -> AsyncIterator[SiteLoad]:
    """Have users ask for the length of the block, and once more after it; every answer is right or a typed error."""
    done, load = asyncio.Event(), SiteLoad(sites)

    async def again_and_again(client: httpx.AsyncClient, site: str) -> None:
        for at in itertools.count(sites.index(site)):
            if done.is_set():
                return
            number, kind = at % len(PROMPTS), KINDS[at // 3 % 2]
            answer = await asked(client, number, kind, site)
            if answer.error in typed:
                load.refused[site] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            right.check(number, kind, site, answer)
            load.answered[site] += 1
            await asyncio.sleep(PAUSE_S)

    async with site_client(url) as client, asyncio.TaskGroup() as asking:
        for site in sites:
            asking.create_task(again_and_again(client, site))
        await until(lambda: all(load.answered.values()))
        yield load
        await load.round()
        done.set()


def site_client(url: str) -> httpx.AsyncClient:
    """Make a client that waits long."""
    return httpx.AsyncClient(base_url=url, timeout=HANG_S)
