"""From what a person wrote to token ids that the model can take, and back to text.

Bad prompts are refused here, before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.engine.request import Request, RequestError
from kvlab.prompts import Prompt

if TYPE_CHECKING:
    from kvlab.engine.models import Loaded

LONGEST_CHARACTER = 4  # tokens, as UTF-8 has no more bytes; what takes more is broken, not unfinished


class Reader:
    """Reads prompts for one model and one pool.

    Attributes
    ----------
    positions : int or None
        the longest sequence that the model has positions for.
    end_ids : frozenset of int
        tokens on which the model's answers end.
    """

    def __init__(self, loaded: Loaded, num_tokens: int) -> None:
        self.tokenizer, self.num_tokens = loaded.tokenizer, num_tokens
        self.vocab_size, self.positions = loaded.vocab_size, loaded.max_position
        self.end_ids = frozenset(_end_ids(loaded))

    def requests(self, prompts: Sequence[Any], max_new_tokens: int, ignore_eos: bool) -> list[tuple[Request, list[int]]]:  # noqa: FBT001
        """Return complete requests with their token ids.

        Raises
        ------
        RequestError
            naming the first prompt that cannot run, and why.
        """
        single = isinstance(prompts, (str, Mapping, Request, Prompt))
        anything: object = prompts
        if not single and not isinstance(anything, Sequence | np.ndarray):
            msg = f"the prompts are {type(prompts).__name__}: give a list of prompts."
            raise RequestError(msg)
        if single or (len(prompts) and isinstance(prompts[0], (int, np.integer, Mapping))):
            msg = "the prompts are one prompt, not a list of prompts: put it into brackets, as in generate([prompt])."
            raise RequestError(msg)
        out = []
        for number, prompt in enumerate(prompts):
            request = prompt if isinstance(prompt, Request) else Request(prompt)
            request = replace(
                request,
                max_new_tokens=max_new_tokens if request.max_new_tokens is None else request.max_new_tokens,
                ignore_eos=ignore_eos if request.ignore_eos is None else request.ignore_eos,
            )
            if isinstance(request.prompt, Prompt) and not request.parts:
                request.parts = request.prompt.parts
            try:
                ids = self._ids(request.prompt)
                self._check(request, ids)
            except RequestError as error:
                msg = f"prompt {number}: {error}" if len(prompts) > 1 else str(error)
                raise RequestError(msg) from None
            out.append((request, ids))
        return out

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens; empty if the model has no tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _ids(self, prompt: Any) -> list[int]:  # noqa: ANN401 - a prompt in any of its forms
        if isinstance(prompt, Prompt):
            return list(prompt.ids)
        chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping)
        if isinstance(prompt, str) or chat:
            if self.tokenizer is None:
                msg = "this model has no tokenizer, so it reads no text: give it token ids."
                raise RequestError(msg)
            return self._chat(prompt) if chat else list(self.tokenizer.encode(prompt))
        try:
            ids = np.asarray(prompt)
        except (TypeError, ValueError) as error:
            ids = np.array(str(error))
        if ids.size == 0:
            return []
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            msg = "a prompt is a list of token ids (whole numbers), a text, or a list of messages (dicts with role and content)."
            raise RequestError(msg)
        return [int(i) for i in ids]

    def _chat(self, messages: Any) -> list[int]:  # noqa: ANN401 - messages as templates take them
        tokenizer: Any = self.tokenizer
        try:
            ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        except Exception as error:
            msg = f"the chat template cannot render these messages ({type(error).__name__}: {error}): give token ids or a text."
            raise RequestError(msg) from error
        return [int(i) for i in ids]

    def _check(self, request: Request, ids: list[int]) -> None:
        most = self.num_tokens if self.positions is None else min(self.num_tokens, self.positions)
        new = request.max_new_tokens
        if not ids:
            msg = "it is empty: give it at least one token."
        elif not isinstance(new, (int, np.integer)) or new < 1:
            msg = f"max_new_tokens is {new!r}: ask for at least 1 new token."
        elif len(ids) > most:
            what = "the pool has room for" if most == self.num_tokens else "the model has positions for"
            msg = f"it is {len(ids):,} tokens long and {what} {most:,}: shorten it."
        elif min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            msg = f"token id {wrong} is outside the vocabulary of {self.vocab_size:,}: was it made with another tokenizer?"
        else:
            return
        raise RequestError(msg)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:  # noqa: ANN401 - any tokenizer of transformers
    """Return what each token adds to the text, special tokens as they are written.

    A character of several tokens stands at its last one. The tokens before a piece are decoded with it and taken off again,
    because some tokenizers write a piece differently at the start of a text.
    """

    def decode(begin: int, end: int) -> str:
        return str(tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    texts = [""] * len(ids)
    before, begin = 0, 0  # the piece before, and the one being gathered
    for at in range(len(ids)):
        text = decode(before, at + 1)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and at + 1 - begin < LONGEST_CHARACTER and at + 1 < len(ids):
            continue
        texts[at] = text[len(decode(before, begin)) :]
        before, begin = begin, at + 1
    return texts


def _end_ids(loaded: Loaded) -> list[int]:
    """Tokens that end an answer: those of transformers' generate(), and the tokenizer's (in chat models the end of a turn)."""
    sources = (
        getattr(loaded.model.generation_config, "eos_token_id", None),
        getattr(loaded.model.config, "eos_token_id", None),
        getattr(loaded.tokenizer, "eos_token_id", None),
    )
    ids: list[int] = []
    for source in sources:
        ids += source if isinstance(source, (list, tuple)) else [] if source is None else [int(source)]
    return ids
