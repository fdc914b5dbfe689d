"""SGLang's allocators: free pages as runs of slots, taken from the front, given back at an end (docs/sglang.md 2)."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvlab.cache.free_list import UNLIMITED, FreeList


class PagePool:
    """Free pages in order. Freed pages go to the BACK at page size 1, to the FRONT when paged.

    Parameters
    ----------
    num_pages : int or None
        pages 1 .. num_pages (0 is the dummy page); None: no end.
    page_size : int
        slots in a page; slot = page * page_size + offset.
    """

    def __init__(self, num_pages: int | None, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.renew()

    def renew(self) -> None:
        """Make all pages free, in the order of their ids."""
        self._fresh = range(1, (UNLIMITED if self.num_pages is None else self.num_pages) + 1)
        self._front: deque[np.ndarray] = deque()  # before the fresh ones
        self._back: deque[np.ndarray] = deque()  # after them
        self._count = len(self._fresh)

    def __len__(self) -> int:
        return self._count

    def pop(self, count: int) -> np.ndarray:
        """Take `count` pages from the front; the caller knows that they are there."""
        assert count <= self._count, "more pages popped than are free"
        self._count -= count
        parts: list[np.ndarray] = []
        count = self._pop_from(self._front, count, parts)
        fresh = self._fresh[:count]
        self._fresh = self._fresh[len(fresh) :]
        parts.append(np.arange(fresh.start, fresh.stop, dtype=np.int64))
        self._pop_from(self._back, count - len(fresh), parts)
        return np.concatenate(parts)

    @staticmethod
    def _pop_from(runs: deque[np.ndarray], count: int, parts: list[np.ndarray]) -> int:
        while count and runs:
            run = runs.popleft()
            if len(run) > count:
                runs.appendleft(run[count:])
                run = run[:count]
            parts.append(run)
            count -= len(run)
        return count

    def free(self, slots: np.ndarray) -> np.ndarray:
        """Give the pages of `slots` back as one group, in the order of the row; return the pages."""
        pages = slots if self.page_size == 1 else slots // self.page_size
        if self.page_size > 1 and len(pages):
            pages = pages[np.r_[True, pages[1:] != pages[:-1]]]
        if len(pages):
            (self._back.append if self.page_size == 1 else self._front.appendleft)(pages)
            self._count += len(pages)
        return pages

    @property
    def freed_to_front(self) -> bool:
        """Where freed pages go."""
        return self.page_size > 1

    def queue(self) -> FreeList:
        """Return the order of free pages as State keeps it."""
        queue = FreeList(self.num_pages)
        front, back = ([page for run in runs for page in run.tolist()] for runs in (self._front, self._back))
        queue.assign(front, self._fresh, back)
        return queue
