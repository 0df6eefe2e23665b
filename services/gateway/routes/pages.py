"""Pages of lists, in OpenAI's shape."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from moesaic.services.gateway.files.disk import NoSuch

Item = TypeVar("Item", bound=Any)  # it has an id


class Page(msgspec.Struct, kw_only=True):
    """One page of a list."""

    object: str = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(
    ids: Sequence[str],
    read: Callable[[str], Item],
    after: str | None,
    limit: int,
    *,
    ascending: bool = False,
    wanted: Callable[[Item], bool] = lambda item: True,
) -> Page:
    """Make the page behind a place in the list; items that are removed meanwhile are left out.

    Args:
        ids: all ids, the latest first.
        read: gives an item, or raises ``NoSuch``.
        after: the id of the last item of the page before; it need not be there any more.
        limit: items of a page.
        ascending: the list has the earliest first.
        wanted: true for the items of the list.
    """
    if ascending:
        ids = ids[::-1]
    if after is not None:
        ids = [i for i in ids if (i > after if ascending else i < after)]

    def items() -> Iterable[Item]:
        for item_id in ids:
            try:
                item = read(item_id)
            except NoSuch:
                continue
            if wanted(item):
                yield item

    found = list(islice(items(), limit + 1))
    data = found[:limit]
    return Page(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(found) > limit,
    )
